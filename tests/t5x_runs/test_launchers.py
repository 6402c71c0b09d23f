"""The launchers that users copy: what they run, and the pod job's dry run, really run."""

import json
import os
import subprocess
import sys

import pytest

from t5x_runs.conftest import NETWORK, Project

# The time limit is for two processes that share two cores, on a machine that is busy.
pytestmark = [pytest.mark.t5x, pytest.mark.timeout(1800)]


def launch(repository, name, *argv, **env):
    return subprocess.run(
        [repository / "scripts" / name, *argv],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )


COMMANDS = {
    "train_with_loss.sh": (
        {"MODEL_DIR": "/m", "GIN_FILES": "a.gin b.gin", "LOSS": "chunked"},
        "-m t5x.main --run_mode=train --gin_file=a.gin --gin_file=b.gin "
        "--gin_file=t5x_fwdloss/configs/losses/chunked.gin --gin.MODEL_DIR='/m' "
        "--gin.TRAIN_STEPS=7",
    ),
    "eval_with_loss.sh": (
        {"CHECKPOINT": "/m/checkpoint_7", "OUTPUT_DIR": "/o", "RUN_MODE": "infer"},
        "-m t5x.main --run_mode=infer "
        "--gin_file=t5x_fwdloss/configs/examples/cmudict_infer.gin "
        "--gin_file=t5x_fwdloss/configs/losses/custom_jvp.gin "
        "--gin.CHECKPOINT_PATH='/m/checkpoint_7' --gin.INFER_OUTPUT_DIR='/o' "
        "--gin.TRAIN_STEPS=7",
    ),
    "analyze.sh": (
        {"CHECKPOINT": "/m/checkpoint_7", "OUTPUT_DIR": "/o"},
        "-m t5x_fwdloss.analyze "
        "--gin_file=t5x_fwdloss/configs/examples/cmudict_analyze.gin "
        "--gin.CHECKPOINT_PATH='/m/checkpoint_7' --gin.ANALYSIS_OUTPUT_DIR='/o' "
        "--gin.TRAIN_STEPS=7",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_launcher_runs_one_command_and_names_what_is_missing(repository, name):
    settings, command = COMMANDS[name]
    done = launch(repository, name, "--gin.TRAIN_STEPS=7", PYTHON="echo", **settings)
    assert done.stdout.strip() == command
    missing = launch(repository, name, PYTHON="echo")
    assert missing.returncode != 0
    assert f"set {next(iter(settings))} to" in missing.stderr


def test_the_pod_job_runs_the_launchers_on_every_worker(repository):
    settings = {"TPU_NAME": "pod", "ZONE": "zone", "BUCKET": "gs://b/x", "DRY_RUN": "1"}
    done = launch(repository, "tpu_pod_job.sh", **settings)
    train, analyze = done.stdout.splitlines()
    for line in (train, analyze):
        assert line.startswith(
            "gcloud compute tpus tpu-vm ssh pod --zone=zone --worker=all"
        )
    assert "scripts/train_with_loss.sh" in train
    assert "scripts/analyze.sh" in analyze
    assert "checkpoint_800" in analyze


# What Slurm gives to a job, in place of its own commands: two processes, one after the
# other, and a note of what is put back into the queue.
SLURM = {
    "srun": "while [[ $1 == --* ]]; do shift; done\n"
    'for SLURM_PROCID in 0 1; do export SLURM_PROCID; "$@" || exit $?; done',
    "scontrol": 'if [[ $1 == requeue ]]; then echo "requeued $2"; '
    "else echo node7; echo node8; fi",
    "interpreter": 'echo "$@"; [[ $2 == "$STOPPED" ]] && exit 143 || exit 0',
}


@pytest.fixture
def slurm(tmp_path, repository):
    for name, script in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)

    def submit(**env):
        given = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHON": "interpreter",
            "SLURM_JOB_ID": "20003",
            "SLURM_NTASKS": "2",
            "SLURM_JOB_NODELIST": "node[7-8]",
            "SHARED": "/shared/x",
            "STOPPED": "",
        }
        done = launch(repository, "slurm_gpu_job.sh", **given | env)
        return done.returncode, done.stdout.splitlines()

    return submit


def test_the_slurm_job_runs_one_process_on_each_node(slurm):
    status, lines = slurm(NUM_PARTITIONS="4", TRAIN_STEPS="9")
    assert status == 0
    assert [line.split()[1] for line in lines] == (
        2 * ["t5x.train"] + 2 * ["t5x_fwdloss.analyze"]
    )
    for index, line in enumerate(lines):
        assert line.endswith(
            "--gin.PjitPartitioner.num_partitions=4 --multiprocess_gpu "
            "--coordinator_address=node7:20003 --process_count=2 "
            f"--process_index={index % 2}"
        )
    assert "--gin.MODEL_DIR='/shared/x/model' --gin.TRAIN_STEPS=9" in lines[0]
    assert "--gin.CHECKPOINT_PATH='/shared/x/model/checkpoint_9'" in lines[2]


@pytest.mark.parametrize("stopped", ["t5x.train", "t5x_fwdloss.analyze"])
def test_a_slurm_job_that_a_signal_stopped_goes_back_into_the_queue(slurm, stopped):
    status, lines = slurm(STOPPED=stopped)
    assert status == 143
    assert stopped in lines[-2]
    assert lines[-1] == "requeued 20003"


def test_the_dry_run_trains_and_analyzes_on_two_processes_of_two_devices(
    repository, tmp_path
):
    (tmp_path / "my_network.gin").write_text(NETWORK)
    done = launch(
        repository,
        "pod_dry_run.sh",
        f"--gin_file={tmp_path}/my_network.gin",
        WORK_DIR=str(tmp_path),
        PYTHON=sys.executable,
        XLA_FLAGS="--xla_backend_optimization_level=0",  # it need not be fast
        TRAIN_ARGS="--gin.train.eval_steps=2",
        ANALYZE_ARGS="--gin.DirectionalDerivatives.num_random=1 "
        "--gin.MEASUREMENTS=[@DirectionalDerivatives(),@Eigenpairs()] "
        "--gin.Eigenpairs.tolerance=0.3 --gin.Eigenpairs.num_largest=1",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "analysis" / "results.json").read_text())
    assert results["step"] == 4
    assert results["status"] == "finished"
    measured, eigenpairs = results["measurements"]
    # T5X's own evaluation, on the same two processes: the mean of the same two batches.
    evaluation = Project(tmp_path).losses("model", "loss", "training_eval/cmudict_g2p")[
        4
    ]
    loss = measured["results"]["loss"]["value"]
    assert loss == pytest.approx(2 * evaluation, rel=1e-5)
    # One more product, on both processes, says that it is an eigenpair.
    ends = [eigenpairs["results"][f"{end}_1"] for end in ("largest", "smallest")]
    scale = max(abs(pair["value"]) for pair in ends)
    assert all(0 < pair["error"] <= 0.3 * scale for pair in ends)
    assert results["environment"]["mesh"] == {"data": 2, "model": 2}
