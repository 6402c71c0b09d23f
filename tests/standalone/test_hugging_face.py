"""Checkpoints of transformers, written by it, and the same again written by us."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from t5x_runs.conftest import Forks

from t5x_fwdloss import tasks
from t5x_fwdloss.analysis.objective import parameters
from t5x_fwdloss.standalone import checkpoints, data, hugging_face
from t5x_fwdloss.standalone.model import StandaloneModel
from t5x_fwdloss.standalone.network import T5Config, Transformer

from . import subjects

NAMES = ("t5_1_0", "t5_1_1", "mt5", "umt5", "t5_1_1_tied")
EVERY = pytest.mark.parametrize("name", NAMES)
ARRAYS = "model.safetensors"
TASK = "cmudict_g2p"


@pytest.fixture
def folder(repository):
    return lambda name: repository / "tests" / "data" / "hugging_face" / name


@pytest.fixture
def copy(folder, tmp_path):
    """A checkpoint to change: its folder."""

    def copied(name):
        return shutil.copytree(folder(name), tmp_path / name)

    return copied


def model_of(config):
    return StandaloneModel(
        Transformer(config), loss_normalizing_factor="NUM_REAL_TARGET_TOKENS"
    )


def batch_of(expected):
    targets = expected["targets"]
    return {
        "encoder_input_tokens": expected["inputs"],
        "decoder_target_tokens": targets,
        "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
        "decoder_loss_weights": (targets > 0).astype(np.int32),
    }


def restored(path):
    """Network, parameters and the file of what transformers computes."""
    model = model_of(hugging_face.read_config(str(path)))
    expected = dict(np.load(path / "expected.npz"))
    key, batch = jax.random.key(0), batch_of(expected)
    like = jax.eval_shape(lambda: model.get_initial_params(key, batch))
    return model, checkpoints.restore_params(str(path), like)[1], expected


def assert_computes_the_same(path):
    model, params, expected = restored(path)
    batch = batch_of(expected)
    logits = jax.jit(model._compute_logits)(params, batch)
    scale, is_real = np.abs(expected["logits"]).max(), expected["targets"] > 0
    np.testing.assert_allclose(
        logits[is_real], expected["logits"][is_real], rtol=0, atol=1e-4 * scale
    )
    loss, _ = jax.jit(model.loss_fn)(params, batch, None)
    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-5)


@EVERY
def test_logits_and_loss_are_those_of_transformers(folder, name):
    assert_computes_the_same(folder(name))


@EVERY
def test_every_array_of_the_file_is_used_once_and_comes_back_to_the_bit(
    folder, tmp_path, name
):
    model, params, _ = restored(folder(name))
    hugging_face.save(str(tmp_path / "again"), params, model.module.config)
    before = load_file(folder(name) / ARRAYS)
    after = load_file(tmp_path / "again" / ARRAYS)
    assert len(before) >= len(jax.tree.leaves(params))
    # Position tables of the encoder's attention to the decoder, which nothing reads.
    assert before.keys() - after.keys() <= {hugging_face.UNUSED}
    # Earlier versions of the library look for a head where the logits are not scaled.
    before.setdefault(hugging_face.HEAD, before[hugging_face.EMBEDDING])
    for key, array in after.items():
        np.testing.assert_array_equal(array, before[key])
    again = hugging_face.read_config(str(tmp_path / "again"))
    assert again == model.module.config
    hugging_face.check_network(str(folder(name)), Transformer(again))


def test_a_head_of_the_embedding_without_scaling_is_kept_through_a_file(tmp_path):
    # What transformers makes of a T5 1.1 whose head it ties.
    config = subjects.config(
        vocab_size=40, logits_via_embedding=True, scale_tied_logits=False
    )
    params = model_of(config).get_initial_params(
        jax.random.key(0), subjects.packed_batch(40)
    )
    hugging_face.save(str(tmp_path / "tied"), params, config)
    assert hugging_face.read_config(str(tmp_path / "tied"), dropout_rate=0.0) == config
    path = tmp_path / "tied" / ARRAYS
    arrays = load_file(path)
    arrays["lm_head.weight"][0, 0] += 1
    save_file(arrays, path)
    config = hugging_face.read_config(str(tmp_path / "tied"))
    assert not config.logits_via_embedding


def test_arrays_in_several_files_are_found_by_their_index(copy):
    path = copy("t5_1_1")
    arrays = load_file(path / ARRAYS)
    names = sorted(arrays)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in parts.items():
        save_file({name: arrays[name] for name in some}, path / file)
    (path / ARRAYS).unlink()
    index = {"weight_map": {n: file for file, some in parts.items() for n in some}}
    (path / hugging_face.INDEX).write_text(json.dumps(index))
    assert_computes_the_same(path)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_arrays_of_another_precision_are_converted(copy, dtype):
    path = copy("t5_1_1")
    arrays = {k: v.astype(dtype) for k, v in load_file(path / ARRAYS).items()}
    save_file(arrays, path / ARRAYS)
    _, params, _ = restored(path)
    for name, leaf in parameters.named_leaves(params).items():
        stored = arrays[hugging_face._key(name)].astype(np.float32)
        assert leaf.dtype == jnp.float32
        turned = leaf.T if leaf.shape != stored.shape else leaf
        assert np.array_equal(turned, stored) or np.array_equal(leaf.T, stored)


@pytest.mark.t5x
@pytest.mark.parametrize("name", ["t5_1_0", "t5_1_1"])
def test_t5x_computes_the_same_from_the_same_parameters(folder, name):
    from t5x.examples.t5 import network

    model, params, expected = restored(folder(name))
    fields = network.T5Config.__dataclass_fields__
    config = model.module.config
    sizes = {
        n: getattr(config, n) for n in T5Config.__dataclass_fields__ if n in fields
    }
    theirs = network.Transformer(network.T5Config(**sizes))
    batch = batch_of(expected)
    features = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    inputs = [jnp.asarray(batch[feature]) for feature in features]
    logits = jax.jit(
        lambda p: theirs.apply({"params": p}, *inputs, enable_dropout=False)
    )(params)
    scale, is_real = np.abs(expected["logits"]).max(), expected["targets"] > 0
    np.testing.assert_allclose(
        logits[is_real], expected["logits"][is_real], rtol=0, atol=1e-4 * scale
    )


def change_config(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_arrays(path, change):
    arrays = load_file(path / ARRAYS)
    change(arrays)
    save_file(arrays, path / ARRAYS)


def cut(path):
    data = (path / ARRAYS).read_bytes()
    (path / ARRAYS).write_bytes(data[: len(data) // 2])


KEY = "encoder.block.0.layer.0.layer_norm.weight"
# What is done to a checkpoint, and the sentence that says so.
BAD = {
    "another kind of network": (
        lambda path: change_config(path, model_type="bart"),
        r"must have one of t5, mt5, umt5 as model_type: got 'bart'\.",
    ),
    "another activation": (
        lambda path: change_config(path, feed_forward_proj="gated-mish"),
        r"as feed_forward_proj: got 'gated-mish'\.",
    ),
    "other buckets": (
        lambda path: change_config(path, relative_attention_num_buckets=64),
        r"must have 32, which is T5's, as relative_attention_num_buckets: got 64\.",
    ),
    "no width": (
        lambda path: change_config(path, d_model=None),
        r"must have a whole number as d_model: got None\.",
    ),
    "a missing array": (
        lambda path: change_arrays(path, lambda arrays: arrays.pop(KEY)),
        rf"must be those of MODEL: 1 differ: {KEY}: checkpoint has none, model \(16,\)",
    ),
    "an extra array": (
        lambda path: change_arrays(path, lambda arrays: arrays.update(x=np.ones(3))),
        r"1 differ: x: checkpoint \(3,\), model has none",
    ),
    "another shape": (
        lambda path: change_arrays(
            path, lambda arrays: arrays.update({KEY: np.ones(17, np.float32)})
        ),
        rf"1 differ: {KEY}: checkpoint \(17,\), model \(16,\)",
    ),
    "whole numbers": (
        lambda path: change_arrays(
            path, lambda arrays: arrays.update({KEY: np.ones(16, np.int32)})
        ),
        rf"{KEY}: checkpoint \(16,\) of I32, model \(16,\)",
    ),
    "another copy of the embedding": (
        lambda path: change_arrays(
            path,
            lambda arrays: arrays.update(
                {"encoder.embed_tokens.weight": np.ones((40, 16), np.float32)}
            ),
        ),
        r"encoder.embed_tokens.weight must equal shared.weight .* differ\.",
    ),
    "half a file": (cut, r"must be a whole file of safetensors: "),
    "no file": (
        lambda path: (path / ARRAYS).rename(path / "pytorch_model.bin"),
        r"must hold model.safetensors or model.safetensors.index.json: .* holds "
        r".*pytorch_model.bin; save it by model.save_pretrained",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_with_a_checkpoint_is_one_sentence(copy, case):
    change, sentence = BAD[case]
    path = copy("t5_1_1")
    change(path)
    with pytest.raises(ValueError, match=sentence) as caught:
        restored(path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_configuration_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json\."):
        hugging_face.read_config(str(tmp_path))


def test_a_network_that_computes_something_else_is_refused(folder):
    config = hugging_face.read_config(str(folder("t5_1_1")))
    free = {"dtype": "bfloat16", "dropout_rate": 0.3, "float32_attention_logits": True}
    for field in T5Config.__dataclass_fields__:
        value = getattr(config, field)
        other = free.get(field, ("relu",) if isinstance(value, tuple) else 2 * value)
        other = not value if isinstance(value, bool) else other
        network = Transformer(T5Config(**{**vars(config), field: other}))
        if field in free:
            hugging_face.check_network(str(folder("t5_1_1")), network)
            continue
        with pytest.raises(ValueError, match=rf"MODEL must .*: {field} is "):
            hugging_face.check_network(str(folder("t5_1_1")), network)


def test_nothing_is_written_over_or_for_a_network_that_transformers_lacks(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="must be local and new"):
        hugging_face.save(str(tmp_path / "there"), {}, subjects.config())
    config = subjects.config(mlp_activations=("tanh",))
    with pytest.raises(ValueError, match=r"must be those of a network of transformers"):
        hugging_face.save(str(tmp_path / "new"), {}, config)
    assert [x.name for x in tmp_path.iterdir()] == ["there"]


@pytest.fixture
def command(tmp_path):
    """The analysis of a checkpoint, as a user types it: status, words, results."""
    forks = Forks(tmp_path)

    def run(path, *more):
        flags = [
            "--gin_file=t5x_fwdloss/configs/standalone/analyze.gin",
            "--gin_file=t5x_fwdloss/configs/standalone/hugging_face.gin",
            f"--gin.CHECKPOINT_PATH='{path}'",
            f"--gin.ANALYSIS_OUTPUT_DIR='{tmp_path}/results'",
            f"--gin.MIXTURE_OR_TASK_NAME='{TASK}'",
            "--gin.TASK_FEATURE_LENGTHS={'inputs': 12, 'targets': 24}",
            "--gin.BATCH_SIZE=4",
            "--gin.NUM_BATCHES=1",
            "--gin.MEASUREMENTS=[@DirectionalDerivatives()]",
            *more,
        ]
        done = forks.run(tmp_path, "t5x_fwdloss.standalone.analyze", flags, {})
        file = tmp_path / "results" / "results.json"
        found = json.loads(file.read_text()) if file.exists() else None
        return done.status, done.says, found

    yield run
    forks.close()


@pytest.mark.timeout(600)
def test_an_analysis_takes_such_a_folder_as_its_checkpoint(command, tmp_path):
    model = model_of(subjects.config())
    dataset = data.DatasetConfig(tasks.TASK_NAME, {"inputs": 12, "targets": 24}, 4)
    (batch,) = data.fixed_batches(dataset, "validation", 1)
    params = model.get_initial_params(jax.random.key(3), batch)
    hugging_face.save(str(tmp_path / "hf"), params, model.module.config)
    status, said, found = command(tmp_path / "hf")
    assert status == 0, said
    loss, _ = jax.jit(model.loss_fn)(params, batch, None)
    assert found["step"] == 0
    assert found["loss_value"] == pytest.approx(float(loss), rel=1e-5)
    status, said, _ = command(tmp_path / "hf", "--gin.network.T5Config.emb_dim=8")
    assert status == 1
    status, said, _ = command(
        tmp_path / "hf",
        "--gin_file=t5x_fwdloss/configs/standalone/tiny.gin",
    )
    assert status == 1
    assert re.search(r"MODEL must be the network of .*: emb_dim is 128, there 16", said)
