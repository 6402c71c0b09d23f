#!/bin/bash
# Trains with stock T5X and a loss of t5x_fwdloss; your own gin files stay as they are.
#
#   MODEL_DIR=/tmp/g2p scripts/train_with_loss.sh
#   MODEL_DIR=/tmp/mine GIN_FILES="my_model.gin my_run.gin" LOSS=chunked \
#     scripts/train_with_loss.sh --gin.TRAIN_STEPS=1000
#
# LOSS is a file of t5x_fwdloss/configs/losses: custom_vjp (T5X's own, bit for bit),
# autodiff, custom_jvp, chunked. Order: your files, the loss, then what overrides both.
set -euo pipefail

: "${MODEL_DIR:?set MODEL_DIR to the (absolute) folder of the run}"
GIN_FILES=${GIN_FILES:-t5x_fwdloss/configs/examples/cmudict_train.gin}
LOSS=${LOSS:-custom_jvp}

files=()
for file in $GIN_FILES; do files+=("--gin_file=$file"); done

exec "${PYTHON:-python}" -m t5x.main --run_mode=train \
  "${files[@]}" \
  "--gin_file=t5x_fwdloss/configs/losses/$LOSS.gin" \
  "--gin.MODEL_DIR='$MODEL_DIR'" \
  "$@"
