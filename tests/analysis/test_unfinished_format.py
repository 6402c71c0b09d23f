"""The format of what a run leaves unfinished: known by its members, checked first."""

import jax.numpy as jnp
import pytest
from stops import Killed

from t5x_fwdloss import curvature
from t5x_fwdloss.analysis.store import folder, records, saved_state

from . import runs

START = {"kernel": jnp.arange(1.0, 41.0)}

ARRAY = {"shape", "values"}
BASIS = {"on_host", "vectors"}
KRYLOV = {
    "basis": BASIS,
    "projected": ARRAY,
    "num_expanded": None,
    "num_products": None,
}
CHAIN = {"number", "last", "before", "alphas", "betas"}
# What is saved in format 5 of each state; None where it has no names in it.
MEMBERS = {
    "EigenpairsState": {"space": KRYLOV, "checked": {"largest", "smallest"}}
    | dict.fromkeys(("history", "num_fresh", "num_restarts"))
    | {"missing": {"largest", "smallest"}, "grow_until": None, "crowded": None}
    | {"chain": CHAIN},
    "SlqState": {"space": KRYLOV}
    | dict.fromkeys(("nodes", "weights", "num_finished", "num_exhausted")),
    "HutchppState": {"space": BASIS}
    | dict.fromkeys(("exact", "samples", "squares", "num_sketched")),
    "XtraceState": {"space": BASIS}
    | dict.fromkeys(("r", "w", "h", "quadratic", "squares"), ARRAY),
    "ProbeState": dict.fromkeys(("mean", "spread", "leaf_samples", "square_norms")),
    "HutchinsonState": {"samples": None},
}


def members(tree):
    """The names of all levels; a set where no value has names in it."""
    if not isinstance(tree, dict):
        return None
    found = {name: members(value) for name, value in tree.items()}
    return found if any(found.values()) else set(found)


def test_a_state_with_other_members_has_another_format():
    """Where this fails, a saved state changed: count FORMAT up, then write down how."""
    product, found = lambda v: {"kernel": 2.0 * v["kernel"]}, {}

    def note(state):
        if getattr(state, "chain", True):
            saved, _ = curvature.pack(state)
            found[type(state).__name__] = members(saved)

    # Long enough to look for more outside of the space.
    options = {"num_largest": 2, "num_smallest": 0, "tolerance": 1e-3}
    scaled = lambda v: {"kernel": START["kernel"] * v["kernel"]}
    start = curvature.random_like(0, START, "normal")
    curvature.eigenpairs(scaled, start, on_step=note, **options)
    curvature.slq(product, START, 0, num_probes=1, num_steps=1, on_step=note)
    for estimate in (curvature.hutchpp_trace, curvature.xtrace):
        estimate(product, START, 0, num_probes=2, on_step=note)
    curvature.probe_estimates(
        product, START, 0, num_probes=2, diagonal=True, on_step=note
    )
    curvature.hutchinson_trace(product, START, 0, num_probes=2, on_step=note)
    assert folder.FORMAT == 5
    assert found == {
        state: saved if any(saved.values()) else set(saved)
        for state, saved in MEMBERS.items()
    }


@pytest.mark.parametrize("other", [None, folder.FORMAT + 1])
def test_a_run_that_another_version_left_unfinished_is_refused_and_kept(
    tmp_path, monkeypatch, other
):
    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(saved_state.SavedState, "save", die)
        with pytest.raises(Killed):
            runs.run(tmp_path, save_seconds=0)
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
