"""Gives gin random values for settings, in one process, by hypothesis.

    python bad_gin.py [HOST [NUMBER_OF_EXAMPLES]]

Every value is written into a binding and read by the analysis of a host, `standalone` or
`t5x`, as its command line does. Checkpoint and data are real, and the output folder has a
file of somebody else: a value that fits is answered by a sentence about that. What ends
otherwise than by one sentence raises.
"""

import contextlib
import io
import pathlib
import re
import sys
import tempfile
import types

import damage
import gin
import hypothesis
import jax
import jax.numpy as jnp
from hypothesis import strategies as st

from t5x_fwdloss.standalone import checkpoints

COMMON = [
    *("NUM_BATCHES", "BATCH_SIZE", "SEED", "MEMORY_BUDGET", "NUM_MICROBATCHES"),
    *("SPLIT", "PACK", "MATMUL_PRECISION", "DROPOUT_SEED", "TASK_FEATURE_LENGTHS"),
    *("MIXTURE_OR_TASK_NAME", "ANALYSIS_OUTPUT_DIR", "CHECKPOINT_PATH", "MODEL"),
    *("MEASUREMENTS", "LOSS_IMPL", "LOSS_CHUNK_LENGTH", "Z_LOSS", "LABEL_SMOOTHING"),
    *("LOSS_NORMALIZING_FACTOR", "DROPOUT_RATE", "FOLDING", "SEEDS", "NUMBATCHES"),
    *("Trace.num_probes", "Trace.relative_error", "Trace.name"),
    *("Trace.preconditioned", "Trace.matrix", "Transformer.config"),
    *("Eigenpairs.tolerance", "Eigenpairs.group", "T5Config.emb_dim"),
    *("GroupTraces.groups", "LossComparison.chunk_lengths", "T5Config.dtype"),
    *("DirectionalDerivatives.checkpoints", "T5Config.mlp_activations", "Nowhere.x"),
    *("T5Config.vocab_size", "T5Config.num_heads", "T5Config.head_dim"),
    *("T5Config.num_encoder_layers", "T5Config.num_decoder_layers"),
    *("T5Config.mlp_dim", "T5Config.logits_via_embedding", "OPTIMIZER"),
    "T5Config.dropout_rate",
]
# What configurables of T5X itself have.
OF_T5X = [
    *(f"RestoreCheckpointConfig.{name}" for name in ("path", "mode", "assignment_map")),
    *(f"RestoreCheckpointConfig.{name}" for name in ("strict", "fallback_to_scratch")),
    *(f"RestoreCheckpointConfig.{name}" for name in ("dtype", "restore_dataset")),
    *(f"RestoreCheckpointConfig.{name}" for name in ("state_transformation_fns",)),
    *(
        f"RestoreCheckpointConfig.checkpoint{name}"
        for name in ("er_cls", "_manager_cls")
    ),
    *(f"DatasetConfig.{name}" for name in ("shuffle", "seed", "use_cached", "module")),
    *(f"DatasetConfig.{name}" for name in ("use_custom_packing_ops", "batch_size")),
    *(f"DatasetConfig.{name}" for name in ("trim_output_features", "num_workers")),
    *(
        f"DatasetConfig.{name}"
        for name in ("use_memory_cache", "runtime_preprocessors")
    ),
    *(f"PjitPartitioner.{name}" for name in ("num_partitions", "logical_axis_rules")),
    *(f"PjitPartitioner.{name}" for name in ("model_parallel_submesh", "backend")),
    *(f"PjitPartitioner.{name}" for name in ("ici_mesh_shape", "dcn_mesh_shape")),
    *(f"EncoderDecoderModel.{name}" for name in ("module", "decode_fn", "z_loss")),
    *(f"EncoderDecoderModel.{name}" for name in ("input_vocabulary", "optimizer_def")),
    *(f"EncoderDecoderModel.{name}" for name in ("feature_converter_cls",)),
    *(
        "Adafactor.decay_rate",
        "Adafactor.step_offset",
        "Adafactor.logical_factor_rules",
    ),
    *("VOCABULARY", "USE_CACHED_TASKS", "USE_ORBAX", "MIXTURE_OR_TASK_MODULE"),
    *(
        "LEARNING_RATE_FN",
        "ByteVocabulary.extra_ids",
        "T5Config.float32_attention_logits",
    ),
    *("analyze.train_state_initializer_cls", "analyze.verify_matching_vocabs_fn"),
]
# Their right values write results, need much memory, or take minutes to trace.
WITHOUT_CHECKPOINT = ["ANALYSIS_OUTPUT_DIR", "TASK_FEATURE_LENGTHS"]
WITHOUT_CHECKPOINT += ["T5Config.num_encoder_layers", "T5Config.num_decoder_layers"]
# Macros that are not read where these are bound: such a binding is refused.
HIDDEN = {
    "DatasetConfig.batch_size": "BATCH_SIZE",
    "RestoreCheckpointConfig.path": "CHECKPOINT_PATH",
}
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(
        ["validation", "custom_jvp", "highest", "inputs", "float32", "gelu", ".*"]
    ),
)
values = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from(["inputs", "targets", "a"]), inner, max_size=2),
    ),
    max_leaves=4,
).map(repr)
# What gin cannot read, or reads as a reference.
texts = st.one_of(
    st.text("ab@%()[]{}'\",=. 1\n", max_size=8),
    st.sampled_from(["@Trace", "@Trace()", "[@Trace()]", "%SEED"]),
)


def standalone():
    """The standalone host: its command, files, and the parameters of its model."""
    from t5x_fwdloss.command_line import arguments
    from t5x_fwdloss.standalone import analyze, network

    # The run file imports __main__, which is the script when that runs.
    sys.modules["__main__"].analyze = analyze.analyze
    configs = "t5x_fwdloss/configs/standalone"

    def attempt(flags):
        return arguments.attempt(
            analyze.analyze, flags, analyze.RUN_FILE, analyze.REQUIRED_MACROS
        )

    return attempt, [f"{configs}/analyze.gin", f"{configs}/tiny.gin"], network


def t5x():
    """The same of T5X's."""
    from t5x.examples.t5 import network

    from t5x_fwdloss import analyze

    sys.modules["__main__"].analyze = analyze.analyze
    return (
        analyze.attempt,
        ["t5x_fwdloss/configs/examples/cmudict_analyze.gin"],
        network,
    )


ALONE = ["StandaloneModel.module", "StandaloneModel.z_loss"]
HOSTS = {"standalone": (standalone, COMMON + ALONE), "t5x": (t5x, COMMON + OF_T5X)}
SMALL = {"emb_dim": 8, "num_heads": 2, "head_dim": 4, "mlp_dim": 8}
SMALL |= {"num_encoder_layers": 1, "num_decoder_layers": 1, "vocab_size": 384}


def write_checkpoint(folder, network):
    """A checkpoint of the small network, which fits both hosts."""
    config = network.T5Config(**SMALL, mlp_activations=("gelu", "linear"))
    tokens = jnp.ones((1, 4), jnp.int32)
    made = network.Transformer(config).init(jax.random.key(0), tokens, tokens, tokens)
    manager = checkpoints.open_manager(str(folder))
    checkpoints.save(manager, 1, made["params"], {})
    manager.close()
    return f"{folder}/checkpoint_1"


def check(root, host):
    """The law of one host."""
    make, settings = HOSTS[host]
    attempt, gin_files, network = make()
    checkpoint = write_checkpoint(root / "model", network)
    foreign = root / "foreign"
    foreign.mkdir()
    (foreign / "somebody's").write_text("file")

    @hypothesis.given(setting=st.sampled_from(settings), value=st.one_of(values, texts))
    def answered_by_a_sentence(setting, value):
        """One binding: status 1, one line, no trace and nobody's class names in it."""
        gin.clear_config()
        path = "/nowhere/checkpoint_1" if setting in WITHOUT_CHECKPOINT else checkpoint
        macros = {"CHECKPOINT_PATH": path, "ANALYSIS_OUTPUT_DIR": str(foreign)}
        macros |= {"NUM_BATCHES": 1, "BATCH_SIZE": 2}
        macros.pop(HIDDEN.get(setting), None)
        flags = types.SimpleNamespace(
            gin_file=gin_files,
            gin_bindings=[
                *(f"T5Config.{name} = {number}" for name, number in SMALL.items()),
                *(f"{name} = {given!r}" for name, given in macros.items()),
                f"{setting} = {value}",
            ],
            gin_search_paths=["."],
            multiprocess_gpu=False,
        )
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            status = attempt(flags)
        text = said.getvalue()
        hypothesis.note(text)
        assert status == 1
        assert re.fullmatch(r"[\w.]+: [^\n]{10,}\n", text)
        assert "(--verbosity=1 shows where)" not in text
        assert not re.search(r" object at 0x|Traceback", text)

    return answered_by_a_sentence


def main(host="standalone", examples="150"):
    """Asks one host."""
    with tempfile.TemporaryDirectory() as folder:
        damage.run(check(pathlib.Path(folder), host), examples)
    sys.stdout.write("answered\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
