#!/bin/bash
# Analyzes a T5X checkpoint: results.json, report.html and arrays in OUTPUT_DIR.
#
#   CHECKPOINT=/tmp/g2p/checkpoint_800 OUTPUT_DIR=/tmp/g2p_analysis scripts/analyze.sh
#   CHECKPOINT=... OUTPUT_DIR=... \
#     GIN_FILES="t5x_fwdloss/configs/runs/analyze.gin my_model.gin my_task.gin" \
#     scripts/analyze.sh --gin.NUM_BATCHES=8 --gin.BATCH_SIZE=32 \
#     --gin.MEASUREMENTS="[@DirectionalDerivatives()]"
#
# The same command, run again, resumes a run that was stopped.
set -euo pipefail

: "${CHECKPOINT:?set CHECKPOINT to one checkpoint, such as /tmp/g2p/checkpoint_800}"
: "${OUTPUT_DIR:?set OUTPUT_DIR to the folder of the results}"
GIN_FILES=${GIN_FILES:-t5x_fwdloss/configs/examples/cmudict_analyze.gin}

files=()
for file in $GIN_FILES; do files+=("--gin_file=$file"); done

exec "${PYTHON:-python}" -m t5x_fwdloss.analyze \
  "${files[@]}" \
  "--gin.CHECKPOINT_PATH='$CHECKPOINT'" \
  "--gin.ANALYSIS_OUTPUT_DIR='$OUTPUT_DIR'" \
  "$@"
