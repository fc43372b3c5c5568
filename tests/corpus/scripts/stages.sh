#!/bin/bash
# A fine-tuning script with defaults, an accumulation that is computed, and a log.
set -x
GPUS=${GPUS:-8}
BATCH_SIZE=${BATCH_SIZE:-128}
PER_DEVICE_BATCH_SIZE=${PER_DEVICE_BATCH_SIZE:-4}
GRADIENT_ACC=$((BATCH_SIZE / PER_DEVICE_BATCH_SIZE / GPUS))

export PYTHONPATH="${PYTHONPATH}:$(pwd)"
export TF_CPP_MIN_LOG_LEVEL=3

OUTPUT_DIR='work_dirs/first'
if [ ! -d "$OUTPUT_DIR" ]; then
  mkdir -p "$OUTPUT_DIR"
fi

cd $(dirname $0)/..
torchrun \
  --nnodes=1 --node_rank=0 --master_addr=127.0.0.1 \
  --nproc_per_node=${GPUS} \
  --master_port=${MASTER_PORT:-34229} \
  train_hf.py \
  --do_train True \
  --output_dir ${OUTPUT_DIR} \
  --per_device_train_batch_size ${PER_DEVICE_BATCH_SIZE} \
  --gradient_accumulation_steps ${GRADIENT_ACC} \
  --bf16 True \
  --deepspeed "deepspeed/auto2.json" \
  2>&1 | tee -a "${OUTPUT_DIR}/training_log.txt"
