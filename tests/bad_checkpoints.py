"""Damages checkpoints and restores them as an analysis does; by hypothesis.

    python bad_checkpoints.py [NUMBER_OF_EXAMPLES [t5x]]

The analysis of the standalone host, or T5X's restoring in ours, ends with the parameters
of the undamaged checkpoint, or with one sentence and status 1. What ends otherwise raises.
"""

import contextlib
import io
import pathlib
import re
import shutil
import sys
import tempfile

import damage
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
from analysis import runs, toy
from analysis.test_killed_anywhere import DenseContext
from hypothesis import strategies as st

from t5x_fwdloss.analysis import Trace
from t5x_fwdloss.analysis.measurements import Context
from t5x_fwdloss.analysis.objective import preflight
from t5x_fwdloss.analysis.report import page
from t5x_fwdloss.command_line.exit_status import exit_status
from t5x_fwdloss.standalone import checkpoints

preflight.check_objective = lambda *_, **__: []
page.render = lambda *_: "the page"
Context.product = DenseContext.product
OPTIMIZER = optax.adam(0.1)


class Toy:
    """The toy's checkpoints, analyzed as the standalone host does it."""

    params = toy.parameters()
    objective = runs.objective()

    def restored(self, path, results):
        """The parameters after an analysis of them."""
        step, params = checkpoints.restore_params(str(path), self.params)
        assert step == 3
        assert checkpoints.find(str(path)).parent == path
        state = checkpoints.restore_optimizer(str(path), OPTIMIZER.init(self.params))
        same(state, OPTIMIZER.init(self.params))
        host = runs.host(checkpoint=str(path), step=step)
        measured = [Trace(num_probes=2, block_size=2)]
        given = {"objective": self.objective, "params": params, "host": host}
        assert runs.run(results, measurements=measured, **given) == 0
        return params


class T5X:
    """A tiny T5's checkpoints, restored by T5X."""

    def __init__(self):
        """The model, and T5X's initializer for it."""
        from t5x import partitioning, utils
        from t5x_models import subjects
        from t5x_models.test_networks import t5

        from t5x_fwdloss.t5x_host import checkpoint

        features = subjects.batch("encoder_decoder")
        model = subjects.ours("encoder_decoder", "custom_jvp", t5())
        where = partitioning.PjitPartitioner(num_partitions=1)
        initializer = utils.TrainStateInitializer(
            None,
            model.get_initial_variables,
            {name: x.shape for name, x in features.items()},
            where,
        )
        state = initializer.from_scratch(jax.random.PRNGKey(0))
        self.params = jax.tree.map(np.asarray, dict(state.params))

        def restore(path):
            cfg = utils.RestoreCheckpointConfig(
                str(path), mode="specific", dtype="float32"
            )
            return checkpoint.Restorer(initializer, where, cfg, True).restore()

        self.restore = restore

    def restored(self, path, results):
        """The parameters, which `results` does not get."""
        found = self.restore(path)
        assert found.step == 3
        return found.params


def same(found, wanted):
    """Equal to the bit."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def write(path, tree, step=3):
    """A checkpoint of a tree of parameters, with a state of the optimizer."""
    manager = checkpoints.open_manager(str(path))
    state = OPTIMIZER.init(jax.tree.map(jnp.zeros_like, tree))
    checkpoints.save(manager, step, tree, state)
    manager.close()


def other_trees(params):
    """Parameters that are not the model's, and whether that may be a right answer."""
    leaves, structure = jax.tree.flatten(params)

    def first(new):
        return jax.tree.unflatten(structure, [new(leaves[0]), *leaves[1:]])

    names = list(params)
    return {
        "NaN": first(lambda x: jnp.full_like(x, np.nan)),
        "infinite": first(lambda x: jnp.full_like(x, np.inf)),
        "shape": first(lambda x: jnp.zeros((*x.shape, 1))),
        "whole numbers": first(lambda x: jnp.ones(x.shape, jnp.int32)),
        "flags": first(lambda x: jnp.ones(x.shape, bool)),
        "missing": {names[0]: {}} | {k: params[k] for k in names[1:]},
        "extra": params | {"extra": jnp.ones(2)},
        "nested": {"params": params},
    }


def command(host, path, results):
    """The restoring as a command: status, what it said, the parameters."""
    said, found = io.StringIO(), []

    def analyze():
        found.append(host.restored(path, results))
        return 0

    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        status = exit_status("analyze", lambda: analyze, analyze)
    return status, said.getvalue(), found


COUNTS: dict[int, int] = {}


# T5X's restoring fails of files and of configurations alike: its words are kept.
OF_T5X = r"The checkpoint \S+ could not be read: .*\. Either a part of it is missing"


def answered(status, said):
    """One sentence, without names of other libraries' parts."""
    COUNTS[status] = COUNTS.get(status, 0) + 1
    assert status == 1, said
    assert re.fullmatch(r"analyze: [^\n]{10,900}\n", said), said
    said = re.sub(OF_T5X, "", said)
    assert not re.search(r"Error\b|[Tt]ensor[Ss]tore|subscript|object|driver", said), (
        said
    )


def check(root, host):
    """The law, of one example after the other."""

    @hypothesis.given(data=st.data())
    def answered_by_a_sentence_or_the_same_parameters(data):
        path, results = root / "here", root / "results"
        for old in (path, results):
            if old.is_symlink() or old.exists():
                damage.remove(old)
        shutil.copytree(root / "whole", path)
        for _ in range(data.draw(st.integers(1, 2))):
            if path.is_dir():
                hypothesis.note(data.draw(damage.of_folder(path, top=True)))
        status, said, found = command(host, path, results)
        hypothesis.note(said)
        if status == 0:
            COUNTS[0] = COUNTS.get(0, 0) + 1
            same(found[0], host.params)
        else:
            answered(status, said)
            assert not results.exists()

    return answered_by_a_sentence_or_the_same_parameters


def main(examples, kind="toy"):
    """Writes checkpoints, damages them, says how restoring ended."""
    host = T5X() if kind == "t5x" else Toy()
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        write(root / "whole", host.params)
        for name, tree in other_trees(host.params).items():
            write(root / name, tree)
            if kind == "t5x" and name in ("NaN", "infinite"):
                continue  # refused later, by what both hosts call
            status, said, _ = command(host, root / name, root / "results")
            sys.stdout.write(f"{name}: {said}")
            answered(status, said)
        damage.run(check(root, host), examples)
    sys.stdout.write(f"answered {COUNTS}\n")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["30"]))
