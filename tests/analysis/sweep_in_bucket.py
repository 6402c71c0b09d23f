"""A sweep of the toy model whose model folder and results are in a bucket.

    python -m tests.analysis.sweep_in_bucket gs://bucket/run

The same call again finds one checkpoint more. Prints the exit statuses and the steps that
were restored, as JSON.
"""

import json
import sys

from etils import epath

from t5x_fwdloss.analysis import Eigenpairs

from . import sweeps

STEPS = (100, 200, 300)
# Writes nothing in between, which takes most of the time in a bucket.
PAIRS = Eigenpairs(num_largest=1, num_smallest=0, max_steps=8)


def main(folder):
    """Writes checkpoints, measures, prints."""
    model_dir, restored = epath.Path(folder) / "model", []

    def load(path):
        restored.append(sweeps.step_of(path))
        return sweeps.load(path)

    def save(step, marker="commit_success.txt"):
        path = model_dir / f"checkpoint_{step}"
        path.mkdir(parents=True)
        (path / "state").write_text("parameters")
        # In a bucket a checkpoint is complete when it has this file.
        if marker:
            (path / marker).write_text("")

    def run():
        given = {"load": load, "measurements": [PAIRS]}
        status = sweeps.run(str(model_dir), f"{folder}/sweep", **given)
        return status, [restored.pop(0) for _ in list(restored)]

    save(STEPS[0])
    save(STEPS[1])
    save(STEPS[2], marker="")
    found = [run()]
    (model_dir / f"checkpoint_{STEPS[2]}" / "commit_success.txt").write_text("")
    found.append(run())
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
