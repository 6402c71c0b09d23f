"""The plan of a T5X analysis on a mesh that this machine does not have."""

import pytest

pytestmark = [pytest.mark.t5x, pytest.mark.timeout(600)]

EXAMPLE = "--gin_file=t5x_fwdloss/configs/examples/cmudict_analyze.gin"


def plan(project, *flags):
    return project.run(
        "t5x_fwdloss.analyze",
        EXAMPLE,
        "--gin_file=my_network.gin",
        "--plan",
        "--gin.PLAN_DEVICES=8",
        "--gin.PjitPartitioner.num_partitions=2",
        "--gin.CHECKPOINT_PATH='/no/model/checkpoint_1'",
        f"--gin.ANALYSIS_OUTPUT_DIR='{project.path / 'planned'}'",
        "--gin.MEASUREMENTS=[@Trace()]",
        "--gin.Trace.block_size=1",
        "--gin.MEMORY_BUDGET=0",
        "--gin.BATCH_SIZE=8",
        "--gin.NUM_BATCHES=1",
        *flags,
    )


def test_a_plan_simulates_the_mesh_and_writes_nothing(project):
    done = plan(project, "--gin.DEVICE_MEMORY_GB=1.0")
    assert done.status == 0, done.log[-3000:]
    assert "parameters on 8 cpu devices, 1 batches;" in done.says
    assert "hessian_trace" in done.says
    assert "of 1.0 GiB per device" in done.says
    assert not (project.path / "planned").exists()


def test_partitions_that_do_not_divide_the_devices_are_rejected(project):
    done = plan(project, "--gin.PjitPartitioner.num_partitions=3")
    assert done.status == 1
    assert (
        "PLAN_DEVICES must be a multiple of the model partitions: got 8 devices, 3 "
        "partitions." in done.says
    )
