"""The format of what a run leaves unfinished: known by its members, checked first."""

import jax.numpy as jnp
import pytest

from t5x_fwdloss import curvature
from t5x_fwdloss.analysis.store import folder, records, saved_state

from . import runs

START = {"kernel": jnp.arange(1.0, 41.0)}

KRYLOV = {
    "gram": "",
    "projected": "",
    "vectors": "",
    "space": "size on_host num_expanded num_products num_passes num_measured "
    "orthogonality",
    "orthogonality": "error num_checks restarted subtracted uncertainties",
}
BASIS = {"vectors": "", "space": "size on_host"}
# What is saved in format 4, by name of the dictionary it is in.
MEMBERS = {
    "EigenpairsState": KRYLOV
    | {"history": "", "num_fresh": "", "num_restarts": ""}
    | {"chain": "", "couplings": "", "num_checks": "", "crowded": ""}
    | {"checked": "largest smallest"},
    "SlqState": KRYLOV
    | {"nodes": "", "weights": "", "num_products": "", "num_exhausted": ""},
    "HutchppState": BASIS
    | {"exact": "", "samples": "", "squares": "", "num_sketched": ""},
    "XtraceState": BASIS
    | dict.fromkeys(("r", "w", "h", "quadratic", "squares", "num_probes"), ""),
    "ProbeState": dict.fromkeys(("vectors", "leaf_samples", "square_norms"), ""),
}


def members(tree, inside=()):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from members(value, (*inside, name))
        yield *inside[-1:], name


def test_a_state_with_other_members_has_another_format():
    """Where this fails, a saved state changed: count FORMAT up, then write down how."""
    product, found = lambda v: {"kernel": 2.0 * v["kernel"]}, {}

    def note(state):
        saved = state.arrays() | getattr(state, "metadata", dict)()
        found.setdefault(type(state).__name__, set(members(saved)))

    curvature.eigenpairs(product, START, max_steps=1, on_step=note)
    curvature.slq(product, START, 0, num_probes=1, num_steps=1, on_step=note)
    for estimate in (curvature.hutchpp_trace, curvature.xtrace):
        estimate(product, START, 0, num_probes=2, on_step=note)
    curvature.probe_estimates(
        product, START, 0, num_probes=2, diagonal=True, on_probe=note
    )
    assert folder.FORMAT == 4
    assert found == {
        state: {(name,) for name in saved if name != "orthogonality"}
        | {(name, part) for name in saved for part in saved[name].split()}
        for state, saved in MEMBERS.items()
    }


class Killed(BaseException):
    """Stands for a preemption in the middle of a run."""


@pytest.mark.parametrize("other", [None, folder.FORMAT + 1])
def test_a_run_that_another_version_left_unfinished_is_refused_and_kept(
    tmp_path, monkeypatch, other
):
    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(saved_state.SavedState, "save", die)
        with pytest.raises(Killed):
            runs.run(tmp_path)
    claim = tmp_path / "unfinished" / "run.json"
    content = records.read(claim)
    content["unfinished_format"] = other
    if other is None:
        del content["unfinished_format"]
    records.write(claim, content)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(
        ValueError,
        match=rf"\(unfinished_format there is {other}, now {folder.FORMAT}\)",
    ):
        runs.run(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_what_another_version_finished_can_be_read(tmp_path, monkeypatch):
    assert runs.run(tmp_path) == 0
    monkeypatch.setattr(folder, "FORMAT", folder.FORMAT + 1)
    assert runs.run(tmp_path) == 0
