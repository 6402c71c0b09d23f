"""Checkpoints between transformers and us, with the library itself on the other side."""

import numpy as np
import pytest

from t5x_fwdloss.analysis.objective import parameters
from t5x_fwdloss.standalone import checkpoints, hugging_face

from .test_hugging_face import assert_computes_the_same, restored

pytestmark = pytest.mark.peers
NETWORKS = ("t5_1_0", "t5_1_1", "mt5", "umt5", "t5_1_1_tied")


@pytest.fixture
def library(repository, monkeypatch):
    monkeypatch.syspath_prepend(repository / "scripts")
    import make_golden_hugging_face

    return make_golden_hugging_face


@pytest.fixture
def written(library, tmp_path):
    """A checkpoint by the library, of other random numbers than those of tests/data."""

    def write(name, **options):
        model, path = library.build(name, seed=1), tmp_path / name
        model.save_pretrained(path, **options)
        np.savez(path / "expected.npz", **library.evaluate(model, seed=1))
        return model, path

    return write


@pytest.mark.parametrize("name", NETWORKS)
def test_both_compute_the_same(written, name):
    assert_computes_the_same(written(name)[1])


def test_files_in_parts_are_read(written):
    _, path = written("t5_1_1", max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    assert_computes_the_same(path)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_library_reads_what_we_write(library, written, tmp_path, name):
    model, path = written(name)
    ours, params, _ = restored(path)
    hugging_face.save(tmp_path / "again", params, ours.module.config)
    kind = (
        type(model)
        if name != "mt5"
        else library.transformers.T5ForConditionalGeneration
    )
    again, report = kind.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    one, other = (library.evaluate(m.eval(), seed=1) for m in (model, again))
    np.testing.assert_array_equal(one["logits"], other["logits"])


@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_of_the_library_changes_the_one_of_its_name(
    library, written, name
):
    model, path = written(name)
    _, before, _ = restored(path)
    names = parameters.named_leaves(before)
    stored = dict(model.named_parameters())
    used = [hugging_face._key(leaf) for leaf in names]
    assert len(set(used)) == len(used)
    assert set(stored) - set(used) <= {hugging_face.UNUSED}
    with library.torch.no_grad():
        for number, key in enumerate(used):
            stored[key] += number + 1
    model.save_pretrained(path)
    after = parameters.named_leaves(checkpoints.restore_params(str(path), before)[1])
    for number, (leaf, value) in enumerate(names.items()):
        np.testing.assert_array_equal(after[leaf], np.asarray(value) + (number + 1))
