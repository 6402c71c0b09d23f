"""The plan of a standalone analysis: from shapes alone, with nothing there to read."""

import jax
import numpy as np
import pytest

from t5x_fwdloss import tasks
from t5x_fwdloss.analysis import Trace
from t5x_fwdloss.standalone import analyze, data

from . import subjects

LENGTHS = {"inputs": 12, "targets": 24}


def planned(folder, **more):
    return analyze.analyze(
        model=subjects.model({"loss_impl": "custom_jvp"}),
        dataset=data.DatasetConfig(tasks.TASK_NAME, LENGTHS, 4),
        checkpoint_path=str(folder / "checkpoint_1"),
        output_dir=str(folder / "analysis"),
        measurements=[Trace(num_probes=8, block_size=1)],
        num_batches=3,
        memory_budget=0,
        plan=True,
        **more,
    )


def test_a_plan_needs_no_checkpoint_reads_no_data_and_writes_nothing(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(data, "fixed_batches", None)
    assert planned(tmp_path, device_memory_gb=1.0, device_tflops=0.1) == 0
    assert list(tmp_path.iterdir()) == []
    first, header, checks, trace, *_, last = capsys.readouterr().out.splitlines()
    shapes = jax.eval_shape(
        subjects.model().get_initial_params,
        jax.random.key(0),
        subjects.packed_batch(),
    )
    count = sum(x.size for x in jax.tree.leaves(shapes))
    assert first.startswith(f"{count:,} parameters on 1 cpu devices, 3 batches;")
    assert header.split()[:3] == ["products", "parameters", "residuals"]
    assert checks.split()[:2] == ["checks", "3"]
    assert trace.split()[:2] == ["hessian_trace", "8"]
    assert "of 1.0 GiB per device" in last


def test_a_run_that_does_not_fit_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="The run must fit the 10.5 KiB of a device"):
        planned(tmp_path, device_memory_gb=1e-5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("pack", [False, True])
def test_the_batch_of_ones_has_the_shapes_of_the_data(pack):
    config = data.DatasetConfig(tasks.TASK_NAME, LENGTHS, 4, pack=pack)
    (real,) = data.fixed_batches(config, "test", 1)
    ones = analyze.batch_of_ones(
        analyze.seqio.EncDecFeatureConverter(pack=pack), LENGTHS, 4
    )
    found, expected = (
        {name: (np.shape(x), np.asarray(x).dtype) for name, x in batch.items()}
        for batch in (ones, real)
    )
    assert found == expected
