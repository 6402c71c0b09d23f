"""Checkpoints: found or named as missing; parameters that fit, or both sides named."""

import gc

import numpy as np
import pytest

pytestmark = pytest.mark.t5x


@pytest.fixture(autouse=True)
def what_t5x_leaves_open():
    """T5X's older checkpointer leaves an event loop; collect it in its own test."""
    yield
    gc.collect()


def find(path, mode="specific"):
    from t5x import utils

    from t5x_fwdloss.t5x_host import checkpoint

    return checkpoint.find_checkpoint(utils.RestoreCheckpointConfig(path, mode=mode))


@pytest.fixture
def model_dir(tmp_path):
    for name in ("checkpoint_5", "checkpoint_50", "checkpoint_9", "train"):
        (tmp_path / name / "state").mkdir(parents=True)
    return str(tmp_path)


@pytest.mark.parametrize("mode", ["specific", "latest"])
def test_a_checkpoint_is_its_own_path_and_the_latest_has_the_most_steps(
    model_dir, mode
):
    assert find(f"{model_dir}/checkpoint_9/", mode) == f"{model_dir}/checkpoint_9"
    assert find(f"{model_dir}/", mode) == f"{model_dir}/checkpoint_50"


def test_a_home_folder_and_the_working_directory_are_expanded(model_dir, monkeypatch):
    monkeypatch.setenv("HOME", model_dir)
    monkeypatch.chdir(model_dir)
    for path in ("~/checkpoint_9", "checkpoint_9", "./checkpoint_9/"):
        assert find(path) == f"{model_dir}/checkpoint_9"


def test_a_missing_checkpoint_lists_what_is_there_in_order_of_steps(model_dir):
    listed = ", ".join(f"checkpoint_{n}" for n in (5, 9, 50))
    with pytest.raises(ValueError, match=f"no checkpoint at .*_7: .* has {listed}"):
        find(f"{model_dir}/checkpoint_7")


def test_a_folder_without_checkpoints_says_what_it_has(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} has nothing in it"):
        find(f"{tmp_path}/checkpoint_7")
    (tmp_path / "notes.txt").write_text("")
    for path in (f"{tmp_path}/checkpoint_7", str(tmp_path)):
        with pytest.raises(ValueError, match=f"{tmp_path} has notes.txt"):
            find(path)
    with pytest.raises(ValueError, match=f"the folder {tmp_path}/no does not exist"):
        find(f"{tmp_path}/no/checkpoint_7")


@pytest.mark.parametrize("path", [["a", "b"], []])
def test_one_checkpoint_is_one_string(path):
    with pytest.raises(ValueError, match="takes one checkpoint: got CHECKPOINT_PATH"):
        find(path)
    with pytest.raises(ValueError, match="with mode 'all'"):
        find("somewhere", "all")


def test_parameters_that_are_not_known_are_left_to_the_restoring():
    from t5x import utils

    from t5x_fwdloss.t5x_host.checkpoint import fit_to_checkpoint

    cfg = utils.RestoreCheckpointConfig(path="here")
    fit_to_checkpoint(cfg, None, {"a": (1,)})
    with pytest.raises(ValueError, match="of here must be those of MODEL: 1 differ"):
        fit_to_checkpoint(cfg, {}, {"a": (1,)})


def test_a_mesh_that_does_not_divide_a_parameter_is_named():
    import jax
    from jax.sharding import PartitionSpec

    from t5x_fwdloss.t5x_host.checkpoint import check_mesh

    shapes = {"head": {"kernel": jax.ShapeDtypeStruct((6, 8), np.float32)}}

    def axes(*names):
        return {"head": {"kernel": PartitionSpec(*names)}}

    check_mesh(shapes, axes(None, "model"), {"data": 3, "model": 4})
    check_mesh(shapes, axes("data", "model"), {"data": 3, "model": 4})
    check_mesh(shapes, {"head": {"kernel": None}}, {"data": 5, "model": 5})
    message = r"head/kernel \(6, 8\) has a dimension of 8 over axis dataxmodel of 12"
    with pytest.raises(ValueError, match=message):
        check_mesh(shapes, axes(None, ("data", "model")), {"data": 3, "model": 4})


FOUND = {"encoder/mlp/kernel": (2, 3), "encoder/prompt/prompt": (4, 2)}
# What prompt-tuning projects bind in the file of the model.
SKIP_PROMPT = ((r"^.*prompt.*$", None),)


def fitted(found, wanted, rest=(), **settings):
    from t5x import utils

    from t5x_fwdloss.t5x_host import checkpoint

    cfg = utils.RestoreCheckpointConfig(
        "/c", mode="specific", state_transformation_fns=rest, **settings
    )
    checkpoint.fit_to_checkpoint(cfg, found, wanted)
    return cfg


@pytest.mark.parametrize("rest", [(), ("another",)])
@pytest.mark.parametrize(
    "settings",
    [
        {"fallback_to_scratch": True},
        {"fallback_to_scratch": True, "assignment_map": SKIP_PROMPT},
        {"assignment_map": ((r"^target/encoder/(.*)", r"target/shared/\1"),)},
    ],
)
def test_what_starts_training_from_another_checkpoint_is_dropped_where_all_is_there(
    settings, rest
):
    cfg = fitted(dict(FOUND), FOUND, rest, **settings)
    assert not cfg.fallback_to_scratch
    assert cfg.state_transformation_fns == rest


def test_parameters_that_would_start_from_scratch_are_refused():
    base = {"encoder/mlp/kernel": (2, 3)}
    message = (
        r"starts none from scratch.*: /c has no encoder/prompt/prompt; give a "
        "checkpoint that training with this model saved"
    )
    with pytest.raises(ValueError, match=message):
        fitted(base, FOUND, fallback_to_scratch=True, assignment_map=SKIP_PROMPT)
    many = {f"encoder/prompt_{n}": (1,) for n in range(5)}
    with pytest.raises(ValueError, match="prompt_2 and 2 more; give"):
        fitted(base, base | many, assignment_map=SKIP_PROMPT)
    with pytest.raises(ValueError, match="1 differ: encoder/prompt/prompt: checkpoint"):
        fitted(base, FOUND, fallback_to_scratch=True)


def test_a_map_that_renames_is_kept_and_one_that_does_not_fit_is_a_sentence():
    old = {name.replace("encoder", "shared"): x for name, x in FOUND.items()}
    rename = ((r"target/encoder/(.*)", r"target/shared/\1"), (r"state/.*", None))
    (kept,) = fitted(old, FOUND, assignment_map=rename).state_transformation_fns
    moved = kept({"target": {"shared": {"x": 1}}}, {"target": {"encoder": {"x": 0}}})
    assert moved == {"target": {"encoder": {"x": 1}}}
    wrong = ((r"target/encoder/(.*)", r"target/nowhere/\1"),)
    with pytest.raises(ValueError, match=r"must fit the checkpoint /c: .*nowhere\S+ d"):
        fitted(old, FOUND, assignment_map=wrong)
    with pytest.raises(ValueError, match=r"checkpoint \(2, 4\), model \(2, 3\)"):
        fitted(old | {"shared/mlp/kernel": (2, 4)}, FOUND, assignment_map=rename)


# T5X's checkpoint manager, and settings of a model that adds parameters.
CONFIGURATIONS = {
    "orbax": (True, {}),
    "older": (False, {}),
    "prompt": (
        True,
        {
            "fallback_to_scratch": True,
            "assignment_map": ((r"^.*logits_dense.*$", None),),
            "restore_dataset": True,
        },
    ),
}


@pytest.mark.parametrize("how", CONFIGURATIONS)
def test_t5x_s_older_format_restores_and_its_shapes_are_read(tmp_path, how, caplog):
    import jax
    from t5x import checkpoints, partitioning, utils
    from t5x_models import subjects
    from t5x_models.test_networks import t5

    from t5x_fwdloss.t5x_host import checkpoint

    use_orbax, settings = CONFIGURATIONS[how]
    features = subjects.batch("encoder_decoder")
    model = subjects.ours("encoder_decoder", "custom_jvp", t5())
    partitioner = partitioning.PjitPartitioner(num_partitions=1)
    initializer = utils.TrainStateInitializer(
        None,
        model.get_initial_variables,
        {name: x.shape for name, x in features.items()},
        partitioner,
    )
    state = initializer.from_scratch(jax.random.PRNGKey(0))
    saver = checkpoints.Checkpointer(state, partitioner, str(tmp_path))
    saver.save(state)
    path = str(tmp_path / "checkpoint_0")
    shapes = checkpoint.parameter_shapes(path)
    assert shapes["token_embedder/embedding"] == (24, 8)
    # A folder of checkpoints: the latest, and it says which.
    cfg = utils.RestoreCheckpointConfig(
        str(tmp_path), mode="specific", dtype="float32", **settings
    )
    restorer = checkpoint.Restorer(initializer, partitioner, cfg, use_orbax)
    with caplog.at_level("INFO", logger="absl"):
        restored = restorer.restore()
    assert f"Restoring {path}" in caplog.messages
    assert (restored.step, restored.path) == (0, path)
    subjects.assert_close(restored.params, state.params, 0.0)


@pytest.mark.parametrize("content", [b"", b"{", bytes(range(256)), b"[1]"])
def test_damaged_metadata_is_named(tmp_path, content):
    from t5x_fwdloss.t5x_host import checkpoint

    path = tmp_path / "checkpoint_5"
    (path / "state").mkdir(parents=True)
    (path / "state" / "_METADATA").write_bytes(content)
    with pytest.raises(ValueError, match=f"{path}/state must be whole and readable: "):
        checkpoint.parameter_shapes(str(path))


def restore_raising(monkeypatch, path, error):
    """T5X's restoring where its code raises this."""
    from t5x import utils

    from t5x_fwdloss.t5x_host import checkpoint

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(utils, "create_checkpoint_manager_and_restore", fail)
    restorer = checkpoint.Restorer.__new__(checkpoint.Restorer)
    restorer._initializer = restorer._partitioner = None
    restorer._use_orbax = True
    restorer._restored(None, str(path))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        # As Orbax says it of a truncated array: an exception of no class of its own.
        (
            Exception("Encountered error while reading array index: 0.\nSee below."),
            "a file in it is damaged",
        ),
        (PermissionError(13, "Permission denied"), "Permission denied"),
        (EOFError("Ran out of input"), "its content is damaged"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_files_report_is_called_damage(tmp_path, monkeypatch, error, words):
    sentence = f"{tmp_path} must be whole and readable: {words}. If it is damaged, "
    with pytest.raises(ValueError, match=sentence):
        restore_raising(monkeypatch, tmp_path, error)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            TypeError("f() takes 1 argument\nbut got 2."),
            r"TypeError: f\(\) takes 1 arg",
        ),
        (KeyError("target"), r"KeyError: 'target'\. Either"),
        (AttributeError("no attribute 'm'."), r"AttributeError: no attribute 'm'\. E"),
        (ValueError("Rules must match."), r"ValueError: Rules must match\. Either"),
        (RuntimeError(), r"RuntimeError\. Either"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_may_be_of_the_configuration_keeps_its_type_and_words(
    tmp_path, monkeypatch, error, words
):
    message = f"The checkpoint {tmp_path} could not be read: {words}"
    with pytest.raises(ValueError, match=message) as raised:
        restore_raising(monkeypatch, tmp_path, error)
    assert "damaged" not in str(raised.value)
