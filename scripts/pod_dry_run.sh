#!/bin/bash
# The job of tpu_pod_job.sh on this machine: two processes of two CPU devices each train
# a few steps with T5X's own multi-process flags, then analyze the checkpoint together.
#
#   WORK_DIR=/tmp/pod scripts/pod_dry_run.sh
#
# On two data shards and two model partitions; a minute or two on two cores. Further
# arguments go to both runs; TRAIN_ARGS and ANALYZE_ARGS to one of them, word by word.
set -euo pipefail

WORK_DIR=${WORK_DIR:-$(mktemp -d)}
TRAIN_STEPS=${TRAIN_STEPS:-4}
LOSS=${LOSS:-custom_jvp}
PYTHON=${PYTHON:-python}
export JAX_PLATFORMS=cpu
export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=2"
export JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo
mkdir -p "$WORK_DIR"

# Runs the same command as both processes; the log of each is in WORK_DIR.
on_both() {
  local name=$1 port processes=() status=0
  shift
  port=$("$PYTHON" -c 'import socket as s; x = s.socket(); x.bind(("localhost", 0));
print(x.getsockname()[1])')
  for index in 0 1; do
    "$PYTHON" -m "$@" --multiprocess_gpu --coordinator_address="localhost:$port" \
      --process_count=2 --process_index=$index \
      >"$WORK_DIR/$name.$index.log" 2>&1 &
    processes+=($!)
  done
  for process in "${processes[@]}"; do wait "$process" || status=$?; done
  if [[ $status != 0 ]]; then
    tail -n 20 "$WORK_DIR/$name".*.log >&2
    echo "$name failed; whole logs: $WORK_DIR/$name.0.log and .1.log" >&2
    exit "$status"
  fi
  echo "$name: done"
}

# t5x.train, because t5x.main does not have the multi-process flags.
# shellcheck disable=SC2086
on_both train t5x.train \
  --gin_file=t5x_fwdloss/configs/examples/cmudict_train.gin \
  "--gin_file=t5x_fwdloss/configs/losses/$LOSS.gin" \
  "--gin.MODEL_DIR='$WORK_DIR/model'" \
  "--gin.TRAIN_STEPS=$TRAIN_STEPS" \
  "--gin.train.eval_period=$TRAIN_STEPS" \
  "--gin.SaveCheckpointConfig.period=$TRAIN_STEPS" \
  --gin.BATCH_SIZE=8 ${TRAIN_ARGS:-} "$@"

# shellcheck disable=SC2086
on_both analyze t5x_fwdloss.analyze \
  --gin_file=t5x_fwdloss/configs/examples/cmudict_analyze.gin \
  "--gin.CHECKPOINT_PATH='$WORK_DIR/model/checkpoint_$TRAIN_STEPS'" \
  "--gin.ANALYSIS_OUTPUT_DIR='$WORK_DIR/analysis'" \
  --gin.NUM_BATCHES=2 --gin.BATCH_SIZE=8 \
  "--gin.MEASUREMENTS=[@DirectionalDerivatives()]" ${ANALYZE_ARGS:-} "$@"

echo "results: $WORK_DIR/analysis/results.json"
