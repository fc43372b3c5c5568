"""A command read as a recipe: its variables, its launcher, its program, and how the ranks are spread.

Tools that start a launcher themselves are read as that launcher's command. Sources: llamafactory/launcher.py;
axolotl/cli/utils/train.py; trl/cli/commands/training.py; lightning/fabric/cli.py.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, get_args

from trainkit.errors import RecipeError, UsageError
from trainkit.machine.selection import ORDER
from trainkit.planner.env import DECIDED, LEAKS
from trainkit.recipe.interpolation import REFERENCE
from trainkit.recipe.schema import Program
from trainkit.recipe.schema.launching import ON_ACCELERATE
from trainkit.recipe.secrets import is_secret_name, mask_words, why_secret
from trainkit.recipe.yaml_reader import WRITE_TEXT, is_text
from trainkit.schedulers.slurm_options import options
from trainkit.tools.accelerate.launcher import FLAGS as ACCELERATE
from trainkit.tools.accelerate.program import is_free
from trainkit.tools.base.detection import DetectedKind, package_folder, program_kind
from trainkit.tools.base.imported_recipe import (
    SUFFIXES,
    ImportContext,
    ImportedRecipe,
    argv_origin,
    card,
    number_cards,
    number_of,
    read_mapping,
)
from trainkit.tools.base.interface import LauncherCommand
from trainkit.tools.base.launcher_flags import as_arguments, find_flag, script_flags, secret_flags
from trainkit.tools.containers.importer import ENGINES, read_container, start_of_container
from trainkit.tools.deepspeed.fields import KINDS
from trainkit.tools.deepspeed.importer import stage_of
from trainkit.tools.hf.argv_reader import as_flags, fields_in_file
from trainkit.tools.hf.fields import BY_NAME
from trainkit.tools.registry import LAUNCHERS, PROGRAMS, launcher_of

PROGRAM_KINDS = tuple(get_args(Program.model_fields["kind"].annotation))
ENV = "/usr/bin/env"  # finds a command in PATH, as a shell does
# Installed commands that are programs, and start ranks themselves; with the word that makes them train, where they do
# more (torchtune/_cli/tune.py; setup.py of fairseq and of composer).
CONSOLE_SCRIPTS: Mapping[str, str] = {"tune": "run", "fairseq-train": "", "fairseq-hydra-train": "", "composer": ""}
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>.*)", re.DOTALL)
_ORDERS = {theirs: ours for ours, (theirs, _) in ORDER.items()}
# Commands that start another one, and what a recipe says instead of them, where it has something.
_STARTERS: Mapping[str, str] = {
    **dict.fromkeys(("env", "nohup", "time", "exec", "command", "stdbuf", "ionice", "unbuffer", "caffeinate"), ""),
    **dict.fromkeys(("nice", "sudo", "timeout"), "call trainkit run in the same way"),
    **dict.fromkeys(("uv", "poetry", "pipenv", "conda", "mamba", "micromamba", "pixi", "hatch", "rye"),
                    "trainkit's own interpreter starts the ranks"),
    **dict.fromkeys(("taskset", "numactl"), "see launcher.numa_binding"),
    "srun": "trainkit starts the ranks of each node itself; see nodes.count and nodes.processes_per_node",
}  # fmt: skip
_NO_PROGRAM = (["-m", "pip"], ["-m", "venv"], ["-m", "build"], ["setup.py", "install"], ["setup.py", "develop"])
_YES = ("1", "true", "y", "yes")
# What a tool's own file says of how the work is spread, by its key.
_SPREADS = ("deepspeed", "fsdp", "fsdp_config", "fsdp_version", "tensor_parallel_size", "context_parallel_size")
_OF_LLAMAFACTORY = (
    "FORCE_TORCHRUN", "NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RDZV_ID", "MAX_RESTARTS",
    "OPTIM_TORCH",
)  # fmt: skip
_FABRICS = {"accelerator": "", "strategy": "", "devices": "1", "num_nodes": "1", "node_rank": "0",
            "main_address": "127.0.0.1", "main_port": "29400", "precision": ""}  # fmt: skip


def starts(word: str) -> bool:
    """Whether a word begins a command that can be read."""
    name = posixpath.basename(word)
    return name in TOOLS or name in CONSOLE_SCRIPTS or name in ENGINES or launcher_of(name) is not None


def starts_program(words: Sequence[str]) -> bool:
    """Whether words, variables and starters in front included, start a program."""
    first = next((word for word in words if not _ASSIGNMENT.fullmatch(word)), "")
    if posixpath.basename(first) in _STARTERS:
        first = next((word for word in words if starts(word)), "")
    if not starts(first):
        return False
    name, behind = posixpath.basename(first), list(words[words.index(first) :])
    if name in CONSOLE_SCRIPTS:
        return _is_console_script(behind)
    if name in ENGINES:
        return start_of_container(behind) > 0 and any(map(starts, behind[2:]))
    if launcher_of(name) != "python":
        return True
    rest = behind[1:]
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "-c", "-m"):
        rest.pop(0)  # the interpreter's own flags
    return bool(rest) and rest[0] not in ("-", "-c") and rest[:2] not in _NO_PROGRAM


def read_command(
    draft: ImportedRecipe,
    context: ImportContext,
    words: Sequence[str],
    kind: str | None = None,
    written: Sequence[str] = (),
) -> None:
    """Import a command. kind: of the program, where the caller knows it; written: the words to show."""
    shown = " ".join(shlex.quote(word) for word in mask_words(written or words))
    if not is_text(shown):
        raise UsageError(f"the command is not UTF-8 text: {shown}", hint=WRITE_TEXT)
    draft.title = f"{draft.title}: {shown}" if draft.title else shown
    variables, rest = take_variables(draft, words)
    if start_of_container(rest):
        for each in variables:
            draft.remark(f"{each} in front is not taken over: the engine reads it, and hands it to no program.")
        inside, rest = read_container(draft, context, rest)
        own, rest = take_variables(draft, rest)
        variables = {**inside, **own}
    if draft.problems:
        return
    unwrapped = unwrap(rest, variables, context)
    if unwrapped:
        rest, kind = unwrapped.words, kind or unwrapped.kind
        variables = {name: each for name, each in variables.items() if name not in unwrapped.taken}
        variables = {**unwrapped.variables, **variables}
        for remark in unwrapped.remarks:
            draft.remark(remark)
    _read_variables(draft, variables)
    command = _read_launcher(draft, context, rest)
    if draft.problems:
        return
    _name_program(draft, command)
    draft.replicas = command.launcher != "python" and _several(draft, command)
    read_target(draft, context, command.argv, kind, module=command.module)
    if command.local_rank and draft.get("program.kind") != "hf":
        reason = "the command passes it; leave it out where the script reads LOCAL_RANK"
        origin = argv_origin("deepspeed" if command.launcher == "deepspeed" else "torch.distributed.launch")
        draft.set("program.local_rank", command.local_rank == "--local_rank" or command.local_rank, origin, reason)
    if not command.python and command.argv[0].endswith(".py"):
        draft.remark(f"{command.argv[0]} was started without Python (--no_python), and trainkit starts it with Python.")
    _spread(draft, command)
    if unwrapped and unwrapped.strategy and draft.get("strategy.kind") == "ddp":
        strategy, where = unwrapped.strategy
        draft.forget("strategy.kind")
        draft.set("strategy.kind", strategy, argv_origin(where), f"the program's own part, as {where} says")


def take_variables(draft: ImportedRecipe, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The assignments that a command begins with, and the rest of it from the launcher on.

    Commands that only start it are named and left out.
    """
    rest, found = list(words), dict[str, str]()
    while rest:
        starter = posixpath.basename(rest[0])
        if match := _ASSIGNMENT.fullmatch(rest[0]):
            found[match["name"]] = match["value"]
            rest.pop(0)
        elif starter in _STARTERS and any(map(starts, rest[1:])):
            # It ends where the command, an assignment in front of that, or another starter begins.
            end = first_of_command(rest, 1)
            taken, rest = rest[:end], rest[end:]
            instead = _STARTERS[starter]
            if starter == "srun":
                _refuse_tasks(taken, rest)
            if len(taken) > 1 or instead:
                draft.remark(f"`{' '.join(taken)}` in front is not taken over{': ' if instead else ''}{instead}.")
        else:
            break
    return found, rest


def first_of_command(words: Sequence[str], place: int) -> int:
    """From a place on, where a command that can be read, an assignment in front of it, or a starter begins."""
    while place < len(words) and not (
        starts(words[place]) or _ASSIGNMENT.fullmatch(words[place]) or words[place] in _STARTERS
    ):
        place += 1
    return place


def _refuse_tasks(srun: Sequence[str], command: Sequence[str]) -> None:
    """Raises UsageError where srun starts Python several times, on nodes that only the allocation knows."""
    asked = [each for each in options(srun[1:]) if each.name in ("nodes", "ntasks", "ntasks-per-node")]
    name = next((posixpath.basename(word) for word in command if not _ASSIGNMENT.fullmatch(word)), "")
    if launcher_of(name) == "python" and any(each.value != "1" for each in asked):
        what = f"`{' '.join(srun)}` starts {name} several times, on nodes that only the allocation knows"
        hint = "import a batch script with #SBATCH --nodes and --ntasks-per-node, or a line of torchrun's"
        raise UsageError(what, hint=hint)


def _read_launcher(draft: ImportedRecipe, context: ImportContext, words: list[str]) -> LauncherCommand:
    """The launcher's own words. Raises UsageError where they begin with none."""
    name = posixpath.basename(words[0]) if words else ""
    launcher = launcher_of(name)
    if launcher is None and name in ENGINES:
        verb = ENGINES[name][1]
        what = f"{' '.join([name, *words[1:2]])} does not start a program in an image as `{name} {verb}` does"
        raise UsageError(what, hint=f"import the command that starts the program: {name} {verb} …")
    if launcher is None and name in ("bash", "sh") and draft.get("container.kind"):
        hint = "put the command itself behind the image, and what is done before it into the image"
        raise UsageError(f"the container starts {name}, and trainkit the program itself", hint=hint)
    if launcher is None:
        hint = f"name a .json or .yaml file, or a command that begins with one of: {', '.join(LAUNCHERS)}"
        raise UsageError(f"{name or 'an empty word'} is neither a file nor a launcher", hint=hint)
    if name.startswith("python2"):
        raise UsageError(f"{words[0]} is Python 2, which no library of today has", hint="name a script for Python 3")
    if "/" in words[0]:
        draft.remark(f"{words[0]} is not taken over: trainkit's own interpreter starts the ranks.")
    command = LAUNCHERS[launcher].read(draft, context, words)
    number_cards(draft, context)
    for name, otherwise in (match.groups() for match in map(REFERENCE.search, words) if match):
        if otherwise and otherwise.endswith(SUFFIXES) and f"oc.env:{name}" not in " ".join(command.argv):
            draft.remark(f"{otherwise} is read here; import again where ${name} names another file.")
    return command


def _name_program(draft: ImportedRecipe, command: LauncherCommand) -> None:
    """Make the default of a variable that nothing sets the program. Raises UsageError where there is no program."""
    if not command.argv:
        raise UsageError("the command names no program", hint="add the script: trainkit import torchrun … train.py")
    if found := REFERENCE.fullmatch(command.argv[0]):
        if not found[2]:
            what = f"{command.argv[0]} is where the command has its program, and nothing says what it is"
            raise UsageError(what, hint="give it with --set NAME=VALUE")
        draft.remark(f"The program is {found[2]}, for nothing sets ${found[1]}: import again for another.")
        command.argv[0] = found[2]
    if not command.python and not command.argv[0].endswith(".py") and "/" not in command.argv[0]:
        command.argv.insert(0, ENV)


def read_target(
    draft: ImportedRecipe, context: ImportContext, argv: Sequence[str], kind: str | None, *, module: bool = False
) -> None:
    """Import a script or module: arguments with a recipe key become settings, and the others stay its own."""
    target = argv[0]
    words, fields = argv[1:], fields_in_file(context, argv[1:])
    origin = argv_origin(target)
    if posixpath.basename(target) == "xla_spawn.py":
        why = "it imports another script and starts that once for each chip, in processes of its own"
        hint = "import the script that it names: python SCRIPT …; strategy.kind: fsdp is over every chip"
        draft.fail("xla_spawn.py cannot be run by trainkit", origin, hint, why)
        return
    otherwise = "accelerate" if draft.get("launcher.kind") == "accelerate" else "torch"
    detected = DetectedKind(kind) if kind else program_kind(context, argv, otherwise, module=module, told=fields)
    if detected.remark:
        draft.remark(detected.remark)
    reason = f"a script on {PROGRAMS[detected.kind].DETECTION.library}, as {detected.by} tells" if detected.by else ""
    name = argv[1] if target == ENV and argv[1:] else target
    draft.name = re.sub(r"\.py$", "", posixpath.basename(name))
    draft.set("program.kind", detected.kind, origin, reason)
    draft.set("program.module" if module else "program.script", target, origin)
    if name != target:
        draft.reasons["program.script"] = f"finds {name} in PATH, as a shell does"
    if fields and draft.get("program.kind") == "hf":
        words = as_flags(draft, argv[1], fields)
    kept = PROGRAMS[draft.get("program.kind")].read(draft, context, words)
    secret = dict.fromkeys(secret_flags(kept))
    for flag in secret:
        if flag not in context.public:
            what = f"--{flag} holds a secret, which a recipe must not"
            hint = f"leave it out, and export what the script reads instead; or, where it is none, --public {flag}"
            draft.fail(what, argv_origin(f"--{flag}"), hint, "recipes, plans and run directories are kept and shared")
    referred = REFERENCE.findall(" ".join([*kept, *(str(draft.get(key)) for key in draft.settings)]))
    secret |= dict.fromkeys(name for name, _ in referred if name in context.public)
    if secret:
        draft.set("program.public", list(secret), origin, "as --public says")
    if kept:
        draft.set("program.args", as_arguments(kept), origin)


def _read_variables(draft: ImportedRecipe, variables: Mapping[str, str]) -> None:
    """Import the variables as settings and remarks."""
    for name, value in variables.items():
        origin = argv_origin(f"{name}={value}")
        leak = next((why for pattern, why in LEAKS.items() if fnmatchcase(name, pattern)), "")
        match name:
            case "CUDA_VISIBLE_DEVICES" | "HIP_VISIBLE_DEVICES":
                words = [each.strip() for each in value.split(",") if each.strip()]
                bad = next((place for place, each in enumerate(words) if each.startswith("-")), len(words))
                if bad < len(words):
                    what = "no GPU" if not bad else f"only {','.join(words[:bad])}"
                    reads = f"CUDA reads the list up to {words[bad]}, which is no GPU"
                    draft.remark(f"{origin.text}: {reads}, and shows {what}.")
                draft.set("devices.select", [card(each) for each in words[:bad]] or "none", origin)
            case "CUDA_DEVICE_ORDER" if value in _ORDERS:
                draft.set("devices.order", _ORDERS[value], origin)
            case "CUDA_DEVICE_ORDER":
                draft.fail(f"CUDA_DEVICE_ORDER {value!r} is unknown to CUDA", origin, f"write {' or '.join(_ORDERS)}")
            case "DS_ACCELERATOR" if value in ("cpu", "cuda", "mps"):
                draft.set("devices.type", value, origin)
            case "DS_ACCELERATOR":
                draft.remark(f"{name}={value} is not taken over: trainkit runs on cuda, mps and cpu.")
            case "ACCELERATE_USE_CPU":
                if value.lower() in ("1", "true", "yes", "on", "y", "t"):
                    draft.set("devices.type", "cpu", origin)
            case "ACCELERATE_MIXED_PRECISION" if value in ("bf16", "fp16"):
                draft.set("precision.dtype", value, origin)
                reach = f"{origin.text} reaches scripts on Accelerator() alone"
                draft.remark(f"{reach}: for those import with --kind accelerate.")
            case "ACCELERATE_MIXED_PRECISION":
                if value != "no":
                    draft.remark(f"{origin.text} is not taken over: a recipe has bf16 and fp16.")
            case "PJRT_DEVICE":
                draft.set("devices.type", "xla", origin)
                if value != "TPU":  # which the plan sets by itself
                    draft.set("env.PJRT_DEVICE", value, origin)
            case _ if why_secret(name, value) or is_secret_name(name):
                taken = [*(draft.get("env_from") or []), name]
                draft.settings.pop("env_from", None)
                draft.set("env_from", taken, origin, "a secret is not written down: export it before the run")
            case "MASTER_ADDR":
                place = f"{value}:{variables.get('MASTER_PORT', '29500')}"
                draft.remark(f"{origin.text} is where nodes meet: with several, set nodes.rendezvous to {place}.")
            case _ if leak and not is_free(name):
                draft.remark(f"{name} is not taken over: it {leak}. Set what it is for in the recipe.")
            case _ if name in DECIDED:
                draft.remark(f"{name} is not taken over: the plan decides it; {DECIDED[name]}")
            case _:
                draft.set(f"env.{name}", value, origin)


def _several(draft: ImportedRecipe, command: LauncherCommand) -> bool:
    return command.processes is None or command.processes > 1 or (number_of(draft.get("nodes.count") or 1) or 2) > 1


def _spread(draft: ImportedRecipe, command: LauncherCommand) -> None:
    """The strategy, where the program's words name none: a replica on each rank where there are several."""
    strategy, gpus, device = draft.get("strategy.kind"), draft.get("devices.select"), draft.get("devices.type")
    launcher, origin, several = command.launcher, argv_origin(command.launcher), _several(draft, command)
    kind = draft.get("program.kind")
    on_launcher_alone = kind in (*ON_ACCELERATE, "torch")
    if device == "xla" and draft.get("launcher.kind") == "accelerate":
        draft.forget("launcher.kind")
    if launcher == "accelerate" and command.processes is None and gpus is None:
        draft.set("devices.select", "all", argv_origin("accelerate launch"))
    if launcher == "python" and strategy == "fsdp" and device != "xla":
        draft.remark("Trainer refuses --fsdp in a process that python starts alone; trainkit starts one for each GPU.")
    elif launcher == "python" or (launcher == "accelerate" and not several):
        # One process, which accelerate launch starts as python does: it sees what python would show it.
        alone = strategy in (None, "single") and on_launcher_alone
        if alone and draft.get("devices.select") is None and device in (None, "cuda"):
            reason = "every GPU that is visible, as for a program that python starts"
            draft.set("devices.select", "all", origin, reason)
    elif launcher == "torchrun" and command.processes == 1 and not several:
        # torchrun starts one process where no number is given, whatever GPUs there are.
        if on_launcher_alone and strategy is None:
            reason = "one process: torchrun sets RANK, WORLD_SIZE and MASTER_ADDR, of which a script may make a group"
            if kind in ON_ACCELERATE:
                reason = "one process: torchrun sets LOCAL_RANK, and the library makes a group of it"
            draft.set("strategy.kind", "ddp", origin, reason)
        if draft.get("strategy.kind") not in (None, "single"):
            draft.set("nodes.processes_per_node", 1, origin)
        if isinstance(gpus, list) and len(gpus) > 1:
            what = f"torchrun starts one process here, which sees {len(gpus)} GPUs"
            draft.remark(f"{what}: --nproc_per_node=gpu would start one for each (nodes.processes_per_node: auto).")
    elif strategy is None and several:
        draft.set("strategy.kind", "ddp", origin)
        if command.processes is None and gpus is None and draft.get("nodes.processes_per_node") is None:
            draft.set("devices.select", "all", origin)
    if device == "cpu" and isinstance(draft.get("devices.select"), int):
        draft.settings.pop("devices.select")  # deepspeed --num_gpus counts ranks on a CPU too
    one = command.processes == 1 and (strategy == "fsdp" or several) and draft.get("nodes.processes_per_node") is None
    if one and launcher != "python":
        draft.set("nodes.processes_per_node", 1, origin)


# Tools that start a launcher


@dataclass
class Unwrapped:
    """words: the launcher's command; variables: that the tool sets for it; remarks: on what it did besides.

    taken: variables that only the tool reads. kind: of the program, where the tool's own tells. strategy: that the
    program sets up itself, and where it says so.
    """

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    taken: tuple[str, ...] = ()
    kind: str | None = None
    strategy: tuple[str, str] | None = None


def unwrap(words: Sequence[str], variables: Mapping[str, str], context: ImportContext) -> Unwrapped | None:
    """The command that a tool would start, None for words of no such tool. Raises UsageError for what trains nothing.

    variables: those in front of the words, and of the text around them.
    """
    tool = posixpath.basename(words[0]) if words else ""
    if _is_console_script(words):
        remark = f"{tool} starts its ranks itself: for trainkit it is one process."
        return Unwrapped(["python", *([] if "/" in words[0] else [ENV]), *words], remarks=[remark], kind="torch")
    if tool not in TOOLS:
        return None
    made = TOOLS[tool](list(words[1:]), variables, context)
    started = " ".join(made.words[: made.words.index("-m") + 2] if "-m" in made.words else made.words[:2])
    made.remarks.insert(0, f"{tool} starts `{started}` itself; trainkit does that in its place.")
    return made


def _is_console_script(words: Sequence[str]) -> bool:
    """Whether words start an installed command that trains."""
    tool = posixpath.basename(words[0]) if words else ""
    return tool in CONSOLE_SCRIPTS and CONSOLE_SCRIPTS[tool] in ("", *words[1:2])


def _llamafactory(words: list[str], variables: Mapping[str, str], context: ImportContext) -> Unwrapped:
    _require(words, ("train",), "llamafactory-cli")
    for name, why in (("USE_RAY", "Ray starts its processes"), ("MIN_NNODES", "the number of nodes may change")):
        if variables.get(name, "0").lower() not in ("0", "false", "no", "n"):
            raise UsageError(f"{name} is set: {why}, and trainkit starts a fixed number", hint=f"leave {name} out")
    program = ["llamafactory.launcher", *words[1:]]
    forced = variables.get("FORCE_TORCHRUN", "0").lower() in _YES
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    made = _with_own_file(Unwrapped([], taken=_OF_LLAMAFACTORY, kind="torch"), words, context)
    if not forced and visible is not None and "," not in visible:
        made.words = ["python", "-m", *program]
        return made
    nodes, each = variables.get("NNODES", "1"), variables.get("NPROC_PER_NODE")
    flags = [f"--nproc_per_node={'gpu' if each is None else each}"]
    if nodes != "1":
        place = variables.get("MASTER_ADDR", "127.0.0.1"), variables.get("MASTER_PORT", "29500")
        flags += [f"--nnodes={nodes}", f"--master_addr={place[0]}", f"--master_port={place[1]}"]
    if "RDZV_ID" in variables:
        flags.append(f"--max_restarts={variables.get('MAX_RESTARTS', '0')}")
    made.words = ["torchrun", *flags, "-m", *program]
    if variables.get("OPTIM_TORCH", "1").lower() in _YES:
        made.variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}
    return made


def _axolotl(words: list[str], variables: Mapping[str, str], context: ImportContext) -> Unwrapped:
    _require(words, ("train",), "axolotl")
    end = words.index("--") if "--" in words else len(words)
    own, launch = words[1:end], words[end + 1 :]
    launcher, kept = "accelerate", list[str]()
    for flag in script_flags(own):
        if flag.name == "launcher" and flag.values:
            launcher, kept = flag.values[0], [*kept, *flag.values[1:]]
        elif flag.name in ("num_processes", "main_process_port"):
            launch += flag.words
        elif flag.name in ("no_accelerate", "no_launcher"):
            launcher = "python"
        elif flag.name != "accelerate":
            kept += flag.words
    starts = {"accelerate": ["accelerate", "launch", *launch], "torchrun": ["torchrun", *launch], "python": ["python"]}
    if launcher not in starts:
        raise UsageError(f"axolotl has no launcher {launcher}", hint=f"choose one of: {', '.join(starts)}")
    made = Unwrapped([*starts[launcher], "-m", "axolotl.cli.train", *kept], kind="torch")
    return _with_own_file(made, own, context)


def _trl(words: list[str], variables: Mapping[str, str], context: ImportContext) -> Unwrapped:
    _require(words, ("dpo", "grpo", "kto", "reward", "rloo", "sft"), "trl")
    launch, kept = list[str](), list[str]()
    for flag in script_flags(words[1:]):
        if flag.name == "accelerate_config":
            launch += ["--config_file", _trl_config(" ".join(flag.values), context)]
        elif _is_launchers(flag.name):
            launch += flag.words
        else:
            kept += flag.words
        if flag.name == "config" and flag.values:
            for name, value in _mapping(flag.values[0], context).items():
                if name == "accelerate_config":
                    launch += ["--config_file", _trl_config(str(value), context)]
                elif _is_launchers(name):
                    launch += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return Unwrapped(["accelerate", "launch", *launch, "-m", f"trl.scripts.{words[0]}", *kept], kind="hf")


def _is_launchers(name: str) -> bool:
    """Whether a flag is of `accelerate launch` and not of Trainer."""
    return find_flag(ACCELERATE, name) is not None and name not in BY_NAME


def _trl_config(name: str, context: ImportContext) -> str:
    """The file of a configuration of TRL's own, or of the user's."""
    if name.endswith(SUFFIXES):
        return name
    folder = package_folder(context, "trl")
    file = posixpath.join(folder, "accelerate_configs", f"{name}.yaml")
    if not folder or not context.files.exists(file):
        what = f"--accelerate_config {name} is a file in the package trl, which is not installed here"
        raise UsageError(what, hint="install trl, or name the file itself: --accelerate_config FILE.yaml")
    return file


def _fabric(words: list[str], variables: Mapping[str, str], context: ImportContext) -> Unwrapped:
    _require(words, ("run",), "fabric")
    options, rest = dict(_FABRICS), words[1:]
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).removeprefix("--").replace("-", "_").partition("=")
        if name not in options or not (equals or rest):
            raise UsageError(f"fabric run has no flag --{name}", hint=f"its flags are: {', '.join(options)}")
        options[name] = value if equals else rest.pop(0)
    set_for = {"ACCELERATOR": "accelerator", "STRATEGY": "strategy", "PRECISION": "precision"}
    made = {f"LT_{name}": options[key] for name, key in set_for.items() if options[key]}
    made |= {"LT_CLI_USED": "1", "LT_DEVICES": options["devices"], "LT_NUM_NODES": options["num_nodes"]}
    count = options["devices"]
    each = "gpu" if count in ("auto", "-1") else str(len(count.strip(",").split(","))) if "," in count else count
    flags = [f"--nproc_per_node={each}"]
    if options["num_nodes"] != "1":
        place = f"--master_addr={options['main_address']}", f"--master_port={options['main_port']}"
        flags += [f"--nnodes={options['num_nodes']}", *place]
    # lightning/fabric/strategies/deepspeed.py: the names that it registers; a bare `deepspeed` is stage 2.
    named = re.sub(r"^deepspeed_stage_(\d).*|^deepspeed$", lambda match: f"zero{match[1] or 2}", options["strategy"])
    strategy = (named, f"--strategy={options['strategy']}") if named in (*KINDS.values(), "fsdp") else None
    return Unwrapped(["torchrun", *flags, *rest], made, kind="torch", strategy=strategy)


TOOLS: Mapping[str, Callable[[list[str], Mapping[str, str], ImportContext], Unwrapped]] = {
    "llamafactory-cli": _llamafactory,
    "lmf": _llamafactory,
    "axolotl": _axolotl,
    "trl": _trl,
    "fabric": _fabric,
}


def _require(words: list[str], commands: Sequence[str], tool: str) -> None:
    if not words or words[0] not in commands:
        shown = f"{tool} {words[0]}" if words else tool
        raise UsageError(f"{shown} starts no training", hint=f"trainkit imports: {tool} {' | '.join(commands)}")


def _with_own_file(made: Unwrapped, words: Sequence[str], context: ImportContext) -> Unwrapped:
    """What the tool's file says of how the work is spread: the program sets that up itself, and the plan says so."""
    for word in (word for word in words if word.endswith(SUFFIXES)):
        said = {name: value for name, value in _mapping(word, context).items() if name in _SPREADS and value}
        if said:
            shown = ", ".join(f"{name} {value}" for name, value in said.items())[:200]
            made.remarks.append(f"{word} says {shown}: the program sets that up itself, on the ranks of this plan.")
        engine = _mapping(str(said.get("deepspeed", "")), context)
        kind = KINDS.get(stage_of(engine)) if engine else "fsdp" if {"fsdp", "fsdp_config"} & said.keys() else None
        if kind:
            made.strategy = kind, word
    return made


def _mapping(path: str, context: ImportContext) -> Mapping[str, Any]:
    """The file as a mapping; nothing where it is not here, which the tool will say."""
    try:
        return read_mapping(context, path, f"file {path}", 1).tree
    except (UsageError, RecipeError):
        return {}
