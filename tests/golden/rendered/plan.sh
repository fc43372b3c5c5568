#!/bin/sh
# demo: strategy fsdp, launcher torchrun, 2 ranks.
set -eu

# What is known only now. Each value can be given in the environment under its upper-case name.
run_id=${RUN_ID:-$(date +%Y%m%d-%H%M%S)-$$}
run_dir=${RUN_DIR:-}
[ -n "$run_dir" ] || run_dir=runs/demo/$run_id
mkdir -p "$run_dir/attempts/1"
run_dir=$(CDPATH="" cd -- "$run_dir" && pwd)
attempt_dir=$run_dir/attempts/1

: "${HF_TOKEN:?the recipe takes it from the environment (env_from)}"
export HF_TOKEN

# What must not leak in.
unset CROSS_RANK CROSS_SIZE DS_ACCELERATOR GROUP_RANK GROUP_WORLD_SIZE LOCAL_RANK LOCAL_SIZE \
    LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT NODE_RANK PYTHON_EXEC RANK ROLE_NAME ROLE_RANK \
    ROLE_WORLD_SIZE WORLD_SIZE
for name in $(env | sed -n 's/^\([A-Za-z_][A-Za-z0-9_]*\)=.*/\1/p'); do
    case $name in
        HF_TOKEN) ;;
        ACCELERATE_*|FSDP_*|MEGATRON_LM_*|PARALLELISM_CONFIG_*|PET_*|TORCHELASTIC_*|TORCH_ELASTIC_*) unset "$name" ;;
    esac
done

export CUDA_DEVICE_ORDER=PCI_BUS_ID
export CUDA_VISIBLE_DEVICES=GPU-30000003-1111-2222-3333-444444444444,GPU-10000001-1111-2222-3333-444444444444
export NCCL_DEBUG=WARN
export OMP_NUM_THREADS=8
export PYTHONUNBUFFERED=1
export TORCH_FR_BUFFER_SIZE=2000
export TRAINKIT_RECIPE="$run_dir"/recipe.yaml

cat > "$run_dir"/expected.json <<'END_OF_FILE'
{
  "strategy": "fsdp",
  "world_size": 2,
  "device": "cuda",
  "dtype": null,
  "on_difference": "warn"
}
END_OF_FILE

exec /opt/python -P -m torch.distributed.run --nnodes=1 --nproc-per-node=2 --rdzv-backend=c10d \
    --rdzv-endpoint=127.0.0.1:0 --rdzv-conf=is_host=true --local-addr=127.0.0.1 \
    --rdzv-id="$run_id" --max-restarts=0 --log-dir="$attempt_dir"/torchrun --shutdown-timeout=35 \
    --no-python -- /opt/python train.py --text 'it'"'"'s $5'
