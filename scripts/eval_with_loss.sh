#!/bin/bash
# Evaluates a checkpoint with stock T5X and a loss of t5x_fwdloss.
#
#   CHECKPOINT=/tmp/g2p/checkpoint_800 OUTPUT_DIR=/tmp/g2p_eval scripts/eval_with_loss.sh
#
# GIN_FILES are your own eval files (run file, model, task), LOSS as in
# train_with_loss.sh. For scores: RUN_MODE=infer, with GIN_FILES of an infer run.
set -euo pipefail

: "${CHECKPOINT:?set CHECKPOINT to one checkpoint, such as /tmp/g2p/checkpoint_800}"
: "${OUTPUT_DIR:?set OUTPUT_DIR to the folder of the results}"
RUN_MODE=${RUN_MODE:-eval}
GIN_FILES=${GIN_FILES:-t5x_fwdloss/configs/examples/cmudict_$RUN_MODE.gin}
LOSS=${LOSS:-custom_jvp}

files=()
for file in $GIN_FILES; do files+=("--gin_file=$file"); done

exec "${PYTHON:-python}" -m t5x.main "--run_mode=$RUN_MODE" \
  "${files[@]}" \
  "--gin_file=t5x_fwdloss/configs/losses/$LOSS.gin" \
  "--gin.CHECKPOINT_PATH='$CHECKPOINT'" \
  "--gin.${RUN_MODE^^}_OUTPUT_DIR='$OUTPUT_DIR'" \
  "$@"
