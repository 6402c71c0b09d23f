#!/bin/bash
#SBATCH --job-name=t5x_fwdloss
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
# Trains, then analyzes the last checkpoint, on the GPU nodes of a Slurm job: one process
# per node, which holds all of its GPUs.
#
#   SHARED=/shared/g2p sbatch scripts/slurm_gpu_job.sh
#
# Run it from the package's folder. SHARED is a folder that all nodes see; the package,
# T5X and your gin files must be on every node, with PYTHON as their interpreter. Slurm
# sends SIGTERM three minutes before the time limit, and before it preempts: the analysis
# saves its state and leaves with status 143; a training ends with it, too. The job then
# goes back into the queue, and resumes from the last checkpoint or the saved state.
# DRY_RUN=1, without Slurm, prints the commands of the first process instead.
set -euo pipefail

: "${SHARED:?set SHARED to a folder that all nodes see, for checkpoints and results}"
GIN_FILES=${GIN_FILES:-t5x_fwdloss/configs/examples/cmudict_train.gin}
ANALYSIS_GIN_FILES=${ANALYSIS_GIN_FILES:-t5x_fwdloss/configs/examples/cmudict_analyze.gin}
TRAIN_STEPS=${TRAIN_STEPS:-800}
NUM_PARTITIONS=${NUM_PARTITIONS:-1}
LOSS=${LOSS:-custom_jvp}

if [[ ${DRY_RUN:-0} == 1 ]]; then
  PYTHON=echo COORDINATOR=localhost:12345 SLURM_NTASKS=1 SLURM_PROCID=0
  srun() { while [[ $1 == --* ]]; do shift; done; "$@"; }
else
  # Every process finds process 0 on the first node, at a port that other jobs do not use.
  COORDINATOR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((
    20000 + SLURM_JOB_ID % 20000))
fi
export PYTHON=${PYTHON:-python} COORDINATOR SLURM_NTASKS SLURM_PROCID

# Runs one command as all processes; one that a signal stopped goes back into the queue.
on_every_node() {
  local status=0
  # SLURM_PROCID is the process's own.
  # shellcheck disable=SC2016
  srun --kill-on-bad-exit=1 bash -c 'exec "$PYTHON" -m "$@" --multiprocess_gpu \
    --coordinator_address="$COORDINATOR" --process_count="$SLURM_NTASKS" \
    --process_index="$SLURM_PROCID"' process "$@" || status=$?
  if [[ $status == 143 ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
  return "$status"
}

files=()
for file in $GIN_FILES; do files+=("--gin_file=$file"); done
analysis_files=()
for file in $ANALYSIS_GIN_FILES; do analysis_files+=("--gin_file=$file"); done

# t5x.train, because t5x.main does not have the flags for many processes.
on_every_node t5x.train "${files[@]}" \
  "--gin_file=t5x_fwdloss/configs/losses/$LOSS.gin" \
  "--gin.MODEL_DIR='$SHARED/model'" \
  "--gin.TRAIN_STEPS=$TRAIN_STEPS" \
  "--gin.PjitPartitioner.num_partitions=$NUM_PARTITIONS"

on_every_node t5x_fwdloss.analyze "${analysis_files[@]}" \
  "--gin.CHECKPOINT_PATH='$SHARED/model/checkpoint_$TRAIN_STEPS'" \
  "--gin.ANALYSIS_OUTPUT_DIR='$SHARED/analysis'" \
  "--gin.PjitPartitioner.num_partitions=$NUM_PARTITIONS"
