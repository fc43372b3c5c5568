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
export TRAINKIT_RECIPE="$run_dir"/settings.yaml

cat > "$run_dir"/expected.json <<'END_OF_FILE'
{
  "strategy": "fsdp",
  "world_size": 2,
  "device": "cuda",
  "dtype": null,
  "on_difference": "warn"
}
END_OF_FILE
cat > "$run_dir"/settings.yaml <<'END_OF_FILE'
version: 1
name: demo
program:
  kind: torch
  folder: null
  script: train.py
  module: null
  args: ["--text", "it's $5"]
  local_rank: false
  public: []
  reads_recipe: true
  verify: auto
devices:
  type: auto
  select: [3, 1]
  order: pci
  when_busy: refuse
  idle_below: 1024
nodes:
  count: 1
  processes_per_node: auto
  rendezvous: auto
strategy:
  kind: fsdp
  version: 2
  sharding: full_shard
  replicate: null
  tensor: 1
  context: 1
  offload: false
  auto_wrap: transformer
  wrap_classes: []
  min_params: 100000000
  prefetch: 1
  reduce_dtype: fp32
  reduce_gradients: each_micro_step
  backward_prefetch: null
  forward_prefetch: null
  limit_all_gathers: null
  use_orig_params: null
  sync_module_states: null
  cpu_ram_efficient_loading: null
  state_dict_type: null
  xla_settings: {}
launcher:
  kind: auto
  max_restarts: 0
  grace_seconds: 30.0
  numa_binding: none
hang:
  after_seconds: auto
  start_seconds: 1800.0
  then: auto
  collective_seconds: 600
container:
  kind: none
precision:
  dtype: fp32
  weights: fp32
  tf32: null
  eval: same
batch:
  global: 64
  micro: 4
  memory_mib: null
  accumulation: auto
  eval_micro: auto
efficiency:
  gradient_checkpointing:
    every: false
    selective: false
  compile:
    enabled: false
    backend: inductor
    mode: default
    dynamic: null
    scope: auto
  offload_activations: false
  attention: auto
model:
  kind: gpt
  layers: 4
  heads: 4
  hidden_size: 128
  vocab_size: 256
  dropout: 0.0
  moe:
    experts: 0
    top_k: 2
    every: 1
    balance_coef: 0.01
    z_coef: 0.001
    parallel: 1
peft:
  kind: none
  rank: 8
  alpha: 16.0
  dropout: 0.0
  target_modules: []
  rslora: false
  dora: false
  path: null
  revision: null
data:
  sequence_length: 128
  workers: 0
  persistent_workers: true
  prefetch_factor: null
  pin_memory: true
  kind: text
  tokenizer: null
  tokenizer_revision: null
  path: python-stdlib
  include: "**/*.py"
  validation_path: null
  validation_fraction: 0.05
  cache: null
optimizer:
  name: adamw_torch
  args: {}
  lr: 0.0003
  weight_decay: 0.1
  beta1: 0.9
  beta2: 0.95
  eps: 1.0e-08
schedule:
  name: cosine
  warmup_steps: 0
  decay_steps: 0.1
  decay_type: linear
  min_lr_ratio: 0.1
  from_zero: false
train:
  loss: null
  loss_reduction: mean
  steps: null
  epochs: null
  seed: 0
  max_grad_norm: 1.0
  deterministic: false
eval:
  every_steps: 0
  batches: 20
  metrics: null
  tokens: null
  best_metric: loss
  greater_is_better: null
  patience: 0
predict:
  split: none
  tokens: null
checkpoint:
  at_end: true
  every_steps: 0
  keep: 2
  keep_best: false
  asynchronous: null
  resume: never
  copy_to: null
  push_to_hub:
    repo: null
    strategy: end
    private: null
logging:
  level: info
  replica_level: warning
  each_node: true
  every_steps: 10
  report_to: []
profile:
  steps: 0
  after: 2
sample:
  prompt: ""
  tokens: 200
  temperature: 0.8
env:
  NCCL_DEBUG: WARN
env_from: [HF_TOKEN]
cluster:
  kind: none
output:
  root: runs
END_OF_FILE

exec /opt/python -P -m torch.distributed.run --nnodes=1 --nproc-per-node=2 --rdzv-backend=c10d \
    --rdzv-endpoint=127.0.0.1:0 --rdzv-conf=is_host=true --local-addr=127.0.0.1 \
    --rdzv-id="$run_id" --max-restarts=0 --log-dir="$attempt_dir"/torchrun --shutdown-timeout=35 \
    --no-python -- /opt/python train.py --text 'it'"'"'s $5'
