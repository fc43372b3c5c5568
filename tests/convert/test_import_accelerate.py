"""accelerate's files of any age and `accelerate launch` as recipes, with what accelerate would lose or misread."""

from __future__ import annotations

from typing import Any

import pytest

from tests.convert.reading import checked, comments, imported, read, refusal, settings
from tests.made_up_recipes import MemoryFiles
from trainkit.convert.importing import recipe_text
from trainkit.tools.base.imported_recipe import ImportContext, ImportedRecipe

# (a) to (d) as `accelerate config` wrote them at the time of the guides.
TWO_MACHINES = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
downcast_bf16: 'no'
gpu_ids: all
machine_rank: 0
main_process_ip: 192.168.20.1
main_process_port: 9898
main_training_function: main
mixed_precision: fp16
num_machines: 2
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
SHARDED = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
mixed_precision: bf16
num_machines: 1
num_processes: 2
"""
BY_FILE = """\
compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_config_file: ds.json
  zero3_init_flag: true
distributed_type: DEEPSPEED
machine_rank: 0
num_machines: 1
num_processes: 4
"""
BY_KEYS = """\
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 0.7
  offload_optimizer_device: cpu
  offload_param_device: cpu
  zero3_init_flag: true
  zero_stage: 2
distributed_type: DEEPSPEED
machine_rank: 0
mixed_precision: bf16
num_machines: 1
num_processes: 4
"""
SECOND = """\
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 5000
  fsdp_offload_params: true
  fsdp_activation_checkpointing: true
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_use_regional_compilation: true
mixed_precision: 'no'
num_processes: 2
"""
OLDEST = "distributed_type: MULTI_GPU\nfp16: true\nnum_processes: 2\nnum_machines: 1\nmachine_rank: 0\n"
FILES: dict[str, Any] = {"ds.json": {"zero_optimization": {"stage": 3}}}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp on two machines": (TWO_MACHINES, {
        "strategy.kind": "ddp", "precision.dtype": "fp16", "nodes.count": 2, "nodes.processes_per_node": 4,
        "nodes.rendezvous": "192.168.20.1:9898",
    }),
    "fsdp": (SHARDED, {
        "strategy.kind": "fsdp", "strategy.version": 1, "strategy.sharding": "full_shard", "strategy.offload": False,
        "strategy.auto_wrap": "transformer", "strategy.wrap_classes": ["BertLayer"],
        "strategy.backward_prefetch": "backward_pre", "strategy.forward_prefetch": True,
        "strategy.state_dict_type": "full", "strategy.sync_module_states": True, "strategy.use_orig_params": True,
        "precision.dtype": "bf16", "nodes.processes_per_node": 2,
    }),
    "fsdp over replicas": ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}\n", {
        "strategy.kind": "fsdp", "strategy.version": 1, "strategy.sharding": "hybrid_shard",
        "strategy.auto_wrap": "none", "devices.select": "all",
    }),
    "fsdp without shards": ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 3}\n", {
        "strategy.kind": "fsdp", "strategy.version": 1, "strategy.sharding": "no_shard",
        "strategy.auto_wrap": "none", "devices.select": "all",
    }),
    "deepspeed by file": (BY_FILE, {
        "strategy.kind": "zero3", "strategy.config": "/here/ds.json", "nodes.processes_per_node": 4,
    }),
    "models built whole": (BY_FILE.replace("flag: true", "flag: false"), {
        "strategy.kind": "zero3", "strategy.config": "/here/ds.json", "nodes.processes_per_node": 4,
        "env.ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    }),
    "deepspeed by keys": (BY_KEYS, {
        "strategy.kind": "zero2", "strategy.offload_optimizer": "cpu", "batch.accumulation": 1,
        "train.max_grad_norm": 0.7, "precision.dtype": "bf16", "nodes.processes_per_node": 4,
    }),
    "weights gathered": (BY_KEYS.replace("zero_stage: 2", "zero_stage: 3\n  zero3_save_16bit_model: true"), {
        "strategy.kind": "zero3", "strategy.offload_optimizer": "cpu", "strategy.offload_param": "cpu",
        "strategy.gather_16bit": True, "batch.accumulation": 1, "train.max_grad_norm": 0.7,
        "precision.dtype": "bf16", "nodes.processes_per_node": 4,
    }),
    "fsdp 2": (SECOND, {
        "strategy.kind": "fsdp", "strategy.version": 2, "strategy.sharding": "full_shard", "strategy.auto_wrap": "size",
        "strategy.min_params": 5000, "strategy.offload": True, "efficiency.gradient_checkpointing.every": True,
        "efficiency.compile.enabled": True, "efficiency.compile.backend": "inductor",
        "efficiency.compile.scope": "blocks", "nodes.processes_per_node": 2,
    }),
    "of the first versions": (OLDEST, {
        "strategy.kind": "ddp", "precision.dtype": "fp16", "nodes.processes_per_node": 2,
    }),
    "one process, which sees every GPU": ("distributed_type: NO\n", {"devices.select": "all"}),
    "one that checks collectives": ("distributed_type: MULTI_GPU\nnum_processes: 2\ndebug: true\n", {
        "strategy.kind": "ddp", "nodes.processes_per_node": 2, "env.ACCELERATE_DEBUG_MODE": "true",
    }),
    "one process": ("distributed_type: NO\nuse_cpu: true\n", {"devices.type": "cpu"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_becomes_a_recipe_that_says_the_same(name: str) -> None:
    content, wanted = CONFIGS[name]
    files = FILES | {"a.yaml": content}
    text = imported("a.yaml", files, program=("train.py", "--x", "1"))
    program = {
        "program.kind": "accelerate", "program.script": "train.py", "program.args.x": "1",
        "launcher.kind": "accelerate",
    }  # fmt: skip
    assert settings(text, files) == program | wanted, text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (BY_KEYS, "a.yaml:6:25: offload_param_device cpu needs ZeRO stage 3, and the stage is 2"),
        (BY_KEYS, "zero3_init_flag needs ZeRO stage 3, and the stage is 2"),
        (BY_KEYS.replace("zero3_init_flag", "zero3_save_16bit_model"), "zero3_save_16bit_model needs ZeRO stage 3"),
        (BY_FILE + "mixed_precision: bf16\n", "the file has the number format"),
        (BY_FILE.replace("zero3_init_flag: true", "zero_stage: 2"), "zero_stage beside a DeepSpeed file is an error"),
        (BY_KEYS + "dynamo_backend: INDUCTOR\n", "accelerate ignores dynamo_backend under DeepSpeed"),
        (SHARDED, "accelerate takes version 1 where fsdp_version is not given"),
        (SHARDED + "rdzv_backend: c10d\n", "rdzv_backend c10d in the file is never applied"),
        (SHARDED + "enable_cpu_affinity: true\n", "enable_cpu_affinity True in the file is never applied"),
        (SECOND.replace("version: 2\n", "version: 2\n  fsdp_use_orig_params: true\n"), "ignored with fsdp_version 2"),
        (SHARDED + "deepspeed_config:\n  zero_stage: 3\n", "zero_stage 3 is not taken over: strategy fsdp does"),
        (TWO_MACHINES.replace("processes: 8", "processes: 9"), "9 over 2 machines are 4 on each"),
        (TWO_MACHINES, "trainkit run --node-rank N"),
        (OLDEST, "fp16 is today mixed_precision: fp16"),
        (OLDEST + "use_cpu: true\n", "accelerate does not hand use_cpu to several processes"),
        (OLDEST.replace("GPU", "CPU") + "use_cpu: true\n", "accelerate starts one process on a CPU"),
        (OLDEST + "main_training_function: go\n", "main_training_function go is not taken over"),
        ("distributed_type: MPS\n", "distributed_type MPS is not valid any more"),
        (SECOND.replace("offload_params: true", "offload_params: true\n  fsdp_cpu_ram_efficient_loading: true"),
         "strategy.cpu_ram_efficient_loading True is left out, for it cannot reach a program of kind builtin"),
        (OLDEST + "main_process_port: 29501\n", "main_process_port is not taken over: each run has a free port"),
    ],
)  # fmt: skip
def test_what_accelerate_loses_or_misreads_is_a_comment(content: str, said: str) -> None:
    assert said in comments(imported("a.yaml", FILES | {"a.yaml": content}))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("distributed_type: MULTI_XPU\n", "distributed_type MULTI_XPU cannot be run by trainkit"),
        ("distributed_type: MULTI_CPU\nmpirun_config: {mpirun_hostfile: hosts}\n", "mpirun_hostfile hosts cannot be"),
        ("distributed_type: MULTI_GPU\nmixed_precision: fp8\n", "mixed_precision fp8 cannot be taken over"),
        ("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: NO\n", "a config for Amazon SageMaker"),
        (SHARDED.replace("strategy: 1", "strategy: 6"), "fsdp_sharding_strategy: '6' cannot be taken over"),
        (SHARDED.replace("fsdp_use_orig_params", "fsdp_use_orig_parms"), "does not know the key 'fsdp_use_orig_parms'"),
        (BY_KEYS.replace("zero_stage: 2", "zero_stage: 7"), "zero_stage 7 cannot be taken over"),
        (
            SECOND + "parallelism_config:\n  parallelism_config_tp_size: 2\n",
            "parallelism_config_tp_size 2 (parts of each weight (tensor parallelism)) cannot be run",
        ),
        (OLDEST.replace("processes: 2", "processes: two"), "num_processes is 'two'"),
        (BY_KEYS.replace("clipping: 0.7", "clipping: much"), "train.max_grad_norm must be"),
    ],
)
def test_what_cannot_be_taken_over_is_an_error_at_its_place(content: str, what: str) -> None:
    found = refusal("a.yaml", {"a.yaml": content})
    assert what in found.what
    assert found.origin
    assert found.origin.place.startswith("a.yaml:")


def test_everything_as_flags_is_the_same_as_in_a_file() -> None:
    line = (
        "accelerate launch --num_processes=2 --use_fsdp --mixed_precision=bf16 "
        "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap=BertLayer "
        "--fsdp_sharding_strategy=1 --fsdp_state_dict_type=FULL_STATE_DICT train.py --x 1"
    )
    text = imported(line)
    found, wanted = settings(text), CONFIGS["fsdp"][1]
    assert found["program.kind"] == "accelerate"
    assert {key: found[key] for key in found if key in wanted} == {key: wanted[key] for key in wanted if key in found}
    assert {"strategy.wrap_classes", "strategy.sharding", "precision.dtype", "nodes.processes_per_node"} <= found.keys()
    assert "default_config.yaml of the home folder; it is not read here" in comments(text)


def test_without_a_program_deepspeeds_file_is_taken_apart() -> None:
    zero = {"zero_optimization": {"stage": 2, "overlap_comm": True}, "bf16": {"enabled": True}, "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5}  # fmt: skip
    found = settings(imported("a.yaml", {"a.yaml": BY_FILE, "ds.json": zero}))
    assert "strategy.config" not in found
    assert (found["strategy.kind"], found["strategy.overlap_comm"], found["precision.dtype"]) == ("zero2", True, "bf16")
    assert (found["batch.global"], found["batch.micro"], found["train.max_grad_norm"]) == (8, 2, 0.5)


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("--cpu", "strategy.kind", None),  # one process, whatever there is
        ("--cpu --num_processes 2", "strategy.kind", "ddp"),
        ("--use_deepspeed --zero_stage 0 --gradient_clipping 1.0", "train.max_grad_norm", 1.0),
        ("--use_deepspeed --zero_stage 1 --gradient_clipping 1.0", "train.max_grad_norm", 1.0),
        ("--use_deepspeed --deepspeed_config_file ds.json --mixed_precision bf16", "precision.dtype", "bf16"),
        ("--use_fsdp --fsdp_backward_prefetch_policy BACKWARD_POST", "strategy.backward_prefetch", "backward_post"),
        ("--use_fsdp --fsdp_offload_params True", "strategy.offload", True),
    ],
)
def test_a_flag_says_what_it_says_to_accelerate(line: str, key: str, value: Any) -> None:
    assert settings(imported(f"accelerate launch {line} train.py", FILES), FILES).get(key) == value


def test_flags_win_over_the_file_and_the_programs_flags_over_both() -> None:
    files = {"a.yaml": SHARDED}
    line = "accelerate launch --config_file a.yaml --num_processes 4 --gpu_ids 3,1,2,0 run_glue.py --do_train --fp16"
    text = imported(line, files)
    found = settings(text, files)
    assert (found["nodes.processes_per_node"], found["devices.select"]) == (4, [3, 1, 2, 0])
    assert (found["program.kind"], found["launcher.kind"], found["precision.dtype"]) == ("hf", "accelerate", "fp16")
    assert "precision.dtype bf16 (a.yaml:14:18) gives way to fp16" in comments(text)


def test_a_flag_that_only_other_versions_have_is_named_and_not_taken_for_a_mistake() -> None:
    flags = "--use_xpu --ipex --use_tp --mpirun_hostfile hosts"
    text = comments(imported(f"accelerate launch {flags} --num_processes 2 train.py", FILES))
    for said in ("use_xpu True", "ipex True", "use_tp True", "mpirun_hostfile hosts"):
        assert f"{said} is not taken over" in text


MESH = (
    "--use_fsdp --fsdp_version 2 --num_processes 4 --parallelism_config_tp_size 2 --parallelism_config_dp_shard_size 2"
)
ON_ACCELERATOR = {"train.py": "from accelerate import Accelerator\n"}


def test_a_mesh_of_ranks_reaches_the_script_by_its_variables() -> None:
    found = settings(imported(f"accelerate launch --use_parallelism_config {MESH} train.py", ON_ACCELERATOR))
    assert {key: value for key, value in found.items() if key.startswith("env.")} == {
        "env.ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "env.PARALLELISM_CONFIG_TP_SIZE": "2",
        "env.PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
    }
    content = SECOND.replace("num_processes: 2", "num_processes: 8") + (
        "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 4\n"
        "  parallelism_config_cp_comm_strategy: alltoall\n"
    )
    found = settings(imported("a.yaml", {"a.yaml": content, **ON_ACCELERATOR}, program=("train.py",)))
    assert found["env.PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == "2"
    assert found["env.PARALLELISM_CONFIG_CP_COMM_STRATEGY"] == "alltoall"
    ignored = imported(f"accelerate launch {MESH} train.py", ON_ACCELERATOR)
    assert "env." not in str(settings(ignored))
    assert "accelerate ignores --parallelism_config_dp_shard_size without --use_parallelism_config" in comments(ignored)


@pytest.mark.parametrize(
    ("flags", "what", "hint"),
    [
        ("--use_parallelism_config --use_fsdp --parallelism_config_tp_size 2", "tp_size 2", "set fsdp_version to 2"),
        ("--use_parallelism_config --num_processes 1 --parallelism_config_cp_size 2", "cp_size 2", "FSDP"),
        ("--tp_size 2 --num_processes 2", "tp_size 2 is tensor parallelism", "parallelism_config_tp_size"),
        ("--cpu --num_processes 2 --mpirun_hostfile h", "mpirun_hostfile h cannot be taken over", "nodes.count"),
        ("--mixed_precision fp8 --num_processes 2", "mixed_precision fp8 cannot be taken over", "bf16"),
        ("--config_file gone.conf", "there is no file gone.conf", "path"),
        ("--num_proc 2", "accelerate launch has no flag --num_proc", "--num_processes"),  # which has no abbreviations
    ],
)
def test_what_a_flag_asks_for_in_vain_is_named_at_its_place(flags: str, what: str, hint: str) -> None:
    found = refusal(f"accelerate launch {flags} train.py", FILES)
    assert what in found.what
    assert hint in found.hint
    assert found.origin
    assert found.origin.text in flags


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({"HOME": "/home/me"}, "/home/me/.cache/huggingface/accelerate"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "/cache"}, "/cache/huggingface/accelerate"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "/cache", "HF_HOME": "~/hf"}, "/home/me/hf/accelerate"),
    ],
)
def test_the_default_config_is_read_where_accelerate_reads_it(environ: dict[str, str], place: str) -> None:
    def found(words: str, folder: str) -> tuple[dict[str, Any], str]:
        contents = {f"{folder}/default_config.yaml": TWO_MACHINES, "/here/train.py": ON_ACCELERATOR["train.py"]}
        contents |= {"/here/own.conf": OLDEST}
        there = ImportContext(MemoryFiles(contents), "/here", environ)
        text = checked(f"accelerate launch {words} train.py".split(), there, "/here/recipe.yaml")
        return settings(text, ON_ACCELERATOR), comments(text)

    read, said = found("--num_machines 1", place)
    assert (read["nodes.processes_per_node"], read["precision.dtype"]) == (8, "fp16")
    assert f"accelerate launch reads {place}/default_config.yaml where no --config_file is named" in said
    for words, folder in (("--num_processes 2", "/elsewhere"), ("--cpu", place), ("--config_file own.conf", place)):
        read, said = found(words, folder)
        assert "default_config.yaml" not in said
        assert read.get("nodes.count") is None
    assert read["nodes.processes_per_node"] == 2  # as own.conf says, whatever its name ends in


@pytest.mark.timeout(60)
def test_a_number_that_no_card_has_is_left_for_the_machine_to_refuse() -> None:
    text = imported("a.yaml", {"a.yaml": OLDEST + "gpu_ids: 0,99999999999\n"})
    assert read(text).recipe.devices.select == [0, 99_999_999_999]


def test_a_remark_is_noted_in_a_time_that_does_not_grow_with_those_before_it() -> None:
    class Texts(list[str]):
        def __contains__(self, _: object) -> bool:
            raise AssertionError("all remarks are searched")

    draft = ImportedRecipe(remarks=Texts())
    for text in ("first", "second", "first"):
        draft.remark(text)
    assert [line for line in recipe_text(draft, "/").splitlines() if "- " in line] == ["# - first", "# - second"]
