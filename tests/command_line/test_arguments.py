"""The command line: T5X's flags without T5X, and a sentence for what goes wrong."""

import json
import math
import os
import re
import subprocess
import sys
import types

import gin
import pytest

from t5x_fwdloss.command_line import arguments
from t5x_fwdloss.standalone import train

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
LEARNING_RATE = 0.3
WARMUP_STEPS = 1
"""


# A terminal that can show nothing else.
ASCII = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}


def run(script, folder, *arguments):
    """Runs a script from an unrelated folder: (status, what it said and showed)."""
    found = subprocess.run(
        [sys.executable, "-m", f"t5x_fwdloss.standalone.{script}", *arguments],
        cwd=folder,
        env=os.environ | ASCII,
        capture_output=True,
        check=False,
    )
    return found.returncode, (found.stderr + found.stdout).decode("ascii")


def test_gin_flags_are_rewritten_as_t5x_rewrites_them():
    rewritten = arguments.rewrite_gin_flags(
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
        arguments.rewrite_gin_flags(["train", "--gin.MODEL_DIR"])


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
        f"--gin.COMPILATION_CACHE_DIR='{tmp_path / 'compiled'}'",
        "--gin.MEASUREMENTS=[@DirectionalDerivatives(), @Eigenpairs()]",
        "--gin.Eigenpairs.preconditioned=True",
        "--gin.Eigenpairs.num_smallest=0",
        "--gin.Eigenpairs.max_steps=2",
    )
    assert status == 0, said
    assert "Traceback" not in said
    # Its table, whose signs are others where the terminal has them.
    assert "gradient/slope" in said
    assert re.search(r"gradient/slope.* \+- ", said), said
    # One file for each function that took its time.
    assert len(list((tmp_path / "compiled").iterdir())) > 5
    document = json.loads((output_dir / "results.json").read_text())
    assert document["checkpoint"] == f"{model_dir}/checkpoint_2"
    # Adafactor's threshold at the step of the checkpoint, of the schedule of its files.
    numbers = document["measurements"][1]["results"]
    rate = 0.3 / math.sqrt(2)
    assert numbers["learning_rate"]["value"] == pytest.approx(rate, rel=1e-4)
    threshold = numbers["stability_threshold"]
    assert threshold["value"] == pytest.approx(2 / rate, rel=1e-4)
    assert (document["step"], threshold["unit"]) == (2, "1/η")


@pytest.fixture
def attempt(monkeypatch, tmp_path, capsys):
    """The script in this process: (status, what it said)."""
    monkeypatch.chdir(tmp_path)
    # The run file imports __main__, which is the script when that runs.
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "train", train.train, raising=False)

    def call(files, *bindings):
        values = types.SimpleNamespace(
            gin_file=[f"{CONFIGS}/{name}" for name in files],
            gin_bindings=list(bindings),
            gin_search_paths=["."],
        )
        status = arguments.attempt(
            train.train, values, train.RUN_FILE, train.REQUIRED_MACROS
        )
        return status, capsys.readouterr().err

    gin.clear_config()
    yield call
    gin.clear_config()


BOTH = ["train.gin", "tiny.gin"]
DIR = "MODEL_DIR = 'model'"


@pytest.mark.parametrize(
    ("files", "bindings", "sentence"),
    [
        ([], [], f"No --gin_file was given: the run file is {CONFIGS}/train.gin"),
        (["train.gin"], [], r"needs values for MODEL \(the file of a model"),
        (BOTH[::-1], [DIR], "for MODEL .* come after the run file, which resets it"),
        (["nowhere.gin"], [], f"There is no gin file {CONFIGS}/nowhere.gin"),
        (BOTH, [DIR, "network.T5Config.depth = 3"], "has no argument 'depth'"),
        (BOTH, [DIR, "MIXTURE_OR_TASK_NAME = 'g2p'"], "be a registered SeqIO task"),
        (BOTH, [DIR, "LOSS_IMPL = 'autodif'"], "autodiff, .*got .*'autodif'"),
    ],
    ids=["no file", "no model", "order", "unknown file", "typo", "task", "loss"],
)
def test_bad_input_ends_with_a_sentence(files, bindings, sentence, attempt, tmp_path):
    status, said = attempt(files, *bindings)
    assert status == 1
    assert re.search(sentence, said), said
    assert "In call to configurable" not in said
    assert not (tmp_path / "model").exists()


def test_a_model_file_alone_is_told_the_run_file():
    values = types.SimpleNamespace(
        gin_file=[f"{CONFIGS}/tiny.gin"], gin_bindings=[], gin_search_paths=["."]
    )
    gin.clear_config()
    with pytest.raises(ValueError, match=r"No gin file configures run: add .*run\.gin"):
        arguments.parse(run, values, "run.gin", {})
    gin.clear_config()


def test_a_bug_is_raised_and_not_dressed_up(attempt, monkeypatch):
    monkeypatch.setattr(train.data, "fixed_batches", dict.__getitem__)
    with pytest.raises(TypeError, match="descriptor"):
        attempt(BOTH, DIR)
