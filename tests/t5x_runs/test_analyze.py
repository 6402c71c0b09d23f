"""The analysis run on the checkpoint of a T5X training run, and what it says to bad input."""

import concurrent.futures
import json
import re

import numpy as np
import pytest

# The time limit is for the shared runs, on a machine that is busy.
pytestmark = [pytest.mark.t5x, pytest.mark.timeout(900)]

RUN_FILE = "--gin_file=t5x_fwdloss/configs/runs/analyze.gin"
EXAMPLE = "--gin_file=t5x_fwdloss/configs/examples/cmudict_analyze.gin"
EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
# For a run whose machine code need not be fast: compiling takes most of its time.
QUICK = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


def arguments(project, checkpoint, name, *more):
    return [
        EXAMPLE,
        "--gin_file=my_network.gin",
        "--gin.NUM_BATCHES=2",
        "--gin.BATCH_SIZE=8",
        f"--gin.CHECKPOINT_PATH='{checkpoint}'",
        f"--gin.ANALYSIS_OUTPUT_DIR='{project.path / name}'",
        *more,
    ]


def line(checkpoint):
    """The line to the first checkpoint, which depends on no batch."""
    return [
        f"--gin.Landscape.directions=['checkpoint:{checkpoint[:-2]}0']",
        "--gin.Landscape.num_points=5",
    ]


@pytest.fixture(scope="module")
def analyzed(project, checkpoint):
    """One checkpoint on one device, by the real command, and on eight."""
    few = [
        "--gin.MEASUREMENTS=[@DirectionalDerivatives(), @Trace(), "
        "@LossComparison(), @Eigenpairs(), @Landscape(), @plane/Landscape()]",
        "--gin.DirectionalDerivatives.num_random=1",
        "--gin.DirectionalDerivatives.along_preconditioned_gradient=True",
        f"--gin.DirectionalDerivatives.checkpoints=['{checkpoint[:-2]}0']",
        "--gin.Trace.num_probes=2",
        "--gin.Trace.block_size=2",
        "--gin.LossComparison.implementations=['custom_vjp', 'custom_jvp']",
        "--gin.LossComparison.chunk_lengths=[8]",
        "--gin.LossComparison.num_rounds=1",
        "--gin.Eigenpairs.preconditioned=True",
        "--gin.Eigenpairs.num_largest=1",
        "--gin.Eigenpairs.num_smallest=0",
        "--gin.Eigenpairs.max_steps=1",
        "--gin.LEARNING_RATE_FN=@utils.create_learning_rate_scheduler()",
        *line(checkpoint),
        "--gin.Landscape.other_split='train'",
        "--gin.plane/Landscape.name='plane'",
        "--gin.plane/Landscape.directions=['preconditioned_gradient', 'random:0']",
        "--gin.plane/Landscape.num_points=3",
    ]

    # The folder of checkpoints, and what files of models that add parameters bind.
    folder = [
        f"--gin.CHECKPOINT_PATH='{project.path / 'stock'}'",
        "--gin.RestoreCheckpointConfig.fallback_to_scratch=True",
        "--gin.RestoreCheckpointConfig.assignment_map=(('.*wi.*', None),)",
    ]

    def start(run, name, env, more=()):
        done = run(
            "t5x_fwdloss.analyze",
            *arguments(project, checkpoint, name, *few, *more),
            **env,
        )
        assert done.status == 0, done.log[-3000:]
        return json.loads((project.path / name / "results.json").read_text())

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        one = pool.submit(start, project.command, "one", {})
        eight = pool.submit(start, project.run, "eight", EIGHT, folder)
        return one.result(), eight.result()


def test_another_split_has_the_numbers_of_a_run_on_it(project, checkpoint, analyzed):
    done = project.run(
        "t5x_fwdloss.analyze",
        *arguments(project, checkpoint, "train", "--gin.SPLIT='train'"),
        "--gin.MEASUREMENTS=[@Landscape()]",
        *line(checkpoint),
        **QUICK,
    )
    assert done.status == 0, done.log[-3000:]
    there = json.loads((project.path / "train" / "results.json").read_text())
    wanted, both = numbers(there), numbers(analyzed[0])
    found = {
        name: both["landscape", f"on_train/{name}"]
        for _, name in wanted
        if ("landscape", f"on_train/{name}") in both
    }
    assert {"loss", "accuracy", "barrier_height", "checkpoint_0/loss"} <= set(found)
    for name, value in found.items():
        assert value == pytest.approx(wanted["landscape", name], rel=1e-5, abs=1e-6)
    assert both["landscape", "loss"] != pytest.approx(found["loss"], rel=1e-3)
    other = analyzed[0]["fingerprint"]["other_batches"]
    assert other == {"train": there["batches_hash"]}
    arrays, alone = (
        np.load(project.path / x / "landscape.npz") for x in ("one", "train")
    )
    for name in ("losses", "accuracies", "losses_at_marks"):
        here = arrays[f"on_train/{name}"]
        np.testing.assert_allclose(here, alone[name], rtol=1e-5)


def numbers(results):
    """Every number that was measured, by measurement and name."""
    return {
        (measurement["name"], name): entry["value"]
        for measurement in results["measurements"]
        for name, entry in measurement["results"].items()
    }


def test_the_objective_is_t5x_s_own_evaluation_loss(project, analyzed):
    one, _ = analyzed
    assert one["step"] == 50
    assert one["normalizer"]["kind"] == "sum"
    # T5X reports the mean over its two batches, the same that are analyzed.
    wanted = 2 * project.losses("stock", "loss", "training_eval/cmudict_g2p")[50]
    got = numbers(one)["directional_derivatives", "loss"]
    assert got == pytest.approx(wanted, rel=1e-5)


def test_eight_devices_give_the_numbers_of_one(analyzed):
    one, eight = analyzed
    assert one["batches_hash"] == eight["batches_hash"]
    assert one["checkpoint"] == eight["checkpoint"]
    mine, theirs = numbers(one), numbers(eight)
    assert mine.keys() == theirs.keys()
    assert len(mine) > 5
    for name, value in mine.items():
        of_machine = name[1].endswith(("spread_over_batches", "time", "memory"))
        if not of_machine and "step_to_minimum" not in name[1]:
            assert theirs[name] == pytest.approx(value, rel=1e-5, abs=1e-4), name


def test_the_losses_are_compared_on_the_checkpoint(analyzed):
    one, _ = analyzed
    found = {k[1]: x for k, x in numbers(one).items() if k[0] == "loss_comparison"}
    for label in ("custom_jvp", "custom_vjp, chunks of 8", "custom_jvp, chunks of 8"):
        assert found[f"{label}/value_difference"] <= 1e-6
        assert 0 < found[f"{label}/gradient_difference"] <= 1e-5
        assert found[f"{label}/time"] > 0
        assert found[f"{label}/memory"] != found["custom_vjp/memory"]
    assert found["custom_jvp, chunks of 8/jvp_difference"] <= 1e-5
    assert "custom_vjp/jvp_difference" not in found


def test_adafactors_second_moment_is_read_from_the_checkpoint(analyzed):
    one, _ = analyzed
    found = numbers(one)
    of = lambda label: found["directional_derivatives", f"{label}/slope"]
    # Uphill, and less steep than the gradient itself; another direction than it.
    assert 0 < of("preconditioned_gradient") < 0.9 * of("gradient")


def test_the_threshold_is_that_of_the_schedule_at_the_checkpoints_step(analyzed):
    """The schedule is that of the training, whose warmup takes 100 steps."""
    for results in analyzed:
        found = results["measurements"][3]["results"]
        rate = 50 / 100 * 100**-0.5
        assert found["learning_rate"]["value"] == pytest.approx(rate, rel=1e-6)
        # Adafactor without momentum.
        assert found["stability_threshold"]["value"] == pytest.approx(2 / rate)
        assert found["stability_threshold"]["unit"] == "1/η"


def test_the_run_keeps_its_configuration_and_the_second_checkpoint(project, analyzed):
    one, _ = analyzed
    config = (project.path / "one" / "config.gin").read_text()
    assert "MODEL = @models.EncoderDecoderModel()" in config
    assert "LOSS_IMPL = 'custom_jvp'" in config
    assert any("checkpoint_0" in name for _, name in numbers(one))
    assert np.isfinite(list(numbers(one).values())).all()


BAD_INPUT = {
    "no checkpoint": (
        ["--gin.CHECKPOINT_PATH='{parent}/checkpoint_7'"],
        r"There is no checkpoint at CHECKPOINT_PATH = \S+checkpoint_7: \S+ has "
        r"\S*checkpoint_0, \S*checkpoint_50\.",
    ),
    "another network": (
        ["--gin.network.T5Config.emb_dim=24", "--gin.network.T5Config.vocab_size=256"],
        r"must be those of MODEL: \d+ differ: decoder/decoder_norm/scale: checkpoint "
        r"\(16,\), model \(24,\); .*; and \d+ more\.",
    ),
    "unknown task": (
        ["--gin.MIXTURE_OR_TASK_NAME='cmudict_gp2'"],
        r"must be a registered SeqIO task or mixture: got 'cmudict_gp2'; close to it: "
        r"cmudict_g2p\.",
    ),
    "too little data": (
        ["--gin.NUM_BATCHES=2000"],
        r"must give NUM_BATCHES = 2000 batches of BATCH_SIZE = 8: got \d+\.",
    ),
    "no such split": (
        [
            "--gin.MEASUREMENTS=[@Landscape()]",
            "--gin.Landscape.other_split='nothing'",
        ],
        r"other_split must be a split that the run can read .*: got 'nothing'\. .*train",
    ),
    "reverse-mode loss": (
        ["--gin.LOSS_IMPL='custom_vjp'"],
        r"got LOSS_IMPL = 'custom_vjp'; add --gin.LOSS_IMPL=",
    ),
    "no measurement": (["--gin.MEASUREMENTS=[]"], r"list of at least one"),
    "mesh": (
        ["--gin.network.T5Config.num_heads=4", "8 devices"],
        r"The mesh must divide every parameter: \S+ \(4, 32\) has a dimension of 4 over "
        r"axis model of 8",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_gets_a_sentence_and_status_1(project, checkpoint, case):
    bad, message = BAD_INPUT[case]
    env = EIGHT if "8 devices" in bad else {}
    bad = [
        argument.format(parent=project.path / "stock")
        for argument in bad
        if argument.startswith("--")
    ]
    done = project.run(
        "t5x_fwdloss.analyze", *arguments(project, checkpoint, "bad", *bad), **env
    )
    assert_sentence(done, message)
    assert not (project.path / "bad" / "results.json").exists()


OWN_LOSS = """
from t5x_fwdloss import models


class WithTerm(models.FwdLossEncoderDecoderModel):
    def loss_fn(self, params, batch, dropout_rng):
        loss, metrics = super().loss_fn(params, batch, dropout_rng)
        return 2 * loss, metrics
"""
WITH_TERM = """
from __gin__ import dynamic_registration
import my_terms
from t5x.examples.t5 import network
MODEL = @my_terms.WithTerm()
my_terms.WithTerm:
  module = @network.Transformer()
  input_vocabulary = %VOCABULARY
  output_vocabulary = %VOCABULARY
  optimizer_def = %OPTIMIZER
"""


def test_a_loss_that_would_be_dropped_is_refused_before_the_checkpoint(project):
    project.write("my_terms.py", OWN_LOSS)
    project.write("my_terms.gin", WITH_TERM)
    # There is no checkpoint: who looked for it first would say so.
    given = arguments(project, "/nowhere", "dropped", "--gin_file=my_terms.gin")
    done = project.run("t5x_fwdloss.analyze", *given)
    assert_sentence(
        done,
        r"must not drop another loss: WithTerm has its own loss_fn \(my_terms\.WithTerm"
        r"\.loss_fn\)\. .* use as MODEL the class without it",
    )
    assert not (project.path / "dropped").exists()


def assert_sentence(done, message):
    assert done.status == 1, done.log[-2000:]
    assert re.search(message, done.says), done.says[-2000:]
    assert "Traceback" not in done.log
    assert "t5x_fwdloss.analyze: " in done.says


def test_the_folder_of_another_run_is_refused(project, checkpoint, analyzed):
    few = ["--gin.MEASUREMENTS=[@Trace()]"]
    done = project.run(
        "t5x_fwdloss.analyze", *arguments(project, checkpoint, "one", *few)
    )
    assert_sentence(
        done, r"must be new or hold this same run: \S+/one holds a different"
    )


FORGOTTEN = {
    "everything": ([], r"No --gin_file was given: .*runs/analyze\.gin"),
    "the run file": (
        ["--gin_file=t5x_fwdloss/configs/models/t5_1_1_tiny_bytes.gin"],
        r"No gin file configures the analysis: add --gin_file=t5x_fwdloss/configs/runs/",
    ),
    "the model and the macros": (
        [RUN_FILE],
        r"needs values for MODEL \(.*\); CHECKPOINT_PATH \(.*MEASUREMENTS \(",
    ),
    "one macro": (
        [EXAMPLE, "--gin.ANALYSIS_OUTPUT_DIR='/tmp/x'"],
        r"needs values for CHECKPOINT_PATH \(--gin.CHECKPOINT_PATH=.*\)\. If",
    ),
    "the order": (
        [EXAMPLE, RUN_FILE, "--gin.CHECKPOINT_PATH='/x'"],
        r"needs values for .*MIXTURE_OR_TASK_NAME .*after the run file, which resets it",
    ),
    "an import": (
        [EXAMPLE, "--gin_file=no_import.gin"],
        r"uses 'network' and does not import it \(in .*no_import\.gin, line 2\): add the "
        r"import",
    ),
    "the installation of a module": (
        [EXAMPLE, "--gin_file=bad_import.gin"],
        r"imports 'my_tasks', which is not installed here or not on PYTHONPATH",
    ),
    "a file": (
        [EXAMPLE, "--gin_file=nowhere.gin"],
        r"There is no gin file nowhere\.gin",
    ),
    "that train has its own run file": (
        ["--gin_file=my_run.gin"],
        r"binds 'train_script\.train', which belongs to another script \(in .*pretrain"
        r"(.|\n)*holds a model and such a run together, give the file of the model",
    ),
    "that a folder of T5X is no package": (
        [EXAMPLE, "--gin_file=t5x/examples/decoder_only/models/base.gin"],
        r"gin file t5x/examples/decoder_only/models/base.gin lies in a folder without an "
        r"__init__\.py, which gin cannot search: give its absolute path\.",
    ),
    "the spelling of an argument": (
        [EXAMPLE, "--gin.analyze.num_batch=3"],
        r"analyze has no argument 'num_batch'",
    ),
    "to mention a name": (
        [EXAMPLE, "--gin.Nowhere.x=3"],
        r"Nothing named 'Nowhere' is known",
    ),
    "a value of the network": (
        [
            EXAMPLE,
            "--gin_file=no_network.gin",
            *[f"--gin.{n}='/x'" for n in ("CHECKPOINT_PATH", "ANALYSIS_OUTPUT_DIR")],
        ],
        r"The macro OTHER_MACRO is used \(%OTHER_MACRO\) and no gin file binds it: add",
    ),
}


@pytest.fixture(scope="module")
def broken_files(project):
    head = "from __gin__ import dynamic_registration\n"
    project.write("no_import.gin", f"{head}network.T5Config.emb_dim = 8\n")
    project.write("bad_import.gin", f"{head}import my_tasks\n")
    project.write(
        "no_network.gin",
        f"{head}from t5x.examples.t5 import network\n"
        "network.T5Config.emb_dim = %OTHER_MACRO\n",
    )


@pytest.mark.parametrize("what", FORGOTTEN)
def test_who_forgets_gets_a_sentence_not_gin_s_stack(project, broken_files, what):
    given, message = FORGOTTEN[what]
    done = project.run("t5x_fwdloss.analyze", *given)
    assert_sentence(done, message)
