"""The command line: T5X's flags without T5X, and a sentence for what goes wrong."""

import subprocess
import sys

import pytest

from t5x_fwdloss.standalone import command_line

CONFIGS = "t5x_fwdloss/configs/standalone"
# A network and batches that compile in seconds, over the shipped files.
SMALL = """
from __gin__ import dynamic_registration
from t5x_fwdloss.standalone import network
network.T5Config:
  emb_dim = 16
  num_heads = 2
  head_dim = 8
  mlp_dim = 32
  num_encoder_layers = 1
  num_decoder_layers = 1
TASK_FEATURE_LENGTHS = {'inputs': 8, 'targets': 16}
BATCH_SIZE = 4
"""


def run(script, folder, *arguments):
    """Runs a script from an unrelated folder: (status, what it said)."""
    found = subprocess.run(
        [sys.executable, "-m", f"t5x_fwdloss.standalone.{script}", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.returncode, found.stderr


def test_gin_flags_are_rewritten_as_t5x_rewrites_them():
    rewritten = command_line.rewrite_gin_flags(
        ["train", "--gin_file=a.gin", "--gin.MODEL_DIR='/x=y'", "--gin.A.b = 3", "-v"]
    )
    assert rewritten == [
        "train",
        "--gin_file=a.gin",
        "--gin_bindings=MODEL_DIR = '/x=y'",
        "--gin_bindings=A.b  =  3",
        "-v",
    ]
    with pytest.raises(ValueError, match="needs =VALUE: got '--gin.MODEL_DIR'"):
        command_line.rewrite_gin_flags(["train", "--gin.MODEL_DIR"])


def test_train_and_analyze_run_from_anywhere_by_their_gin_files(tmp_path):
    (tmp_path / "small.gin").write_text(SMALL)
    model_dir, output_dir = tmp_path / "model", tmp_path / "analysis"
    files = [f"--gin_file={CONFIGS}/tiny.gin", "--gin_file=small.gin"]
    status, said = run(
        "train",
        tmp_path,
        f"--gin_file={CONFIGS}/train.gin",
        *files,
        f"--gin.MODEL_DIR='{model_dir}'",
        "--gin.TRAIN_STEPS=2",
        "--gin.NUM_EVAL_BATCHES=1",
    )
    assert status == 0, said
    assert "Step 2: train loss" in said
    assert (model_dir / "checkpoint_2" / "state").is_dir()
    assert "TRAIN_STEPS = 2" in (model_dir / "config.gin").read_text()
    status, said = run(
        "analyze",
        tmp_path,
        f"--gin_file={CONFIGS}/analyze.gin",
        *files,
        f"--gin.CHECKPOINT_PATH='{model_dir}'",
        f"--gin.ANALYSIS_OUTPUT_DIR='{output_dir}'",
        "--gin.NUM_BATCHES=1",
        "--gin.MEASUREMENTS=[@DirectionalDerivatives()]",
    )
    assert status == 0, said
    assert (output_dir / "results.json").exists()
    assert "checkpoint_2" in (output_dir / "results.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], f"No --gin_file was given: the run file is {CONFIGS}/train.gin"),
        (
            [f"--gin_file={CONFIGS}/train.gin"],
            "needs values for MODEL (the file of a model",
        ),
        (
            [f"--gin_file={CONFIGS}/train.gin", "--gin.MODEL_DIR"],
            "--gin.NAME needs =VALUE",
        ),
        (["--gin_file=nowhere.gin"], "There is no gin file nowhere.gin"),
        (
            [
                *(f"--gin_file={CONFIGS}/{name}.gin" for name in ("train", "tiny")),
                "--gin.MODEL_DIR='model'",
                "--gin.MIXTURE_OR_TASK_NAME='g2p'",
            ],
            "MIXTURE_OR_TASK_NAME must be a registered SeqIO task",
        ),
    ],
    ids=["no file", "no model", "no value", "unknown file", "unknown task"],
)
def test_bad_input_ends_with_a_sentence(arguments, sentence, tmp_path):
    status, said = run("train", tmp_path, *arguments)
    assert status == 1
    assert sentence in said
    assert "Traceback" not in said
    assert not (tmp_path / "model").exists()
