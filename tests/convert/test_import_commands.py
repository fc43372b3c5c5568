"""Command lines of other launchers as recipes: what they set, what stays the program's own, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.convert.reading import HERE, argv, checked, comments, context, imported, read, refusal, settings
from trainkit.errors import RecipeError
from trainkit.recipe.schema.launching import program_argv

GLUE = "run_glue.py --model_name_or_path bert-base-cased --task_name mrpc --do_train --do_eval --max_seq_length 128"
OWN = {
    "program.kind": "hf",
    "program.script": "run_glue.py",
    "program.args.model_name_or_path": "bert-base-cased",
    "program.args.task_name": "mrpc",
    "program.args.do_train": True,
    "program.args.do_eval": True,
    "program.args.max_seq_length": "128",
}
FSDP = {"strategy.kind": "fsdp", "strategy.sharding": "full_shard", "strategy.offload": False}

# Lines as the guides and people write them, and what the recipe then sets.
LINES: dict[str, dict[str, Any]] = {
    f"python {GLUE} --per_device_train_batch_size 32 --learning_rate 2e-5 --num_train_epochs 3 --output_dir out": {
        **OWN, "batch.micro": 32, "optimizer.lr": 2e-5, "train.epochs": 3, "output.root": "out",
        "devices.select": "all",
    },
    f"torchrun --nproc_per_node=2 {GLUE} --fsdp 'full_shard auto_wrap' --bf16": {
        **OWN, **FSDP, "strategy.auto_wrap": "transformer", "precision.dtype": "bf16",
        "nodes.processes_per_node": 2, "launcher.kind": "torchrun",
    },
    f"python3.11 -m torch.distributed.run --nnodes 2 --nproc-per-node 4 --rdzv_endpoint n1:2900 {GLUE} --fp16 True": {
        **OWN, "strategy.kind": "ddp", "precision.dtype": "fp16", "nodes.count": 2, "nodes.processes_per_node": 4,
        "nodes.rendezvous": "n1:2900", "launcher.kind": "torchrun",
    },
    f"CUDA_VISIBLE_DEVICES=2,0 CUDA_DEVICE_ORDER=PCI_BUS_ID torchrun --nproc_per_node=2 {GLUE} --tf32 1": {
        **OWN, "strategy.kind": "ddp", "devices.select": [2, 0], "devices.order": "pci", "precision.tf32": True,
        "nodes.processes_per_node": 2, "launcher.kind": "torchrun",
    },
    f"CUDA_VISIBLE_DEVICES= python {GLUE} --no_cuda": {**OWN, "devices.select": "none", "devices.type": "cpu"},
    f"python {GLUE} --evaluation_strategy steps --eval_steps 50 --save_strategy no --adam_beta2=0.999": {
        **OWN, "eval.every_steps": 50, "checkpoint.every_steps": 0, "optimizer.beta2": 0.999, "devices.select": "all",
    },
    f"python {GLUE} --fsdp no_shard": {**OWN, "strategy.kind": "ddp"},
    f"deepspeed --num_gpus 2 {GLUE} --deepspeed ds.json": {
        **OWN, "strategy.kind": "zero3", "strategy.config": "/here/ds.json",
        "devices.select": 2, "nodes.processes_per_node": 2, "launcher.kind": "deepspeed",
    },
    f"deepspeed --no_local_rank --num_gpus 2 {GLUE} --deepspeed nvme.json": {
        **OWN, "strategy.kind": "zero3", "strategy.config": "/here/nvme.json", "devices.select": 2,
        "nodes.processes_per_node": 2, "launcher.kind": "deepspeed",
    },
    "deepspeed --include localhost:1,3 train.py --deepspeed --deepspeed_config own.json positional": {
        "program.kind": "deepspeed", "program.script": "train.py", "program.args.deepspeed": "positional",
        "program.local_rank": True, "strategy.kind": "zero3", "strategy.config": "/here/own.json",
        "devices.select": [1, 3], "devices.order": "fastest", "launcher.kind": "deepspeed",
    },
    "python -m torch.distributed.launch --nproc_per_node 2 train.py --lr 0.10 'two words'": {
        "program.kind": "torch", "program.script": "train.py", "program.local_rank": "--local-rank",
        "program.args.lr": ["0.10", "two words"],
        "strategy.kind": "ddp", "nodes.processes_per_node": 2, "launcher.kind": "torchrun",
    },
    "python -u -m pkg.train a -b --c=d -- --e": {
        "program.kind": "torch", "program.module": "pkg.train", "program.args": ["a", "-b", "--c=d", "--", "--e"],
        "devices.select": "all",
    },
    f"torchrun --nproc_per_node 2 {GLUE} --fsdp --bf16": {
        **OWN, "strategy.kind": "fsdp", "precision.dtype": "bf16", "nodes.processes_per_node": 2,
        "launcher.kind": "torchrun",
    },
    f"torchrun --nproc_per_node 2 {GLUE} --fsdp 'shard_grad_op' --fsdp_config fsdp.json": {
        **OWN, **FSDP, "strategy.sharding": "shard_grad_op", "strategy.auto_wrap": "size",
        "strategy.min_params": 2000, "strategy.offload": True, "nodes.processes_per_node": 2,
        "launcher.kind": "torchrun",
    },
}  # fmt: skip
FILES = {
    "ds.json": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "gradient_clipping": "auto"},
    "own.json": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
    "nvme.json": {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/fast"}},
    },
    "own.py": "from accelerate import Accelerator\n",
    "none.json": {"train_batch_size": 8, "optimizer": {"type": "OneBitLamb", "params": {"lr": 1e-3}}},
    "fsdp.json": {"fsdp_min_num_params": 2000, "fsdp_offload_params": True},
    "full.json": {
        "zero_optimization": {"stage": 2, "overlap_comm": True}, "bf16": {"enabled": True}, "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4,
    },
    "args.json": {
        "task_name": "mrpc", "do_train": True, "bf16": True, "fp16": False, "per_device_train_batch_size": 4,
        "label_names": ["a", "b"], "output_dir": "out", "run_name": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_line_becomes_a_recipe_that_says_the_same(line: str) -> None:
    text = imported(line, FILES)
    assert settings(text, FILES) == LINES[line], text


def test_words_without_a_recipe_key_stay_in_their_order_and_exact() -> None:
    words = ["--a", "$HOME ü", "--b=1.10", "-c", "true", "", "--a", "2"]
    assert argv(imported("torchrun train.py --a '$HOME ü' --b=1.10 -c true '' --a 2")) == words


# Commands of the same sort, where a second look is wanted: some of the settings, or none of the key (None).
DETAILS: dict[str, dict[str, Any]] = {
    f"torchrun --nproc_per_node 2 {GLUE} --ddp_bucket_cap_mb 30 --ddp_find_unused_parameters False": {
        "strategy.kind": "ddp", "strategy.bucket_mb": 30.0, "strategy.find_unused_parameters": False,
    },
    f"python {GLUE} --optim sgd --optim_args momentum=0.9,nesterov=True": {
        "optimizer.name": "sgd", "optimizer.beta1": 0.9, "optimizer.args.nesterov": True,
        "optimizer.args.momentum": None,
    },
    f"python {GLUE} --optim galore_adamw --optim_args rank=64": {
        "optimizer.name": None, "optimizer.args.rank": None, "program.args.optim_args": "rank=64",
    },
    f"python {GLUE} --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{{\"min_lr_rate\": 0.1}}'": {
        "schedule.name": "cosine", "schedule.min_lr_ratio": 0.1, "program.args.lr_scheduler_kwargs": None,
    },
    f"python {GLUE} --learning_rate 2e-4 --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs "
    "'{\"min_lr\": 2e-5}'": {"schedule.name": "cosine", "schedule.min_lr_ratio": 0.1},
    f"python {GLUE} --lr_scheduler_type polynomial --lr_scheduler_kwargs '{{\"lr_end\": 1e-5, \"power\": 2}}'": {
        "schedule.name": None, "program.args.lr_scheduler_type": "polynomial",
    },
    f"python {GLUE} --lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs "
    "'{\"num_decay_steps\": 30, \"decay_type\": \"1-sqrt\"}'": {
        "schedule.name": "wsd", "schedule.decay_steps": 30, "schedule.decay_type": "sqrt", "schedule.min_lr_ratio": 0.0,
        "program.args.lr_scheduler_kwargs": None,
    },
    f"python {GLUE} --lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs "
    "'{\"num_decay_steps\": 30, \"num_stable_steps\": 5}'": {
        "schedule.name": None, "program.args.lr_scheduler_type": "warmup_stable_decay",
    },
    f"python {GLUE} --save_strategy best --metric_for_best_model eval_loss --eval_strategy steps --eval_steps 5": {
        "checkpoint.keep_best": True, "program.args.metric_for_best_model": None,
    },
    f"python {GLUE} --save_strategy best --metric_for_best_model eval_f1 --eval_strategy steps --eval_steps 5": {
        "checkpoint.keep_best": True, "eval.best_metric": "f1", "eval.greater_is_better": None,
        "program.args.metric_for_best_model": None,
    },
    f"python {GLUE} --save_strategy best --metric_for_best_model ter --eval_strategy steps --eval_steps 5": {
        "eval.best_metric": "ter", "eval.greater_is_better": True,  # as Trainer takes what does not end with loss
    },
    f"python {GLUE} --save_strategy best --metric_for_best_model f1": {
        "checkpoint.keep_best": None, "program.args.metric_for_best_model": "f1",
    },
    f"python {GLUE} --bf16 False --fp16 False": {"precision.dtype": "fp32"},
    f"torchrun --nproc_per_node 2 {GLUE} --fsdp full_shard --fsdp_config '{{\"cpu_offload\": true}}'": {
        "strategy.kind": "fsdp", "strategy.offload": True,
    },
    f"python {GLUE} --fsdp_config fsdp.json": {"strategy.kind": None},
    f"deepspeed --num_gpus 2 {GLUE} --deepspeed full.json": {
        "precision.dtype": "bf16", "batch.micro": 3, "batch.accumulation": 4, "batch.global": None,
        "strategy.overlap_comm": None,
    },
    f"DS_ACCELERATOR=cpu deepspeed --num_gpus 2 {GLUE} --deepspeed full.json --use_cpu": {
        "devices.type": "cpu", "devices.select": None, "nodes.processes_per_node": 2,
    },
    f"deepspeed --include localhost {GLUE} --deepspeed full.json": {"devices.select": None, "strategy.kind": "zero2"},
    f"deepspeed --hostfile h --num_nodes 2 --num_gpus 2 --master_addr n1 {GLUE} --deepspeed full.json": {
        "launcher.kind": "torchrun", "nodes.count": 2, "nodes.rendezvous": "n1:29500", "nodes.processes_per_node": 2,
    },
    "deepspeed --include localhost:3,1 train.py": {"devices.select": [1, 3], "program.local_rank": True},
    "CUDA_VISIBLE_DEVICES=2,0 deepspeed --no_local_rank train.py": {
        "devices.select": [0, 2], "devices.order": "fastest", "program.local_rank": None,
    },
    "deepspeed train.py --deepspeed_config none.json": {"strategy.kind": "zero0", "strategy.config": "/here/none.json"},
    "torchrun --nproc_per_node 2 train.py --local_rank='${local_rank}' --x 1": {
        "program.local_rank": True, "program.args.x": "1", "program.args.local_rank": None,
    },
    "torchrun --nproc_per_node 2 train.py --local-rank='${local_rank}' --x 1": {
        "program.local_rank": "--local-rank", "program.args.x": "1",
    },
    "python -m torch.distributed.launch --use_env --nproc_per_node 2 train.py --x 1": {
        "program.local_rank": None, "program.args.x": "1",
    },
    "python main.py --no-cuda --epochs 3": {"program.kind": "torch", "program.args": ["--no-cuda", "--epochs", "3"]},
    "python main.py --optim sgd --gradient_checkpointing": {"program.kind": "torch", "optimizer.name": None},
    "torchrun train.py '$$HOME'": {"program.args": ["$HOME"]},  # which torchrun would take for a macro of its own
    "CUDA_VISIBLE_DEVICES=-1 python train.py": {"devices.select": "none"},
    "CUDA_VISIBLE_DEVICES=2,-1,1 python train.py": {"devices.select": [2]},
    "ACCELERATE_MIXED_PRECISION=bf16 torchrun --nproc_per_node 2 own.py": {"precision.dtype": "bf16"},
    f"CUDA_VISIBLE_DEVICES=0,2 torchrun {GLUE}": {
        "devices.select": [0, 2], "nodes.processes_per_node": 1, "strategy.kind": "ddp", "launcher.kind": "torchrun",
    },
    "torchrun --nnode=2 --nproc=4 --master_a n1 train.py": {
        "nodes.count": 2, "nodes.processes_per_node": 4, "nodes.rendezvous": "n1:29500",
    },
    "CUDA_VISIBLE_DEVICES=0,2 torchrun train.py": {
        "devices.select": [0, 2], "strategy.kind": "ddp", "nodes.processes_per_node": 1,
    },
    "torchrun --nproc_per_node 1 train.py": {"strategy.kind": "ddp", "nodes.processes_per_node": 1},
    "CUDA_VISIBLE_DEVICES=6,7 deepspeed --num_gpus 2 train.py": {"devices.select": [0, 1]},
    "CUDA_VISIBLE_DEVICES=6,7 deepspeed --num_gpus 1 train.py": {"devices.select": [0], "strategy.kind": None},
    "CUDA_VISIBLE_DEVICES=6,7 deepspeed train.py": {"devices.select": [6, 7]},
    "python own.py": {"devices.select": "all", "launcher.kind": None, "strategy.kind": None},
    f"CUDA_VISIBLE_DEVICES=2,0 python {GLUE}": {"devices.select": [2, 0], "strategy.kind": None},
    "nohup time env NOTE='two words' python train.py": {"env.NOTE": "two words", "program.script": "train.py"},
    "python run_glue.py args.json": {
        "program.kind": "hf", "batch.micro": 4, "precision.dtype": "bf16", "program.args.label_names": ["a", "b"],
        "program.args.task_name": "mrpc",
    },
    "python train.py ds.json": {"program.kind": "torch", "program.args": ["ds.json"]},
    # what accelerate launch tells Trainer by its own defaults, and what stays Trainer's own
    f"accelerate launch --num_processes 2 --use_fsdp {GLUE} --gradient_checkpointing True": {
        "strategy.version": 1, "strategy.cpu_ram_efficient_loading": True,
        "program.args.gradient_checkpointing": "True", "efficiency.gradient_checkpointing.every": None,
    },
    f"accelerate launch --num_processes 2 --use_fsdp --fsdp_cpu_ram_efficient_loading false {GLUE}": {
        "strategy.cpu_ram_efficient_loading": False,
    },
    f"accelerate launch --num_processes 2 --dynamo_backend inductor {GLUE}": {
        "efficiency.compile.backend": "inductor", "precision.tf32": False,
    },
    # one card to see is one process, whatever the number
    "CUDA_VISIBLE_DEVICES=1 accelerate launch own.py": {"strategy.kind": None, "devices.select": [1]},
    "CUDA_VISIBLE_DEVICES=1 accelerate launch --num_processes 2 own.py": {"strategy.kind": None},
    "CUDA_VISIBLE_DEVICES=2,1 accelerate launch own.py": {"strategy.kind": "ddp", "devices.select": [2, 1]},
    "ACCELERATE_LOG_LEVEL=info accelerate launch --num_processes 2 own.py": {"env.ACCELERATE_LOG_LEVEL": "info"},
}  # fmt: skip


@pytest.mark.parametrize("line", DETAILS)
def test_a_line_says_these_settings_and_not_others(line: str) -> None:
    text = imported(line, FILES)
    found = settings(text, FILES | {"main.py": ""})
    assert {key: found.get(key) for key in DETAILS[line]} == DETAILS[line], text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"python {GLUE} --eval_steps 10", "Trainer ignores --eval_steps 10: --eval_strategy is no"),
        (f"python {GLUE} --optim paged_adamw_8bit", "--optim paged_adamw_8bit stays the program's own argument"),
        (f"python {GLUE} --fsdp", "Trainer refuses --fsdp in a process that python starts alone"),
        (f"python {GLUE} --fsdp_config fsdp.json", "Trainer does not read --fsdp_config fsdp.json without --fsdp"),
        ("python train.py --no_cuda", "--no_cuda is also a flag of transformers' Trainer"),
        ("CUDA_VISIBLE_DEVICES=0,-1 python train.py", "CUDA reads the list up to -1"),
        ("FSDP_VERSION=2 torchrun train.py", "FSDP_VERSION is not taken over"),
        ("MASTER_ADDR=n1 deepspeed --num_nodes 2 train.py", "set nodes.rendezvous to n1:29500"),
        ("deepspeed --num_nodes 2 train.py", "deepspeed starts the other nodes by ssh"),
        ("uv run python train.py", "`uv run` in front is not taken over"),
        ("python run_glue.py args.json", "args.json is taken apart"),
        (f"python {GLUE} --fsdp True", "ends with an error at --fsdp True"),
        (f"torchrun {GLUE} --fsdp full_shard --fsdp_config fsdp.json", "Trainer does not read fsdp_offload_params"),
        (f"torchrun {GLUE} --fsdp full_shard --fsdp_config fsdp.json", "only beside auto_wrap_policy SIZE_BASED_WRAP"),
        (f"CUDA_VISIBLE_DEVICES=0,1 torchrun {GLUE}", "torchrun starts one process here, which sees 2 GPUs"),
        (f"python {GLUE}", "every GPU that is visible, as for a program that python starts"),
        (
            f"CUDA_VISIBLE_DEVICES=6,7 deepspeed --num_gpus 2 {GLUE}",
            "ignores CUDA_VISIBLE_DEVICES=6,7 and runs on GPUs 0,1, and so does the recipe",
        ),
        (f"CUDA_VISIBLE_DEVICES=1 python {GLUE}", "as CUDA numbers GPUs where CUDA_DEVICE_ORDER is not set"),
        (f"torchrun --master_port 1 --tee 3 {GLUE}", "chooses it for each run: --master_port 1, --tee 3"),
        (f"PET_NNODES=2 torchrun {GLUE}", "PET_NNODES is not taken over"),
        (f"python {GLUE} --overwrite_output_dir", "have no --overwrite_output_dir"),
        ("deepspeed --include localhost:3,1 train.py", "deepspeed sorts the GPUs: rank 0 is on GPU 1"),
        ("CUDA_VISIBLE_DEVICES=2,0 deepspeed train.py", "deepspeed sorts the GPUs: rank 0 is on GPU 0"),
        ("torchrun --no_python train.py", "started without Python"),
        ("python -O train.py", "python -O is not taken over"),
        ("srun -n 1 python train.py", "`srun -n 1` in front is not taken over"),
        *(
            (f"{word} train.py", f"{word} is not taken over: trainkit's own interpreter starts the ranks")
            for word in ("/opt/x/bin/python", ".venv/bin/python", ".venv/bin/torchrun")
        ),
    ],
)
def test_what_the_tool_ignores_or_misreads_is_a_comment(line: str, said: str) -> None:
    assert said in comments(imported(line, FILES))


@pytest.mark.torch
def test_the_local_rank_is_spelled_as_the_installed_torch_spells_it() -> None:
    from torch.distributed import launch, run

    line = "--nproc_per_node=2 train.py --x 1"
    *_, words = run.config_from_args(launch.parse_args(line.split()))  # type: ignore[no-untyped-call]
    asked = settings(imported(f"python -m torch.distributed.launch {line}"))["program.local_rank"]
    assert words[-3:] == [f"{asked}=${{local_rank}}", "--x", "1"]


def test_a_line_without_the_shells_signs_needs_no_shell() -> None:
    for line in (
        "torchrun --nproc_per_node 2 train.py --lr 1",
        'A="x y" torchrun --nproc_per_node 2 train.py "--lr" 1',
    ):
        found = read(checked([line], context({}), f"{HERE}/recipe.yaml")).recipe
        assert (found.nodes.processes_per_node, found.program.args) == (2, {"lr": "1"})


@pytest.mark.parametrize(
    "line",
    [
        "CUDA_VISIBLE_DEVICES=0,2 torchrun train.py",
        "accelerate launch --gpu_ids 0,2 train.py",
        "deepspeed --include localhost:0,2 train.py",
    ],
)
def test_an_order_of_cards_counts_for_a_list_exported_or_in_front(line: str) -> None:
    for given, order in {"PCI_BUS_ID": "pci", "FASTEST_FIRST": "fastest", "": "fastest"}.items():
        here = replace(context({}), environ={"CUDA_DEVICE_ORDER": given})
        text = checked(line.split(), here, f"{HERE}/recipe.yaml")
        assert settings(text)["devices.order"] == order
        assert ("where CUDA_DEVICE_ORDER is not set" in comments(text)) is (given == "")
        if given:
            text = checked([f"CUDA_DEVICE_ORDER={given}", *line.split()], context({}), f"{HERE}/recipe.yaml")
            assert settings(text)["devices.order"] == order
            assert "gives way" not in comments(text)


def test_a_secret_is_never_written_down() -> None:
    text = imported("HF_TOKEN=abc123 torchrun train.py --x 1")
    assert "abc123" not in text
    assert read(text).recipe.env_from == ["HF_TOKEN"]
    with pytest.raises(RecipeError) as caught:
        imported("torchrun train.py --api_key=def456 --token ghi789 --x 1")
    assert [each.what.partition(" ")[0] for each in caught.value.diagnostics] == ["--api_key", "--token"]
    assert not {"def456", "ghi789"} & set(str(caught.value.diagnostics).replace("'", " ").replace("=", " ").split())


def test_what_only_sounds_like_a_secret_is_taken_over() -> None:
    words = ["--append_concat_token", "False", "--num_keys", "3", "--use_auth_token", "True", "--token_type_key", "x",
             "--sort_by_key", "end_date"]  # fmt: skip
    assert argv(imported(f"torchrun train.py {' '.join(words)}")) == words


def test_a_name_that_the_user_knows_to_be_harmless_is_taken_over_and_stays_so() -> None:
    there = replace(context({}), public=frozenset({"span_key"}))
    text = checked(["python", "train.py", "--span_key", "SPAN_2b"], there, "/here/recipe.yaml")
    recipe = read(text).recipe
    assert (program_argv(recipe.program.args), recipe.program.public) == (["--span_key", "SPAN_2b"], ["span_key"])


@pytest.mark.parametrize(
    ("line", "what", "hint"),
    [
        (f"torchrun {GLUE} --fsdp hybrid_shards", "--fsdp does not know 'hybrid_shards'", "hybrid_shard?"),
        (f"torchrun {GLUE} --per_device_train_batch_size x", "batch.micro must be", "whole number"),
        (f"torchrun {GLUE} --bf16 maybe", "--bf16 maybe cannot be read", "documents"),
        (f"torchrun --nproc_pre_node 2 {GLUE}", "torchrun has no flag --nproc_pre_node", "--nproc_per_node"),
        (f"torchrun --nnodes 1:4 {GLUE}", "--nnodes 1:4 cannot be taken over", "one number"),
        (f"deepspeed --include n1:0@n2:1 {GLUE}", "--include n1:0@n2:1 cannot be taken over", "localhost"),
        (f"torchrun {GLUE} --deepspeed gone.json", "there is no file gone.json", "path"),
        (f"torchrun {GLUE} --deepspeed {{}}", "--deepspeed holds settings, where a recipe names a file", "to a file"),
        ("accelerate launch --use_megatron_lm train.py", "distributed_type MEGATRON_LM cannot be run", "FSDP"),
        ("python -c 'import x'", "python -c starts no script", "-m module"),
        (f"CUDA_DEVICE_ORDER=fast python {GLUE}", "unknown to CUDA", "PCI_BUS_ID"),
    ],
)
def test_what_cannot_be_taken_over_is_an_error_with_a_next_step(line: str, what: str, hint: str) -> None:
    found = refusal(line)
    assert what in found.what
    assert hint in found.hint
    assert found.origin
    assert found.origin.source in line.replace("'", "")


TASKS = "starts python several times, on nodes that only the allocation knows"


@pytest.mark.parametrize(
    ("line", "what", "hint"),
    [
        ("mpirun -n 2 python train.py", "mpirun is neither a file nor a launcher", "torchrun"),
        ("torchrun", "the command names no program", "add the script"),
        ("''", "an empty word is neither a file nor a launcher", "torchrun"),
        ("python2 train.py", "python2 is Python 2", "Python 3"),
        ("accelerate config", "accelerate starts programs with", "trainkit config"),
        ("accelerate test", "accelerate starts programs with", "add launch"),
        ("srun -n 16 python train.py", TASKS, "#SBATCH"),
        ("srun --ntasks-per-node=4 python train.py", TASKS, "#SBATCH"),
        ("srun -N 2 python train.py", TASKS, "#SBATCH"),
    ],
)
def test_a_line_without_a_known_launcher_or_program_is_wrong_usage(line: str, what: str, hint: str) -> None:
    found = refusal(line)
    assert what in found.what
    assert hint in found.hint
    assert found.origin is None


@pytest.mark.parametrize(("said", "device"), [("use_cpu: true\n", "cpu"), ("use_cpu: false\n", None)])
def test_the_cpu_that_a_scripts_own_file_asks_for_is_the_plans(said: str, device: str | None) -> None:
    files = FILES | {"sft.yaml": f"learning_rate: 0.1\n{said}"}
    found = settings(imported(f"python {GLUE} --config sft.yaml", files), files)
    assert found.get("devices.type") == device
    assert found.get("program.args.config") == "sft.yaml"


# What other tools say of TPUs

SPMD = {"xla": True, "xla_fsdp_v2": True, "xla_fsdp_grad_ckpt": True, "transformer_layer_cls_to_wrap": ["Block"]}
TPU_FILE = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: {kind}\ndowncast_bf16: 'yes'\nmain_training_function: main\n"
    "mixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\ntpu_name: mine\ntpu_use_cluster: false\nuse_cpu: false\n"
)


def test_a_command_line_of_trainer_on_a_tpu_is_one_process_there() -> None:
    line = "PJRT_DEVICE=TPU XLA_USE_SPMD=1 XLA_USE_BF16=1 python train.py --do_train --fsdp full_shard --fsdp_config f"
    text = imported(line, {"f": SPMD})
    found = settings(text, {"f": SPMD})
    wanted = {
        "devices.type": "xla",
        "strategy.kind": "fsdp",
        "strategy.version": 2,
        "strategy.auto_wrap": "transformer",
        "strategy.wrap_classes": ["Block"],
        "efficiency.gradient_checkpointing.every": True,
        "env.XLA_USE_BF16": "1",
    }
    assert {key: found.get(key) for key in wanted} == wanted
    assert "env.XLA_USE_SPMD" not in found
    assert "XLA_USE_SPMD is not taken over" in comments(text)
    assert "one for each GPU" not in comments(text)


def test_a_word_for_yes_is_yes_to_trainer_and_one_for_no_is_refused_which_would_be_yes_too() -> None:
    line = "python train.py --do_train --fsdp full_shard --fsdp_config f"
    worded = SPMD | {"xla": "True", "xla_fsdp_v2": "on", "xla_fsdp_grad_ckpt": 1}
    assert settings(imported(line, {"f": worded}), {"f": worded}) == settings(imported(line, {"f": SPMD}), {"f": SPMD})
    for name in ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"):
        with pytest.raises(RecipeError, match=f"{name}: 'False' cannot be taken over"):
            imported(line, {"f": SPMD | {name: "False"}})


@pytest.mark.parametrize("kind", ["XLA", "TPU"])
def test_a_config_of_accelerate_for_a_tpu_is_one_chip_and_says_what_it_leaves(kind: str) -> None:
    files = {"a.yaml": TPU_FILE.format(kind=kind)}
    with pytest.raises(RecipeError, match="xla"):  # which the built-in trainer does not run on
        imported("a.yaml", files)
    text = imported("a.yaml", files, program=("train.py",), kind="accelerate")
    found, said = settings(text), comments(text)
    assert (found["devices.type"], found["precision.dtype"]) == ("xla", "bf16")
    assert not {"nodes.processes_per_node", "launcher.kind", "strategy.kind"} & found.keys()
    assert "once for each chip" in said
    assert f"num_processes 8 does nothing under distributed_type {kind}" in said
    assert "downcast_bf16 yes in the file is never applied" in said
    assert "tpu_name mine is not taken over: it is for pods" in said


def test_flags_for_a_tpu_leave_the_launcher_to_the_plan() -> None:
    text = imported("accelerate launch --tpu --mixed_precision bf16 --downcast_bf16 --vm one train.py --x 1")
    found = settings(text)
    assert (found["program.kind"], found["devices.type"]) == ("accelerate", "xla")
    assert found["env.ACCELERATE_DOWNCAST_BF16"] == "true"
    assert "launcher.kind" not in found
    assert "vm one is not taken over" in comments(text)


def test_another_runtime_of_torch_xla_is_kept() -> None:
    found = settings(imported("PJRT_DEVICE=CPU python train.py"))
    assert (found["devices.type"], found["env.PJRT_DEVICE"]) == ("xla", "CPU")


def test_a_script_that_starts_another_for_each_chip_is_an_error() -> None:
    found = refusal("python xla_spawn.py --num_cores 8 train.py --do_train", {"xla_spawn.py": ""})
    assert "xla_spawn.py" in found.what and "python SCRIPT" in found.hint
