"""The accuracy beside the loss: chunked or not, whole or in microbatches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss.analysis import Objective
from t5x_fwdloss.standalone.model import StandaloneModel
from t5x_fwdloss.standalone.network import Transformer

from . import tiny_t5

SETTINGS = {
    "plain": ({}, {}),
    "chunked": ({"loss_chunk_length": 2}, {}),
    "microbatches": ({}, {"num_microbatches": 2}),
}


def batches():
    found = tiny_t5.batches(3)
    # A token counts once, whatever its weight.
    found[1]["decoder_loss_weights"] *= 0.5
    return found


@pytest.mark.parametrize(("of_model", "of_run"), SETTINGS.values(), ids=SETTINGS)
def test_it_is_the_share_of_counted_tokens_with_the_largest_logit(of_model, of_run):
    params = tiny_t5.parameters()
    objective = Objective.from_model(tiny_t5.model(**of_model), batches(), **of_run)
    loss, accuracy = objective.value_and_accuracy(params)
    assert loss == pytest.approx(objective.value(params), rel=1e-6)
    correct = counted = 0
    for batch in batches():
        logits = tiny_t5.model()._compute_logits(params, batch)
        mask = batch["decoder_loss_weights"] > 0
        classes = np.asarray(logits).argmax(axis=-1)
        correct += (classes == batch["decoder_target_tokens"])[mask].sum()
        counted += mask.sum()
    assert 0 < correct < counted
    assert accuracy == pytest.approx(correct / counted, rel=1e-12)


def test_a_chunked_loss_keeps_no_logits():
    (batch,) = tiny_t5.batches(1)
    sizes = dataclasses.replace(
        tiny_t5.SIZES, mlp_dim=6
    )  # no other array has 8 columns
    batch = jax.tree.map(jnp.asarray, batch)
    params = StandaloneModel(Transformer(sizes)).get_initial_params(
        jax.random.key(0), batch
    )
    shapes = {}
    for length in (None, 2):
        model = StandaloneModel(
            Transformer(sizes), loss_impl="custom_jvp", loss_chunk_length=length
        )
        objective = Objective.from_model(model, [batch])
        function = jax.jit(objective._loss_and_correct)
        text = function.lower(params, batch).compile().as_text()
        shapes[length] = f"[4,{tiny_t5.LENGTH},{tiny_t5.VOCAB}]" in text
    assert shapes == {None: True, 2: False}
