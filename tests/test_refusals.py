"""Bad input on the command lines: one sentence, status 1, and nothing was begun.

Each case is the real script in a fork of one process. The checkpoint does not exist, so
that a sentence about a setting shows that it was checked before anything is restored.
"""

import re
import subprocess
import sys

import pytest
from t5x_runs.conftest import Forks

from t5x_fwdloss.standalone import checkpoints

CONFIGS = "--gin_file=t5x_fwdloss/configs"
COMMANDS = {
    "analyze": [
        "t5x_fwdloss.standalone.analyze",
        f"{CONFIGS}/standalone/analyze.gin",
        f"{CONFIGS}/standalone/tiny.gin",
        "--gin.CHECKPOINT_PATH='/nowhere/checkpoint_1'",
        "--gin.ANALYSIS_OUTPUT_DIR='results'",
    ],
    "train": [
        "t5x_fwdloss.standalone.train",
        f"{CONFIGS}/standalone/train.gin",
        f"{CONFIGS}/standalone/tiny.gin",
        "--gin.MODEL_DIR='model'",
        "--gin.MIXTURE_OR_TASK_NAME='nothing'",  # refused where no setting is
    ],
    "t5x analyze": [
        "t5x_fwdloss.analyze",
        f"{CONFIGS}/examples/cmudict_analyze.gin",
        "--gin.CHECKPOINT_PATH='/nowhere/checkpoint_1'",
        "--gin.ANALYSIS_OUTPUT_DIR='results'",
    ],
}
EVERY_ANALYSIS = [
    (
        "MEASUREMENTS=[@Trace]",
        r"MEASUREMENTS must .*: entry 0 is Trace itself",
    ),
    ("MEASUREMENTS=@Trace()", r"MEASUREMENTS must be a list .*: got Trace\("),
    ("MEASUREMENTS='[@Trace()]'", r"MEASUREMENTS must be a list .*type str\)"),
    ("MEASUREMENTS=[Trace()]", r"--gin.MEASUREMENTS must .* an @ and \(\)"),
    ("MEASUREMENTS=[@Trace()", r"--gin.MEASUREMENTS must have a value that gin"),
    ("MEASUREMENTS=[@HessianTrace()]", r"HessianTrace must be written as Trace, "),
    ("SampledFisherTrace.kind='x'", r"must be written as sampled_fisher/Trace, "),
    (
        "MEASUREMENTS=[@fishr/Trace()]",
        r"@fishr/\S*Trace\(\) must stand in a scope .*such as fisher: nothing is bound",
    ),
    ("Trace.matrix='hesian'", r"Trace.matrix must be one of 'hessian', .*: got 'hesia"),
    ("MEASUREMENTS=[@Trase()]", r"Nothing named 'Trase' is known"),
    (
        "Trace.num_probes='8'",
        r"Trace.num_probes must .*: got '8' \(of ty",
    ),
    ("Trace.num_probes=8.5", r"Trace.num_probes must .*: got 8.5"),
    ("NUM_BATCHES='2'", r"NUM_BATCHES must be a whole number of at least 1: got '2'"),
    ("NUM_BATCHES=1.5", r"NUM_BATCHES must be a whole number of at least 1: got 1.5"),
    ("NUM_BATCHES=", r"--gin.NUM_BATCHES must have a value that gin can read"),
    ("NUMBATCHES=3", r"it reads no NUMBATCHES; the nearest is NUM_BATCHES\."),
    (
        "BATCH_SIZE=8; DatasetConfig.batch_size=4",
        r"--gin.BATCH_SIZE must bind a macro that this run reads: --gin.DatasetConfig."
        r"batch_size takes the place of %BATCH_SIZE in the gin files; give --gin."
        r"BATCH_SIZE alone\.",
    ),
    ("BATCH_SIZE='8'", r"BATCH_SIZE must be a whole number of at least 1: got '8'"),
    ("BATCH_SIZE=0", r"BATCH_SIZE must be a whole number of at least 1: got 0"),
    ("SEED='a'", r"SEED must be a whole number of at least 0: got 'a'"),
    ("SEED=1.5", r"SEED must be a whole number of at least 0: got 1.5"),
    (
        "MEMORY_BUDGET='1GB'",
        r"MEMORY_BUDGET must be a whole number of at least 0 or No",
    ),
    ("COMPILATION_CACHE_DIR=7", r"COMPILATION_CACHE_DIR must be "),
    ("MEMORY_BUDGET=1GB", r"--gin.MEMORY_BUDGET must have a value that gin can read"),
    ("MATMUL_PRECISION=high", r"--gin.MATMUL_PRECISION must .* needs quotes inside"),
    ("MATMUL_PRECISION='low'", r"MATMUL_PRECISION must be one of 'default', 'high', "),
    ("CHECKPOINT_PATH=5", r"CHECKPOINT_PATH must be a string"),
    (
        "CHECKPOINT_PATH=''",
        r"CHECKPOINT_PATH must be a string that is not empty: got ''",
    ),
    ("ANALYSIS_OUTPUT_DIR=5", r"ANALYSIS_OUTPUT_DIR must be a string .*: got 5"),
    (
        "ANALYSIS_OUTPUT_DIR=' '",
        r"ANALYSIS_OUTPUT_DIR must be a string that is not emp",
    ),
    ("TASK_FEATURE_LENGTHS=20", r"TASK_FEATURE_LENGTHS must be a dictionary: got 20"),
    ("MIXTURE_OR_TASK_NAME=5", r"MIXTURE_OR_TASK_NAME must be .* string.*: got 5"),
    ("SPLIT=None", r"SPLIT must be a string that is not empty: got None"),
    ("PACK='yes'", r"PACK must be True or False: got 'yes'"),
    ("MODEL=5", r"MODEL must be an instance of \w+Model: got 5"),
    ("Z_LOSS=-1.0", r"z_loss must be finite and not negative: got -1.0"),
    ("Z_LOSS='a'", r"z_loss must be finite and not negative: got 'a'"),
    ("LOSS_CHUNK_LENGTH='8'", r"(?i)chunk.length must be .*: got '8'"),
    ("LOSS_NORMALIZING_FACTOR='tokens'", r"normalizing factor must .*: got 'tokens'"),
    ("LOSS_NORMALIZING_FACTOR=[1]", r"normalizing factor must .*: got \[1\]"),
    ("SEED=-1", r"SEED must be a whole number of at least 0: got -1"),
    (
        "DROPOUT_RATE=0.1; DROPOUT_SEED=-1",
        r"DROPOUT_SEED must be a whole number of at least 0 or None: got -1",
    ),
    (
        "Eigenpairs.max_basis=9",
        r"Eigenpairs.max_basis must be None or at least 10 for 7 pairs and 1 st",
    ),
    (
        "Eigenpairs.num_largest=0; Eigenpairs.num_smallest=0",
        r"Eigenpairs needs num_largest or num_smallest: both are 0",
    ),
    (
        "Eigenpairs.group='('",
        r"Eigenpairs.group must be a string that is a regular expression or Non",
    ),
    ("Trace.name='run'", r"name of a measurement must not be one of"),
    ("Trace.name='a/b'", r"name of a measurement must be the name of a file"),
    (
        "DirectionalDerivatives.eigenvectors_of='x'",
        r"eigenvectors_of must name a measurement before it with save_eig.*: got 'x'",
    ),
    (
        "DirectionalDerivatives.along_gradient=False; "
        "DirectionalDerivatives.num_random=0",
        r"DirectionalDerivatives needs a direction",
    ),
    ("X", r"(?i)--gin.\w+ needs =VALUE: got '--gin.X'"),
]
LENGTHS = [
    (f"TASK_FEATURE_LENGTHS={{'inputs': {x}, 'targets': 9}}", r"inputs'\] must .*: got")
    for x in ("0", "-5", "'20'")
]
TRAINING = [
    ("TRAIN_STEPS='10'", r"TRAIN_STEPS must be a whole number of at least 1: got '10'"),
    ("TRAIN_STEPS=0", r"TRAIN_STEPS must be a whole number of at least 1: got 0"),
    ("EVAL_PERIOD=2.5", r"EVAL_PERIOD must be a whole number of at least 1: got 2.5"),
    (
        "CHECKPOINT_PERIOD=None",
        r"CHECKPOINT_PERIOD must be a whole number .*: got None",
    ),
    ("KEEP_CHECKPOINTS=0", r"KEEP_CHECKPOINTS must be a whole number .*None: got 0"),
    ("LEARNING_RATE='1'", r"LEARNING_RATE must be a finite number above 0: got '1'"),
    ("CURVATURE_PERIOD=0", r"CURVATURE_PERIOD must be .* at least 1 or None: got 0"),
    (
        "LEARNING_RATE_FN='a'",
        r"LEARNING_RATE_FN must be a finite number or .*: got 'a'",
    ),
    ("WARMUP_STEPS=0", r"WARMUP_STEPS must be a whole number of at least 1: got 0"),
    ("OPTIMIZER=@optax.adafactor", r"OPTIMIZER must be .*: got adafactor itself"),
    ("MODEL_DIR=None", r"needs values|MODEL_DIR must be a string"),
    ("network.T5Config.emb_dim='16'", r"T5Config.emb_dim must be a whole .*: got '16'"),
    ("network.T5Config.dtype='flaot32'", r"T5Config.dtype must be a floating-point dt"),
    (
        "network.T5Config.mlp_activations=('gelo',)",
        r"mlp_activations\[0\] must be 'lin",
    ),
    (
        "DROPOUT_RATE=1.0",
        r"T5Config.dropout_rate must be .* from 0 to below 1: got 1.0",
    ),
]
CASES = [
    *[("analyze", *case) for case in EVERY_ANALYSIS + LENGTHS],
    (
        "analyze",
        "OPTIMIZER=None; Trace.preconditioned=True",
        r"Trace.preconditioned must have the optimizer .*: got OPTIMIZER = None",
    ),
    (
        "analyze",
        "LOSS_IMPL='custom_vjp'",
        r"directional_derivatives needs a loss that has forward mode",
    ),
    ("analyze", "DROPOUT_SEED='x'", r"DROPOUT_SEED must be a whole number .*: got 'x'"),
    *[("train", *case) for case in TRAINING],
    *[
        pytest.param("t5x analyze", *case, marks=pytest.mark.t5x)
        for case in EVERY_ANALYSIS + LENGTHS
    ],
]

GROUPS = [
    ("Trace.group='x'", r"whole path of at least one .*'x' matches none of"),
    ("GroupTraces.groups={'a': 'x'}", r"A group must match .*'x' matches none"),
]
OF_T5X = [
    (
        "network.T5Config.emb_dim='16'",
        r"MODEL must have a network, .*: got TypeError: ",
    ),
    ("PjitPartitioner.backend='x'", r"PjitPartitioner must have settings that lay out"),
    (
        "RestoreCheckpointConfig.mode='x'",
        r"RestoreCheckpointConfig.mode must be one of",
    ),
    ("MIXTURE_OR_TASK_MODULE='x'", r"MIXTURE_OR_TASK_MODULE must be a module .*'x'"),
    ("VOCABULARY=None", r"The vocabularies .*vocabs=\(seqio.vocabularies.Byte"),
]
OF_NETWORKS = [
    *[("analyze", *case) for case in GROUPS],
    ("analyze", "network.Transformer.config=5", r"must be a network whose config has"),
    *[
        pytest.param("t5x analyze", *case, marks=pytest.mark.t5x)
        for case in GROUPS + OF_T5X
    ],
]


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Runs a command in a directory of its own: status, and the lines that it said."""
    directory = tmp_path_factory.mktemp("refused")
    forks = Forks(directory)

    def run(name, *more):
        module, *given = COMMANDS[name]
        done = forks.run(directory, module, [*given, *more], {})
        return done.status, done.says, directory

    yield run
    forks.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "binding", "sentence"), CASES)
def test_a_bad_setting_is_named_before_anything_begins(
    command, name, binding, sentence
):
    flags = [f"--gin.{one}" for one in binding.split("; ")]
    status, said, directory = command(name, *flags)
    assert status == 1, said
    assert "Traceback" not in said
    last = said.strip().splitlines()[-1]
    assert re.search(sentence, last), said
    assert re.match(r"(analyze|train|t5x_fwdloss\.analyze): ", last), said
    assert not (directory / "results").exists()
    assert not (directory / "model").exists()


@pytest.mark.parametrize(("name", "binding", "sentence"), OF_NETWORKS)
def test_what_does_not_fit_the_network_is_named_before_the_checkpoint_is_read(
    command, tmp_path, name, binding, sentence
):
    state = tmp_path / "checkpoint_1" / "state"
    state.mkdir(parents=True)
    (state / "_METADATA").write_text("damaged")
    status, said, directory = command(
        name,
        f"--gin.CHECKPOINT_PATH='{tmp_path}/checkpoint_1'",
        "--gin.MEASUREMENTS=[@Trace(), @GroupTraces()]",
        "--gin.NUM_BATCHES=1",
        f"--gin.{binding}",
    )
    assert status == 1, said
    assert "Traceback" not in said
    assert re.search(sentence, said.strip().splitlines()[-1]), said
    assert not (directory / "results").exists()


def test_training_into_a_bucket_without_its_client_names_it(command):
    if checkpoints._has_google_client():
        pytest.skip("google-cloud-storage is installed")
    status, said, _ = command("train", "--gin.MODEL_DIR='gs://bucket/model'")
    assert status == 1
    assert "not installed; pip install google-cloud-storage (the extra gcs" in said


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "arguments",
    [["standalone", "150"], pytest.param(["t5x", "60"], marks=pytest.mark.t5x)],
    ids=["standalone", "t5x"],
)
def test_random_values_of_settings_are_answered_by_a_sentence(
    repository, tmp_path, arguments
):
    done = subprocess.run(
        [sys.executable, str(repository / "tests" / "bad_gin.py"), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "answered\n", done.stderr[-3000:]
