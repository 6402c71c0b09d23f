"""Analyzes a checkpoint in a bucket, into the bucket, and is stopped once in between.

    python -m tests.standalone.in_bucket gs://bucket/run LOCAL_DIR [train]

The checkpoint is copied there, or written there with `train`. Prints the exit statuses as
JSON: stopped, resumed, started once more, into LOCAL_DIR.
"""

import json
import pathlib
import sys

import optax
import stops
from etils import epath

from t5x_fwdloss import analysis, tasks
from t5x_fwdloss.standalone import analyze, data, train

from . import subjects

DATASET = data.DatasetConfig(tasks.TASK_NAME, {"inputs": 12, "targets": 24}, 8)
MEASUREMENTS = [
    analysis.Eigenpairs(
        num_largest=1,
        num_smallest=0,
        max_steps=4,
        save_eigenvectors=True,
        group="decoder/decoder_norm/.*",
    ),
    analysis.Diagonal(num_probes=2, block_size=1),
]


def copy(source, target):
    """Copies a folder into the bucket, file by file."""
    for path in pathlib.Path(source).rglob("*"):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())


def main(folder, local, how="copy"):
    """Trains, measures, prints."""
    trained = epath.Path(f"{folder}/model" if how == "train" else f"{local}_model")
    model = subjects.model({"loss_impl": "custom_jvp"})
    train.train(
        model=model,
        optimizer=optax.adam(0.02),
        dataset=DATASET,
        model_dir=str(trained),
        total_steps=2,
        eval_period=2,
        num_eval_batches=1,
        checkpoint_period=1,
        train_split="test",
        config_text="# gin",
    )

    if how == "copy":
        copy(trained, epath.Path(folder) / "model")

    def measure(output_dir):
        return analyze.analyze(
            model=model,
            dataset=DATASET,
            checkpoint_path=f"{folder}/model",
            output_dir=output_dir,
            measurements=MEASUREMENTS,
            num_batches=1,
            split="test",
            config_text="# gin",
        )

    stops.signal_at(2)
    places = [f"{folder}/analysis"] * 3 + [local]
    statuses = [measure(place) for place in places]
    sys.stdout.write("\n" + json.dumps(statuses) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
