"""What a worker gets from a command, by the code of torchrun, accelerate, deepspeed and transformers themselves."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import posixpath
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any
from unittest import mock

from trainkit.tools.registry import launcher_of

OF_ACCELERATE = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
OF_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RANK, FILE = "--local_rank=<rank>", "--deepspeed_config"
# Variables that Accelerator()'s plugins and its own arguments say in full.
IN_PLUGINS = (
    "FSDP_",
    *(f"ACCELERATE_{name}" for name in ("DYNAMO", "DEEPSPEED", "USE", "CONFIG", "GRADIENT", "MIXED", "CPU_AFF")),
)
# What Accelerator() takes where there is none (accelerate, parallelism_config.py).
MESH = {**{f"PARALLELISM_CONFIG_{name}_SIZE": "1" for name in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")},
        "PARALLELISM_CONFIG_CP_BACKEND": "torch", "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "allgather",
        "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed", "PARALLELISM_CONFIG_SP_SEQ_LENGTH": "None"}  # fmt: skip
# What transformers calls it today, and what it no longer has.
TODAY = {"evaluation_strategy": "eval_strategy", "warmup_ratio": "warmup_steps", "no_cuda": "use_cpu"}
GONE = ("overwrite_output_dir", "use_mps_device", "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params")
GROUPED, SAMPLING = "group_by_length", "train_sampling_strategy"
# Trainer's arguments that name what every run has of its own, or that the plugins say in full.
APART = ("output_dir", "run_name", "deepspeed", "fsdp", "fsdp_config", "bf16", "fp16", "local_rank", "tf32", "use_cpu",
         "dataloader_pin_memory", "torch_compile", "torch_compile_backend", "torch_compile_mode")  # fmt: skip


@dataclass
class Started:
    """What a launcher would start on this machine. group: whether the ranks are told of one another.

    cards: those that the processes see; program: script (or -m and module) and its words.
    """

    processes: int
    nodes: int
    group: bool
    cards: list[str]
    program: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def start(words: Sequence[str], environment: Mapping[str, str], count: int) -> Started:
    """What a command starts, its launcher's word first, on a machine with so many cards."""
    name, rest, environ = posixpath.basename(words[0]), list(words[1:]), dict(environment)
    launcher = launcher_of(name)
    if launcher == "accelerate":
        return of_accelerate(rest[1:] if name == "accelerate" else rest, environ, count)
    if launcher in ("torchrun", "deepspeed"):
        read = of_torchrun if launcher == "torchrun" else of_deepspeed
        return read(rest, environ, count, name)
    rest = list(words) if name.endswith(".py") else rest
    while rest[0].startswith("-") and rest[0] != "-m":
        rest.pop(0)
    if rest[0] == "-m" and launcher_of(rest[1]) not in (None, "python"):
        return start(rest[1:], environ, count)
    return Started(1, 1, "RANK" in environ, visible(environ, count), rest, environ)


def visible(environ: Mapping[str, str], count: int) -> list[str]:
    """The cards that CUDA shows."""
    words = environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return [word.strip() for word in words if word.strip() and not word.strip().startswith("-")]


@contextlib.contextmanager
def machine(cards: Sequence[str], environ: Mapping[str, str]) -> Iterator[None]:
    """This process as one on a machine with these cards, with this environment."""
    import torch
    from accelerate.utils import dataclasses as plugins

    apart = (*OF_ACCELERATE, *OF_RANK, "CUDA_VISIBLE_DEVICES")
    left = {name: each for name, each in os.environ.items() if not name.startswith(apart)}
    there = mock.Mock(is_available=lambda: bool(cards), device_count=lambda: len(cards))
    there.current_accelerator.return_value.type = "cuda"
    with contextlib.ExitStack() as stack:
        for each in (
            mock.patch.dict(os.environ, {**left, **environ}, clear=True),
            mock.patch("torch.cuda.is_available", lambda: bool(cards)),
            mock.patch("torch.cuda.device_count", lambda: len(cards)),
            mock.patch("torch.cuda.current_device", lambda: 0),
            mock.patch.object(torch, "accelerator", there),
            mock.patch.object(plugins, "is_cuda_available", lambda: True),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            stack.enter_context(each)
        yield


def of_torchrun(words: Sequence[str], environ: dict[str, str], count: int, name: str) -> Started:
    """By torch.distributed.run, or launch, which puts --local-rank before the program's words."""
    from torch.distributed import launch, run

    old, cards = name.endswith("launch"), visible(environ, count)
    with machine(cards, environ):
        parsed = (launch if old else run).parse_args(list(words))
        config, command, program = run.config_from_args(parsed)
    words = [Template(str(word)).safe_substitute(local_rank="<rank>") for word in program]
    words = words[1:] if not parsed.no_python else [str(command), *words]
    if old and not parsed.use_env:
        words = [word for word in words if not word.startswith("--local-rank=")]
        words.insert(2 if parsed.module else 1, RANK.replace("_", "-"))
    return Started(config.nproc_per_node, config.max_nodes, True, cards, words, environ)


def of_accelerate(words: Sequence[str], environ: dict[str, str], count: int) -> Started:
    """By accelerate's launcher, up to where it would start a process or hand over to torchrun."""
    from accelerate.commands import launch as launcher
    from torch.distributed import run

    found: list[Started] = []

    def note(processes: int, nodes: int, group: bool, environment: Mapping[str, str], program: list[str]) -> None:
        told = {name: each for name, each in environment.items() if name in environ or name.startswith(OF_ACCELERATE)}
        found.append(Started(processes, nodes, group, visible(environment, count), program, told))

    def several(args: Any) -> None:
        program = [*(["-m"] if args.module else []), args.training_script, *args.training_script_args]
        note(int(args.nproc_per_node), int(str(args.nnodes).rpartition(":")[2]), True, os.environ, program)

    def one(command: list[str], env: Mapping[str, str], **_more: object) -> Any:
        note(1, 1, "RANK" in env, env, command[1:] if command[0] == sys.executable else command)
        return mock.Mock(returncode=0)

    with (
        machine(visible(environ, count), environ),
        mock.patch.object(run, "run", several),
        mock.patch.object(launcher.subprocess, "Popen", one),
        mock.patch.object(launcher, "is_bf16_available", lambda *_: True),
        mock.patch.object(launcher, "check_cuda_p2p_ib_support", lambda: True),
    ):
        launcher.launch_command(launcher.launch_command_parser().parse_args(list(words)))
    return found[0]


def of_deepspeed(words: Sequence[str], environ: dict[str, str], count: int, name: str) -> Started:
    """By DeepSpeed's runner and launcher, with what runner.main does of CUDA_VISIBLE_DEVICES and a count."""
    from deepspeed.launcher import launch, runner

    parsed, shown = runner.parse_args(list(words)), environ.get("CUDA_VISIBLE_DEVICES", "")
    if shown and not parsed.include and not parsed.exclude and parsed.num_nodes <= 1 and parsed.num_gpus <= 0:
        parsed.include = f"localhost:{shown}"
    active = runner.parse_inclusion_exclusion(OrderedDict(localhost=count), parsed.include, parsed.exclude)
    cards = list(range(parsed.num_gpus)) if parsed.num_gpus > 0 else list(active["localhost"])
    switches = [f"--{each}" for each in ("no_python", "module", "no_local_rank") if getattr(parsed, each)]
    with mock.patch.object(sys, "argv", ["", *switches, "--world_info=e30=", parsed.user_script, *parsed.user_args]):
        found = launch.parse_args()
    rank = [] if found.no_local_rank else [RANK]
    program = [*(["-m"] if found.module else []), found.training_script, *rank, *found.training_script_args]
    return Started(len(cards), max(parsed.num_nodes, 1), True, [str(card) for card in cards], program, environ)


class Side:
    """A program's target and words with what is around them."""

    def __init__(self, program: Sequence[str], environ: Mapping[str, str], folder: str, cards: Sequence[str]) -> None:
        place = 2 if program[0] == "-m" else 1
        self.target, self.words = [posixpath.normpath(each) for each in program[:place]], list(program[place:])
        self.environ, self.folder, self.cards = environ, folder, cards


def words_alone(side: Side) -> dict[str, Any]:
    """The words of a program that no library reads."""
    return {"words": side.words}


def of_engine(side: Side) -> dict[str, Any]:
    """The words of a script on DeepSpeed's engine, and its file's keys."""
    hjson = import_module("hjson")  # as deepspeed.initialize reads it

    words = [part for word in side.words for part in (word.split("=", 1) if word.startswith(f"{FILE}=") else [word])]
    if FILE not in words:
        return {"words": words}
    place = words.index(FILE)
    content = hjson.loads((Path(side.folder) / words[place + 1]).read_text())
    return {"words": words[:place] + words[place + 2 :], "file": json.loads(json.dumps(content))}


def of_accelerator(side: Side) -> dict[str, Any]:
    """What Accelerator() makes of the environment."""
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, TorchDynamoPlugin

    found: dict[str, Any] = {"words": side.words}
    with machine(side.cards or "0", side.environ), contextlib.chdir(side.folder):
        on, precision = os.environ.get, os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if on("ACCELERATE_USE_FSDP") == "true":
            found["fsdp"] = plugin_fields(FullyShardedDataParallelPlugin())
        if on("ACCELERATE_USE_DEEPSPEED") == "true":
            plugin = DeepSpeedPlugin()
            plugin.set_mixed_precision(precision)
            found["deepspeed"] = {"zero3_init_flag": plugin.zero3_init_flag, **plugin.deepspeed_config}
        else:
            found["mixed_precision"] = precision
            found["gradient_accumulation"] = on("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
        dynamo = TorchDynamoPlugin()
        if dynamo.backend.value != "NO":
            found["dynamo"] = {name: str(each) for name, each in vars(dynamo).items()}
    rest = {name: each for name, each in side.environ.items() if name.startswith(OF_ACCELERATE)}
    rest = {name: each for name, each in rest.items() if MESH.get(name) != each}
    return found | {name: each for name, each in rest.items() if not name.startswith(IN_PLUGINS)}


def of_trainer(side: Side) -> dict[str, Any]:
    """What TrainingArguments hold, the plugins that they make, and the words that are the script's own."""
    from transformers import training_args
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    given, words = parsed_arguments(in_todays_words(side.words))
    given = in_file(side.folder, words) | given
    library, cls = training_args, training_args.TrainingArguments
    with machine(side.cards or "0", side.environ), contextlib.chdir(side.folder), contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(cls, "device", property(lambda self: mock.Mock())))
        stack.enter_context(mock.patch.object(cls, "world_size", property(lambda self: 2)))
        for name in ("is_torch_bf16_gpu_available", "is_torch_tf32_available", "enable_tf32"):
            stack.enter_context(mock.patch.object(library, name, lambda *_: True))
        made = cls(**{"output_dir": "out", **given})
        found = {each.name: getattr(made, each.name) for each in dataclasses.fields(cls) if each.name not in APART}
        found |= {"words": words, "mixed_precision": made.mixed_precision, "plugin": None}
        if made.fsdp_plugin_args is not None or os.environ.get("ACCELERATE_USE_FSDP") == "true":
            from accelerate.utils import FullyShardedDataParallelPlugin

            found["plugin"] = plugin_fields(FullyShardedDataParallelPlugin(**made.fsdp_plugin_args or {}))
        elif made.deepspeed_plugin is not None:
            config = HfTrainerDeepSpeedConfig(made.deepspeed_plugin.hf_ds_config.config)
            config.trainer_config_process(made)
            found["plugin"] = config.config
    return found


VIEWS = {"hf": of_trainer, "accelerate": of_accelerator, "deepspeed": of_engine}


def plugin_fields(plugin: Any) -> dict[str, Any]:
    """The settings of accelerate's FSDP plugin, as text where they are objects."""
    names = [each.name for each in dataclasses.fields(plugin) if each.name != "param_init_fn"]
    found = {name: getattr(plugin, name) for name in names}
    found["auto_wrap_policy"] = getattr(plugin.auto_wrap_policy, "__name__", plugin.auto_wrap_policy)
    offload = plugin.cpu_offload  # one of torch's policies, or a switch
    found["cpu_offload"] = getattr(offload, "offload_params", type(offload).__name__)
    if plugin.fsdp_version == 1:
        del found["reshard_after_forward"]  # another name of sharding_strategy
    plain = (str, int, list, dict, type(None))
    return {name: each if isinstance(each, plain) else str(each) for name, each in found.items()}


def in_todays_words(words: Sequence[str]) -> list[str]:
    """The words of a script on Trainer by the names of the installed version."""
    found, left_out = list[str](), False
    for word in words:
        flag = word.startswith("--")
        name, equals, value = word.removeprefix("--").partition("=")
        left_out = name in GONE if flag else left_out
        if flag and name == GROUPED:
            found += [f"--{SAMPLING}", GROUPED]
            left_out = True
        elif name.lower() == "false" and left_out and found[-1] == GROUPED:
            del found[-2:]
        if not left_out:
            found.append(f"--{TODAY.get(name, name)}{equals}{value}" if flag else word)
    return found


def in_file(folder: str, words: Sequence[str]) -> dict[str, Any]:
    """The fields that a script's own file sets: `--config FILE.yaml`, as TRL's parser reads it, or FILE.yaml alone."""
    import yaml
    from transformers import TrainingArguments

    alone = words[0] if len(words) == 1 and words[0].endswith((".yaml", ".yml")) else ""
    path = next((each for flag, each in pairwise(words) if flag == "--config"), alone)
    if not (Path(folder) / path).is_file():
        return {}
    names = {each.name for each in dataclasses.fields(TrainingArguments)}
    found = yaml.safe_load((Path(folder) / path).read_text())
    return {name: each for name, each in found.items() if name in names}


def parsed_arguments(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """TrainingArguments' fields that the words give, and the other words."""
    from transformers import HfArgumentParser, TrainingArguments

    parser = HfArgumentParser(TrainingArguments, allow_abbrev=False)
    for action in parser._actions:
        action.default, action.required = argparse.SUPPRESS, False
    given, rest = parser.parse_known_args([word.replace("<rank>", "0") for word in words])
    return vars(given), rest
