"""Gives gin random values for settings, in one process, by hypothesis.

    python bad_gin.py

Every value is written into a binding and read by the analysis of the standalone host, as
its command line does. The checkpoint does not exist: a value that fits is answered by a
sentence about that. What ends otherwise than by one sentence raises.
"""

import contextlib
import io
import re
import sys
import types

import gin
import hypothesis
from hypothesis import strategies as st

from t5x_fwdloss.standalone import analyze as host
from t5x_fwdloss.standalone import command_line

CONFIGS = "t5x_fwdloss/configs/standalone"
SETTINGS = [
    *("NUM_BATCHES", "BATCH_SIZE", "SEED", "MEMORY_BUDGET", "NUM_MICROBATCHES"),
    *("SPLIT", "PACK", "MATMUL_PRECISION", "DROPOUT_SEED", "TASK_FEATURE_LENGTHS"),
    *("MIXTURE_OR_TASK_NAME", "ANALYSIS_OUTPUT_DIR", "CHECKPOINT_PATH", "MODEL"),
    *("MEASUREMENTS", "LOSS_IMPL", "LOSS_CHUNK_LENGTH", "Z_LOSS", "LABEL_SMOOTHING"),
    *("LOSS_NORMALIZING_FACTOR", "DROPOUT_RATE", "FOLDING", "SEEDS", "NUMBATCHES"),
    *("HessianTrace.num_probes", "HessianTrace.relative_error", "HessianTrace.name"),
    *("HessianEigenpairs.tolerance", "HessianEigenpairs.group", "T5Config.emb_dim"),
    *("HessianGroupTraces.groups", "LossComparison.chunk_lengths", "T5Config.dtype"),
    *("DirectionalDerivatives.checkpoints", "T5Config.mlp_activations", "Nowhere.x"),
]
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(
        ["validation", "custom_jvp", "highest", "inputs", "float32", "gelu"]
    ),
)
values = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["inputs", "targets", "a"]), inner, max_size=2),
    ),
    max_leaves=4,
).map(repr)
# What gin cannot read, or reads as a reference.
texts = st.one_of(
    st.text("ab@%()[]{}'\",=. 1\n", max_size=8),
    st.sampled_from(["@HessianTrace", "@HessianTrace()", "[@HessianTrace()]", "%SEED"]),
)


@hypothesis.settings(
    deadline=None, derandomize=True, max_examples=150, database=None, print_blob=False
)
@hypothesis.given(setting=st.sampled_from(SETTINGS), value=st.one_of(values, texts))
def answered_by_a_sentence(setting, value):
    """One binding: status 1, one line, with no trace and nobody's class names in it."""
    gin.clear_config()
    flags = types.SimpleNamespace(
        gin_file=[f"{CONFIGS}/analyze.gin", f"{CONFIGS}/tiny.gin"],
        gin_bindings=[
            "CHECKPOINT_PATH = '/nowhere/checkpoint_1'",
            "ANALYSIS_OUTPUT_DIR = '/nowhere/results'",
            f"{setting} = {value}",
        ],
        gin_search_paths=["."],
    )
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = command_line.attempt(
            host.analyze, flags, host.RUN_FILE, host.REQUIRED_MACROS
        )
    text = said.getvalue()
    hypothesis.note(text)
    assert status == 1
    assert re.fullmatch(r"analyze: [^\n]{10,}\n", text)
    assert "(--verbosity=1 shows where)" not in text


if __name__ == "__main__":
    # The run file imports __main__, which is the script when that runs.
    sys.modules["__main__"].analyze = host.analyze
    answered_by_a_sentence()
    sys.stdout.write("answered\n")
