"""Inside the user's program: at the first optimizer step, see what is in force and compare it with what was planned.

Standard library only, and nothing of the program is changed: torch is asked to call before each optimizer step
(``torch.optim.optimizer.register_optimizer_step_pre_hook``). At the first one every wrapper is in place: what the
wrappers are is read off the objects that live then, by their exact classes. From then on steps are counted.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib.abc
import importlib.util
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

NOT_AS_PLANNED = 1  # exit code of a rank that runs something else than the plan says
OPTIMIZERS = "torch.optim.optimizer"
# Class of a wrapper -> the strategy that it is, the first that fits; wrappers that shard come before those that do
# not. FSDP2's own class is no proof of sharding: torch's replicate is made of it.
WRAPPERS = {
    "torch.distributed._composable.replicate_with_fsdp:ReplicateModule": "ddp",
    "torch.distributed.fsdp._fully_shard._fully_shard:FSDPModule": "fsdp",
    "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel": "fsdp",
    "torch_xla.experimental.spmd_fully_sharded_data_parallel:SpmdFullyShardedDataParallel": "fsdp",
    "torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel:XlaFullyShardedDataParallel": "fsdp",
    "torch.nn.parallel.distributed:DistributedDataParallel": "ddp",
    "torch.nn.parallel.data_parallel:DataParallel": "dataparallel",
}
ORDER = ("fsdp", "ddp", "dataparallel")
ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
ARGUMENTS = "transformers.training_args:TrainingArguments"
STATE = "transformers.trainer_callback:TrainerState"
DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "no": "fp32"}
MEANING = {
    "single": "this rank trains a separate model, which is not synchronised with other ranks",
    "dataparallel": "this process spreads its batch over several GPUs with nn.DataParallel",
}
BY_HAND = "no wrapper synchronises this rank's model with the others: only the program itself could"
EVERY_SECONDS = 5.0  # between two writes of how many steps there were


def watch(expected: str, shown: str, files: Any, heartbeat: Any = None) -> None:
    """Observe the optimizer steps of this process. expected, shown: paths of what to compare with, and to write.

    files: the module trainkit/files.py. heartbeat: where every step of any optimizer is noted (trainkit/heartbeat.py).
    """
    begin = functools.partial(Observer, expected=expected, shown=shown, files=files, heartbeat=heartbeat)
    if OPTIMIZERS in sys.modules:  # a .pth file of the environment may have imported torch already
        begin(sys.modules[OPTIMIZERS])
    else:
        sys.meta_path.insert(0, _AfterImport(begin))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs once torch's optimizers have been imported, in whatever way the program does that."""

    def __init__(self, begin: Callable[[ModuleType], object]) -> None:
        self._begin = begin

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module's own spec, whose loader then asks for the hook."""
        if name != OPTIMIZERS:
            return None
        with contextlib.suppress(ValueError):  # the program may have put the finders behind one of its own
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._begin(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class Observer:
    """Waits for the first optimizer step of its own process; children that this one forks are no ranks."""

    def __init__(self, optimizers: Any, *, expected: str, shown: str, files: Any, heartbeat: Any = None) -> None:
        """optimizers: the module ``torch.optim.optimizer``; the others as for `watch`."""
        self._heartbeat = heartbeat
        if heartbeat is not None:
            heartbeat.listen(counts=True)
        self._expected, self._shown, self._files = expected, shown, files
        self._run_dir = os.path.dirname(expected)
        self._process, self._is_over = os.getpid(), False
        self._counter: StepCounter | None = None
        register = getattr(optimizers, "register_optimizer_step_pre_hook", None)
        if register is not None:  # a program with an interpreter of its own may have a torch without it
            register(self._at_step)

    def _at_step(self, optimizer: Any, _args: object, _kwargs: object) -> None:
        # The hook stays: torch is iterating over its hooks, and would fail if one were removed.
        if os.getpid() != self._process:
            return
        if self._heartbeat is not None:
            self._heartbeat.stepped(optimizer)
        if self._is_over:
            if self._counter is not None:
                self._counter.count(optimizer)
            return
        self._is_over = True
        try:
            expected = self._files.parse_json(self._files.read_whole(self._expected, below=self._run_dir))
            expected["resume"] = promised_step(expected.get("resume"), sys.argv)
            seen = observe(optimizer)
            if given := expected.get("arguments"):
                seen["arguments"] = arguments(given)
            if folder := output_dir():
                seen["output_dir"] = folder
            if (step := resumed_at()) is not None:
                seen["step"] = step
            found, warns = differences(expected, seen), expected.get("on_difference") == "warn"
            seen |= {"differences": [], "warnings": found} if warns else {"differences": found}
        except Exception as error:  # noqa: BLE001 - the program must not fail with its observer; the account says why
            seen = {"error": f"{type(error).__name__}: {error}"}
        self._write(seen)
        if said := seen.get("differences") or seen.get("warnings"):
            how = "" if seen["differences"] else "warning: "
            why = f"trainkit: {how}what runs is not what was planned: {'; '.join(said)}\n"
            # An exception could be caught, and ranks that wait for one another would never end.
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or replaced by something else
                sys.stdout.flush()
            with contextlib.suppress(OSError):
                os.write(2, why.encode("utf-8", "backslashreplace"))
            if seen["differences"]:
                os._exit(NOT_AS_PLANNED)
        folder, name = os.path.split(self._shown)
        publish = functools.partial(self._files.publish, below=self._run_dir)
        self._counter = StepCounter(os.path.join(folder, f"steps-{name}"), optimizer, publish)

    _at_step._torchdynamo_disable = True  # type: ignore[attr-defined]  # as torch.compiler.disable marks it

    def _write(self, seen: Mapping[str, Any]) -> None:
        """Whole or not at all; a run without an account of it says so in the end."""
        try:
            self._files.make_folder(os.path.dirname(self._shown), below=self._run_dir)
            self._files.publish(self._shown, json.dumps(seen), below=self._run_dir)
        except OSError as error:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # no such stream any more
                sys.stderr.write(f"trainkit: {self._shown} cannot be written: {error.strerror}\n")


class StepCounter:
    """Counts from the first step on. Times are seconds of a monotonic clock, from step to step as they begin.

    The file holds `steps`, `seconds` from the first of them to the last, and `first_seconds` from the first to the
    second, in which most programs compile and warm up.
    """

    def __init__(self, path: str, optimizer: Any, publish: Callable[[str, str], None]) -> None:
        """optimizer: the one that takes its first step now; others are not counted. publish: writes a file whole."""
        self._path, self._optimizer, self._publish = path, id(optimizer), publish
        self._begin = self._latest = self._written = time.monotonic()
        self._steps, self._first = 1, 0.0
        atexit.register(self._write)

    def count(self, optimizer: Any) -> None:
        """Note that an optimizer takes a further step."""
        if id(optimizer) != self._optimizer:
            return
        self._latest = time.monotonic()
        self._steps += 1
        if self._steps == 2:
            self._first = self._latest - self._begin
        if self._latest - self._written >= EVERY_SECONDS:
            self._written = self._latest
            self._write()

    def _write(self) -> None:
        seen = {"steps": self._steps, "seconds": self._latest - self._begin, "first_seconds": self._first}
        with contextlib.suppress(OSError):  # the run's folder is gone or full: the program goes on
            self._publish(self._path, json.dumps(seen))


class Wrappers(NamedTuple):
    """What this process has put its models into.

    engine: DeepSpeed's, whose parameters are not those of the optimizer that it steps. holding: strategy -> an object
    that holds the optimized parameters. others: whether there are wrappers or engines of anything else.
    """

    engine: Any
    holding: Mapping[str, Any]
    others: bool


def observe(optimizer: Any) -> dict[str, Any]:
    """What this process trains with, at an optimizer step. What is unknown is None."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    wrappers = _wrappers(optimizer, parameters)
    # FSDP2's DTensors, of which each rank has a part.
    sharded = [each for each in parameters if any(part.is_shard() for part in getattr(each, "placements", ()))]
    return {
        "strategy": _strategy(wrappers, sharded),
        "world_size": _world_size(),
        "device": _device(parameters, wrappers, sharded),
        "dtype": _dtype(parameters, wrappers.engine),
    }


def _strategy(wrappers: Wrappers, sharded: Sequence[Any]) -> str | None:
    """None where a wrapper is there of which it is not known whether it trains these parameters, or copies of them."""
    if wrappers.engine is not None:
        return f"zero{int(wrappers.engine.zero_optimization_stage())}"
    if sharded:
        return "fsdp"
    found = next((name for name in ORDER if name in wrappers.holding), None)
    hidden = wrappers.others or gc.get_freeze_count()  # frozen objects cannot be looked for
    return found or (None if hidden else "single")


def _wrappers(optimizer: Any, parameters: Sequence[Any]) -> Wrappers:
    optimized = {id(parameter) for parameter in parameters}
    classes = {cls: name for place, name in WRAPPERS.items() if (cls := _loaded(place)) is not None}
    if (engine := _loaded(ENGINE)) is not None:
        classes[engine] = "deepspeed"
    engines, holding, others = [], dict[str, Any](), False
    for thing, name in _instances(classes):
        if name == "deepspeed":
            engines.append(thing)
        elif name not in holding:
            held = any(id(parameter) in optimized for parameter in thing.parameters())
            holding |= {name: thing} if held else {}
            others = others or not held
    stepping = [each for each in engines if optimizer in (getattr(each, "basic_optimizer", None), each.optimizer)]
    alone = engines if len(engines) == 1 and not holding else []
    return Wrappers(next(iter(stepping or alone), None), holding, others or bool(engines))


def _instances(classes: Mapping[type, str]) -> list[tuple[Any, str]]:
    """Every living object of these classes, with the name of its class."""
    found, names = [], dict[int, str | None]()
    things = gc.get_objects()
    for thing in things:
        kind = type(thing)  # never isinstance, which asks the object; by its id, because a class may have no hash
        if id(kind) not in names:
            names[id(kind)] = next((name for cls, name in classes.items() if issubclass(kind, cls)), None)
        if (name := names[id(kind)]) is not None:
            found.append((thing, name))
    return found


def _loaded(name: str) -> Any:
    """A class of a module that the program has imported, else None. name: ``module:Class``."""
    module, _, attribute = name.partition(":")
    return getattr(sys.modules.get(module), attribute, None)


def _living(name: str) -> list[Any]:
    """The living objects of a class that the program has imported. name: ``module:Class``."""
    cls = _loaded(name)
    return [thing for thing, _ in _instances({cls: ""})] if cls is not None else []


def _world_size() -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 1
    return int(distributed.get_world_size())


def _device(parameters: Sequence[Any], wrappers: Wrappers, sharded: Sequence[Any]) -> str | None:
    """Where the computation is; offloaded parameters are on the CPU meanwhile."""
    if wrappers.engine is not None:
        return str(wrappers.engine.device).partition(":")[0]
    if sharded:
        return str(sharded[0].device_mesh.device_type)
    computes = getattr(wrappers.holding.get("fsdp"), "compute_device", None)
    if computes is not None:
        return str(computes).partition(":")[0]
    kinds = {str(parameter.device.type) for parameter in parameters}
    cuda = sys.modules.get("torch.cuda")
    uses_card = cuda is not None and cuda.is_initialized() and cuda.memory_allocated() > 0
    if len(kinds) != 1 or (kinds == {"cpu"} and uses_card):  # the optimizer may keep copies of them on the CPU
        return None
    return kinds.pop()


def _dtype(parameters: Sequence[Any], engine: Any) -> str | None:
    """Format of the computation: DeepSpeed and accelerate know it; else only weights kept in 16 bits show it."""
    if engine is not None:
        return "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    mixed = getattr(state, "_shared_state", {}).get("_mixed_precision")
    kinds = {str(parameter.dtype) for parameter in parameters}
    kept = DTYPES.get(kinds.pop()) if len(kinds) == 1 else None
    if mixed is not None and str(mixed) != "no":
        return str(mixed)
    return kept if mixed is not None or kept != "fp32" else None  # autocast may be at work beside fp32 weights


def promised_step(resume: Mapping[str, str] | None, argv: Sequence[str]) -> dict[str, int | None] | None:
    """The step of the checkpoint that an argument of the program names, as far as its folder says it; None without."""
    flag = resume["argument"] if resume else "--"
    words = [word.removeprefix(f"{flag}=") for word in argv if word.startswith(f"{flag}=")]
    words += [after for word, after in itertools.pairwise(argv) if word == flag]
    named = words[-1] if words else ""
    number = os.path.basename(os.path.normpath(named)).removeprefix("checkpoint-")
    return {"step": int(number) if number.isdecimal() else None} if named else None


def resumed_at() -> int | None:
    """The optimizer steps that transformers' Trainer counts as done; None where there is no Trainer."""
    return max((int(each.global_step) for each in _living(STATE)), default=None)


def arguments(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the process's TrainingArguments hold of the fields given; None where that cannot be seen.

    Of several, those that differ least: a script may train something else beside.
    """
    held = [{name: _plain(getattr(each, name, None)) for name in given} for each in _living(ARGUMENTS)]
    if not held and not gc.get_freeze_count():  # frozen objects cannot be looked for
        return {}
    return min(held, key=lambda each: sum(each[name] != given[name] for name in given), default=None)


def output_dir() -> str:
    """Where the process's TrainingArguments have Trainer write, absolute; empty where there are none, or several."""
    found = {os.path.abspath(each.output_dir) for each in _living(ARGUMENTS) if getattr(each, "output_dir", None)}
    return found.pop() if len(found) == 1 else ""


def _plain(value: Any) -> Any:
    """A value as JSON has it: words of transformers' enumerations, and what else there may be as a text."""
    value = getattr(value, "value", value)
    return value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)


def differences(expected: Mapping[str, Any], seen: Mapping[str, Any]) -> list[str]:
    """What differs from the plan, in sentences. What the plan does not promise, or what is unknown, does not differ."""
    found = []
    if expected.get("own_processes") and seen.get("world_size", 1) > 1:  # Lightning's, or those of mp.spawn
        expected = {**expected, "world_size": None, "strategy": None}
    for name in ("world_size", "strategy", "device", "dtype"):
        promised, actual = expected.get(name), seen.get(name)
        accepted = promised if isinstance(promised, list) else [promised]
        if promised is None or actual is None or actual in accepted:
            continue
        if {accepted[0], actual} == {"ddp", "single"} and expected.get("world_size") == 1:
            continue  # one rank has no other to average with
        is_what = _meaning(actual, seen) if name == "strategy" else f"it is {actual}"
        found.append(f"{name.replace('_', ' ')} {accepted[0]} was planned, and {is_what}")
    if (resume := expected.get("resume")) and (step := seen.get("step")) is not None:
        promised = resume["step"]
        if step != promised if promised else not step:
            planned = f"resuming at step {promised}" if promised else "resuming"
            instead = f"Trainer starts at step {step}: hand resume_from_checkpoint to trainer.train()"
            found.append(f"{planned} was planned, and {instead}")
    given, held = expected.get("arguments") or {}, seen.get("arguments")
    if given and held == {}:
        found.append(f"{', '.join(given)} cannot have reached the script, which has no TrainingArguments")
        return found
    held = held or {}
    other = [name for name in held if held[name] != given[name]]
    where = "the script's TrainingArguments hold"
    found += [f"{name} {given[name]} was planned, and {where} {held[name]}" for name in other]
    return found + (["for a script that makes them itself, set program.kind to torch"] if other else [])


def _meaning(strategy: str, seen: Mapping[str, Any]) -> str:
    """What a strategy other than the planned one does."""
    if strategy == "single" and seen.get("world_size", 1) > 1:
        return BY_HAND
    return MEANING.get(strategy, f"{strategy} is in force")
