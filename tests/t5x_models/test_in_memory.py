"""The README's lines from T5X's `InteractiveModel` to a spectrum, as they stand there."""

import gc
import json
import pathlib
import re
import warnings

import jax
import numpy as np
import pytest
import seqio

import t5x_fwdloss.tasks  # noqa: F401, which registers cmudict_g2p

pytestmark = pytest.mark.t5x

BATCH = 4


def interactive_model(folder):
    from t5x import interactive_model as t5x_interactive
    from t5x import models, partitioning
    from t5x.examples.t5 import network

    from t5x_models import subjects

    config = network.T5Config(
        vocab_size=384,
        emb_dim=8,
        num_heads=2,
        head_dim=4,
        mlp_dim=8,
        num_encoder_layers=1,
        num_decoder_layers=1,
    )
    vocabulary = seqio.ByteVocabulary()
    model = models.EncoderDecoderModel(
        network.Transformer(config),
        vocabulary,
        vocabulary,
        subjects.optimizer(),
        z_loss=1e-2,
        loss_normalizing_factor="NUM_REAL_TARGET_TOKENS",
    )
    lengths = {"inputs": 20, "targets": 40}
    shapes = {"encoder_input_tokens": (BATCH, 20)}
    names = ("decoder_input_tokens", "decoder_target_tokens", "decoder_loss_weights")
    shapes |= dict.fromkeys(names, (BATCH, 40))
    return t5x_interactive.InteractiveModel(
        batch_size=BATCH,
        task_feature_lengths=lengths,
        output_dir=str(folder),
        partitioner=partitioning.PjitPartitioner(num_partitions=1),
        model=model,
        dtype="float32",
        restore_mode="latest",
        checkpoint_path="",
        input_shapes=shapes,
        input_types=dict.fromkeys(shapes, np.int32),
    )


@pytest.fixture
def generator():
    """`InteractiveModel` chooses another random generator for the whole process."""
    before = jax.config.jax_default_prng_impl
    yield
    jax.config.update("jax_default_prng_impl", before)


@pytest.mark.usefixtures("generator")
def test_the_lines_of_the_readme_lead_to_a_spectrum(repository, tmp_path):
    text = (repository / "README.md").read_text()
    marked = rf"<!-- run by tests/t5x_models/{pathlib.Path(__file__).name} -->\n"
    (lines,) = re.findall(rf"{marked}```python\n(.*?)```", text, re.DOTALL)
    assert len(lines.strip().splitlines()) <= 12
    assert "'/tmp/spectrum'" in lines.replace('"', "'")
    interactive = interactive_model(tmp_path / "interactive")
    names = {"interactive": interactive}
    exec(lines.replace("/tmp/spectrum", str(tmp_path / "out")), names)
    found = {x["number"]: x for x in names["records"]}
    assert found["negative_fraction"]["value"] >= 0
    assert {x["step"] for x in names["records"]} == {0}
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    # T5X's own loss, of the model as it is in the `InteractiveModel`.
    params, total, weight = interactive.train_state.params, 0.0, 0.0
    for batch in names["batches"]:
        loss, _ = interactive.model.loss_fn(params, batch, None)
        here = batch["decoder_loss_weights"].sum()
        total, weight = total + float(loss) * here, weight + here
    assert document["loss_value"] == pytest.approx(total / weight, rel=1e-5)
    # T5X's checkpointers leave event loops open, of which Python warns: here, and not
    # in the test that happens to run when they are collected.
    del names, interactive
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
