#!/bin/bash
# Trains, then analyzes the last checkpoint, on every worker of a Cloud TPU pod slice.
#
#   TPU_NAME=my-v4-32 ZONE=us-central2-b BUCKET=gs://my-bucket/g2p \
#     scripts/tpu_pod_job.sh
#
# Each worker runs the same command, and JAX finds the others by itself. The package, T5X
# and your gin files must be installed on the workers at REMOTE_DIR. DRY_RUN=1 prints the
# commands instead. scripts/pod_dry_run.sh runs the same job here, on two CPU processes.
set -euo pipefail

: "${TPU_NAME:?set TPU_NAME to the name of the slice}"
: "${ZONE:?set ZONE to its zone}"
: "${BUCKET:?set BUCKET to a gs:// folder for checkpoints and results}"
REMOTE_DIR=${REMOTE_DIR:-\$HOME/t5x_fwdloss}
TRAIN_STEPS=${TRAIN_STEPS:-800}
NUM_PARTITIONS=${NUM_PARTITIONS:-1}
LOSS=${LOSS:-custom_jvp}

on_every_worker() {
  local command="cd $REMOTE_DIR && $1"
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    printf 'gcloud compute tpus tpu-vm ssh %q --zone=%q --worker=all --command=%q\n' \
      "$TPU_NAME" "$ZONE" "$command"
  else
    gcloud compute tpus tpu-vm ssh "$TPU_NAME" --zone="$ZONE" --worker=all \
      --command="$command"
  fi
}

on_every_worker "MODEL_DIR=$BUCKET/model LOSS=$LOSS scripts/train_with_loss.sh \
--gin.TRAIN_STEPS=$TRAIN_STEPS --gin.PjitPartitioner.num_partitions=$NUM_PARTITIONS"

on_every_worker "CHECKPOINT=$BUCKET/model/checkpoint_$TRAIN_STEPS \
OUTPUT_DIR=$BUCKET/analysis scripts/analyze.sh \
--gin.PjitPartitioner.num_partitions=$NUM_PARTITIONS"
