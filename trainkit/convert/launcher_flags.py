"""What the launchers' own flags are, and which take a value. Held against the installed launchers by the tests."""

from __future__ import annotations

from trainkit.frameworks.base.argv_reader import Grammar


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TORCHRUN = Grammar(
    "torchrun",
    _words("standalone module no_python run_path virtual_local_rank use_env"),
    _words(
        "nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf max_restarts monitor_interval start_method "
        "event_log_handler role log_dir redirects tee local_ranks_filter duplicate_stdout_filters "
        "duplicate_stderr_filters node_rank master_addr master_port local_addr logs_specs numa_binding "
        "signals_to_handle shutdown_timeout log_line_prefix_template"
    ),
    {"-m": "module", "-r": "redirects", "-t": "tee"},
)
DEEPSPEED = Grammar(
    "deepspeed",
    _words(
        "module no_python no_local_rank no_ssh no_ssh_check force_multi save_pid bind_cores_to_rank quiet "
        "elastic_training"
    ),
    _words(
        "hostfile include exclude num_nodes num_gpus num_accelerators master_port master_addr node_rank launcher "
        "launcher_args enable_each_rank_log autotuning bind_core_list ssh_port venv_script log_level "
        "min_elastic_nodes max_elastic_nodes"
    ),
    {"-H": "hostfile", "-i": "include", "-e": "exclude", "-q": "quiet"},
)
PYTHON = Grammar("python", _words("B E I O P R b d i q s S u v x"), _words("W X"), {})
ACCELERATE = Grammar(
    "accelerate launch",
    _words(
        "quiet cpu multi_gpu tpu enable_cpu_affinity dynamo_use_fullgraph dynamo_use_dynamic "
        "dynamo_use_regional_compilation use_deepspeed use_fsdp use_parallelism_config use_megatron_lm same_network "
        "module no_python tpu_cluster no_tpu_cluster tpu_use_sudo downcast_bf16 fp8_use_autocast_during_eval debug "
        "use_mps_device ipex use_xpu use_tp"
    ),
    _words(
        "config_file mixed_precision num_processes num_machines num_cpu_threads_per_process dynamo_backend dynamo_mode "
        "gpu_ids machine_rank main_process_ip main_process_port tee log_dir role rdzv_backend rdzv_conf max_restarts "
        "monitor_interval vm env main_training_function deepspeed_config_file zero_stage offload_optimizer_device "
        "offload_param_device offload_optimizer_nvme_path offload_param_nvme_path gradient_accumulation_steps "
        "gradient_clipping zero3_init_flag zero3_save_16bit_model deepspeed_hostfile deepspeed_exclusion_filter "
        "deepspeed_inclusion_filter deepspeed_multinode_launcher deepspeed_moe_layer_cls_names aws_access_key_id "
        "aws_secret_access_key mpirun_hostfile mpirun_ccl tp_size"
    ),
    {"-q": "quiet", "-m": "module", "-t": "tee"},
    families=("fsdp_", "megatron_lm_", "fp8_", "parallelism_config_"),
)
