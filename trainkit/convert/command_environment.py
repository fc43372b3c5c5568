"""The variables in front of a command (`CUDA_VISIBLE_DEVICES=0,2 torchrun …`), and the settings that they become."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from trainkit.errors import Origin
from trainkit.frameworks.base.draft import Draft, argv_origin, card
from trainkit.machine.selection import ORDER
from trainkit.planner.env import DECIDED, LEAKS
from trainkit.recipe.layers.secrets import is_secret_name

_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>.*)", re.DOTALL)
_CUDA_ORDER = "as CUDA numbers cards where CUDA_DEVICE_ORDER is not set; pci numbers them as nvidia-smi does"


# Commands that start another one, and what a recipe says instead of them, where it has something.
_STARTERS: Mapping[str, str] = {
    **dict.fromkeys(("env", "nohup", "time", "exec", "command", "stdbuf", "ionice", "unbuffer", "caffeinate"), ""),
    **dict.fromkeys(("nice", "sudo", "timeout"), "call trainkit run in the same way"),
    **dict.fromkeys(("uv", "poetry", "pipenv", "conda", "mamba", "micromamba", "pixi", "hatch", "rye"),
                    "trainkit's own interpreter starts the ranks"),
    **dict.fromkeys(("taskset", "numactl"), "see launcher.numa_binding"),
    "srun": "trainkit starts the ranks of each node itself; see cluster, nodes.count and nodes.processes_per_node",
}  # fmt: skip


def take_variables(
    draft: Draft, words: Sequence[str], starts: Callable[[str], bool]
) -> tuple[dict[str, str], list[str]]:
    """The assignments that a command begins with, and the rest of it from the launcher on.

    starts: whether a word is one that the rest may begin with. Commands that only start it are named and left out.
    """
    rest, found = list(words), dict[str, str]()
    while rest:
        if match := _ASSIGNMENT.fullmatch(rest[0]):
            found[match["name"]] = match["value"]
            rest.pop(0)
        elif rest[0].rpartition("/")[2] in _STARTERS and any(map(starts, rest[1:])):
            _started(draft, rest, starts)
        else:
            break
    return found, rest


def _started(draft: Draft, rest: list[str], starts: Callable[[str], bool]) -> None:
    """Take a starter and its words off, up to the command or to an assignment in front of that."""
    taken = [rest.pop(0)]
    while not (starts(rest[0]) or _ASSIGNMENT.fullmatch(rest[0]) or rest[0] in _STARTERS):
        taken.append(rest.pop(0))
    instead = _STARTERS[taken[0].rpartition("/")[2]]
    if len(taken) > 1 or instead:
        draft.remark(f"`{' '.join(taken)}` in front is not taken over{': ' if instead else ''}{instead}.")


def read_variables(draft: Draft, variables: Mapping[str, str]) -> None:
    """Import the variables as settings and remarks."""
    for name, value in variables.items():
        origin = argv_origin(f"{name}={value}")
        if name in _READERS:
            _READERS[name](draft, value, origin)
        elif is_secret_name(name):
            taken = [*(draft.get("env_from") or []), name]
            draft.settings.pop("env_from", None)
            draft.set("env_from", taken, origin, "a secret is not written down: export it before the run")
        elif name == "MASTER_ADDR":
            port = variables.get("MASTER_PORT", "29500")
            draft.remark(f"{origin.text} is where nodes meet: with several, set nodes.rendezvous to {value}:{port}.")
        elif _leaks(name):
            draft.remark(f"{name} is not taken over: {_leaks(name)}. Set what it is for in the recipe.")
        elif name in DECIDED:
            draft.remark(f"{name} is not taken over: the plan decides it; {DECIDED[name]}")
        else:
            draft.set(f"env.{name}", value, origin)
    if isinstance(draft.get("devices.select"), list) and draft.get("devices.order") is None:
        draft.set("devices.order", "fastest", argv_origin("CUDA_VISIBLE_DEVICES"), _CUDA_ORDER)


def _leaks(name: str) -> str:
    for pattern, why in LEAKS.items():
        if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])):
            return f"it {why}"
    return ""


def _visible(draft: Draft, value: str, origin: Origin) -> None:
    words = [each.strip() for each in value.split(",") if each.strip()]
    bad = next((place for place, each in enumerate(words) if each.startswith("-")), len(words))
    if bad < len(words):
        what = "no card" if not bad else f"only {','.join(words[:bad])}"
        draft.remark(f"{origin.text}: CUDA reads the list up to {words[bad]}, which is no card, and shows {what}.")
    cards = [card(each) for each in words[:bad]]
    draft.set("devices.select", cards or "none", origin)


def _order(draft: Draft, value: str, origin: Origin) -> None:
    found = next((ours for ours, (theirs, _) in ORDER.items() if theirs == value), None)
    if found is None:
        known = " or ".join(theirs for theirs, _ in ORDER.values())
        draft.fail(f"CUDA_DEVICE_ORDER {value!r} is unknown to CUDA", origin, f"write {known}")
        return
    draft.set("devices.order", found, origin)


def _accelerator(draft: Draft, value: str, origin: Origin) -> None:
    if value in ("cpu", "cuda", "mps"):
        draft.set("devices.type", value, origin)
    else:
        draft.remark(f"DS_ACCELERATOR={value} is not taken over: trainkit runs on cuda, mps and cpu.")


def _runtime(draft: Draft, value: str, origin: Origin) -> None:
    """torch_xla's device; the plan says TPU, and the recipe may say otherwise."""
    draft.set("devices.type", "xla", origin)
    if value != "TPU":
        draft.set("env.PJRT_DEVICE", value, origin)


def _on_cpu(draft: Draft, value: str, origin: Origin) -> None:
    if value.lower() in ("1", "true", "yes", "on", "y", "t"):
        draft.set("devices.type", "cpu", origin)


def _mixed(draft: Draft, value: str, origin: Origin) -> None:
    if value in ("bf16", "fp16"):
        draft.set("precision.dtype", value, origin)
        draft.remark(f"{origin.text} reaches scripts on Accelerator() alone: for those import with --kind accelerate.")
    elif value != "no":
        draft.remark(f"{origin.text} is not taken over: a recipe has bf16 and fp16.")


_READERS: Mapping[str, Callable[[Draft, str, Origin], None]] = {
    "CUDA_VISIBLE_DEVICES": _visible,
    "HIP_VISIBLE_DEVICES": _visible,
    "CUDA_DEVICE_ORDER": _order,
    "DS_ACCELERATOR": _accelerator,
    "ACCELERATE_USE_CPU": _on_cpu,
    "ACCELERATE_MIXED_PRECISION": _mixed,
    "PJRT_DEVICE": _runtime,
}
