"""The interpreter and its packages: active, met requirements, nothing twice, CUDA libraries of one version only."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.distribution import NAME, install
from trainkit.doctor.check import Finding, Host, Target, ok, skipped
from trainkit.machine.facts import at_least, release
from trainkit.machine.host import canonical, distributions
from trainkit.optimizers import OPTIMIZERS
from trainkit.planner.requirements import all_requirements
from trainkit.tools.registry import PROGRAMS

if TYPE_CHECKING:
    from importlib.metadata import Distribution


OLDEST = "3.11"  # Python
# The built-in trainer imports these for some choices only; a program of the user's own may import anything.
HUGGING_FACE = frozenset({"accelerate", "transformers", "tokenizers", "huggingface-hub", "peft", "datasets"})
OTHERS = frozenset({"torchvision", "torchaudio", "xformers", "trl", "lightning", "pytorch-lightning", "torchmetrics"})
PLAIN_DATA = frozenset({"text", "random", "tokens"})
# Beside what plans require: what comes with it, and what is often upgraded without it.
COMPANIONS = (*sorted(HUGGING_FACE | OTHERS), "triton", "safetensors", "nvidia-ml-py", NAME)

# `nvidia-cublas-cu12`, `cupy-cuda12x`, `jax-cuda12-plugin`; since CUDA 13 NVIDIA's own wheels carry no suffix.
_SUFFIX = re.compile(r"-cu(?:da)?(\d\d)(?:\d*x?)?(?:-|$)")
_TOOLKIT = frozenset(
    f"nvidia-{part}"
    for part in (
        "cublas", "cuda-cupti", "cuda-nvcc", "cuda-nvrtc", "cuda-runtime", "cuda-crt", "nvvm", "nvjitlink", "nvtx",
    )
)  # fmt: skip


def packages(host: Host, target: Target) -> list[Finding]:
    """A finding for each requirement that is not met, else one that all fit."""
    try:
        import packaging.requirements  # noqa: F401 - comes with torch's companions, not with trainkit
    except ImportError:
        what = "the package `packaging` is not installed, which compares versions"
        return [skipped(f"{what}: {host.pip} install packaging")]
    left_out, everything = unused(target), installed(host)
    found = {name: each for name, each in everything.items() if name not in left_out}
    # The least of each package's minima: what a choice needs beyond it is for the plan to say.
    newest_first = sorted(all_requirements(), key=lambda each: release(each.minimum), reverse=True)
    required = {each.package: each.minimum for each in newest_first}
    judged = [name for name in dict.fromkeys((*required, *COMPANIONS)) if name in found]
    pip, python, findings = host.pip, host.facts.executable, []
    if target.plan is None and "torch" not in found:  # with a recipe, the plan says what is missing
        what = "torch is not installed: recipes can be checked and planned, and none can be run"
        findings.append(Finding("warning", what, (), (install(python, *PROGRAMS["builtin"].REQUIRES),)))
    for name, minimum in required.items():
        if name in found and not at_least(found[name].version, minimum):
            what = f"{name} {found[name].version} is too old: trainkit requires {minimum}"
            findings.append(Finding("problem", what, (_place(found[name]),), (install(python, f"{name}>={minimum}"),)))
    findings += [each for name in judged for each in _unmet(name, everything, pip)]
    if old := everything.get("pynvml"):
        # https://pypi.org/project/pynvml/ says itself that nvidia-ml-py replaces it; both bring a module of that name
        fix = f"{pip} uninstall -y pynvml && {pip} install --force-reinstall --no-deps nvidia-ml-py"
        what = "the package pynvml is obsolete; nvidia-ml-py brings the module pynvml"
        findings.append(Finding("warning", what, (f"pynvml {old.version}: {_place(old)}",), (fix,)))
    versions = ", ".join(f"{name} {found[name].version}" for name in judged)
    return findings or [ok(f"{len(judged)} packages that training uses fit together", versions)]


def unused(target: Target) -> frozenset[str]:
    """Packages that the plan certainly does not import."""
    recipe = target.recipe
    if target.plan is None or recipe is None or recipe.program.kind != "builtin":
        return frozenset()
    plain_data = recipe.data.kind in PLAIN_DATA and getattr(recipe.data, "tokenizer", None) is None
    plain = plain_data and recipe.model.kind == "gpt" and recipe.peft.kind == "none"
    chosen = {
        "accelerate": target.plan.launcher.kind == "accelerate",
        "deepspeed": target.deepspeed,
        **{each.requires.name: recipe.optimizer.name == name for name, each in OPTIMIZERS.items() if each.requires},
        "flash-attn": recipe.efficiency.attention == "flash_attention_2",
        "tensorboard": "tensorboard" in recipe.logging.report_to,
        "trackio": "trackio" in recipe.logging.report_to,
        "wandb": "wandb" in recipe.logging.report_to,
    }
    not_chosen = OTHERS.union(name for name, used in chosen.items() if not used)
    return not_chosen | (HUGGING_FACE - chosen.keys()) if plain else not_chosen - HUGGING_FACE


def _unmet(name: str, found: Mapping[str, Distribution], pip: str) -> Iterator[Finding]:
    """Requirements of the bare package on this system, as `pip check` sees them."""
    from packaging.requirements import InvalidRequirement, Requirement

    for text in found[name].requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:  # an older way of writing; pip skips it too
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        what = f"{name} {found[name].version} requires {requirement.name}{requirement.specifier}"
        fix = f"{pip} install '{requirement.name}{requirement.specifier}'"
        other = found.get(canonical(requirement.name))
        if other is None:
            yield Finding("problem", f"{what}, which is not installed", (_place(found[name]),), (fix,))
        elif not requirement.specifier.contains(other.version, prereleases=True):
            if name != NAME:  # which is on no index
                fix = fix.replace("install", f"install '{name}'") + "      # one resolver run, so that both fit"
            yield Finding("problem", f"{what}, and {other.version} is installed", (_place(other),), (fix,))


def _place(distribution: Distribution) -> str:
    return str(distribution.locate_file(""))


def cuda_libraries(host: Host, target: Target) -> list[Finding]:
    """Two majors side by side, and files that both bring."""
    found = installed(host)
    majors: dict[int, list[str]] = {}
    for name, distribution in sorted(found.items()):
        if (major := cuda_major(name, distribution.version)) is not None:
            majors.setdefault(major, []).append(name)
    if not majors:
        return [skipped("no package here brings CUDA libraries")]
    if len(majors) == 1:
        ((major, names),) = majors.items()
        return [ok(f"all {len(names)} packages are for CUDA {major}")]
    return [_mixed(majors, found, host.pip)]


def cuda_major(name: str, version: str) -> int | None:
    """The CUDA major version that a distribution is for; None where neither its name nor its version says."""
    if match := _SUFFIX.search(name):
        return int(match[1])
    head = version.partition(".")[0]
    return int(head) if name in _TOOLKIT and head.isdigit() and int(head) > 10 else None


def _mixed(majors: Mapping[int, list[str]], found: Mapping[str, Distribution], pip: str) -> Finding:
    listed: tuple[str, ...] = ()
    for major, names in sorted(majors.items()):
        shown = [f"{name} {found[name].version}" for name in names]
        more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
        listed += (f"CUDA {major}: {', '.join(shown[:3])}{more}",)
    # Whose packages are the most is what the environment was made for.
    kept = max(majors, key=lambda major: (len(majors[major]), major))
    odd = sorted(name for major, names in majors.items() if major != kept for name in names)
    others = " or ".join(str(major) for major in sorted(majors) if major != kept)
    fix = f"{pip} uninstall -y {' '.join(odd)}      # if nothing that you use needs CUDA {others}"
    owner: dict[str, int] = {}  # major version of the distribution that lists a library as its own
    shared = sorted({
        str(path)
        for major, names in majors.items() for name in names for path in found[name].files or ()
        if ".so" in path.name and owner.setdefault(str(path), major) != major
    })  # fmt: skip
    if not shared:
        return Finding("warning", "two CUDA runtimes in one environment", listed, (fix,))
    again = f"{pip} install --force-reinstall --no-deps {' '.join(majors[kept])}"
    what = "packages of two CUDA versions have written the same files; what is loaded depends on their order"
    return Finding("problem", what, (*listed, *shared[:3]), (fix, again))


def installed(host: Host) -> Mapping[str, Distribution]:
    """Every distribution by its canonical name; the first folder wins, as it does for an import."""
    from importlib.metadata import distributions  # 30 ms, which checks before a run do not spend

    found: dict[str, Distribution] = {}
    for distribution in distributions(path=list(host.packages)):
        name = distribution.metadata["Name"]
        if name:  # a folder that a broken installation left behind has no metadata
            found.setdefault(canonical(name), distribution)
    return found


def interpreter(host: Host, target: Target) -> list[Finding]:
    """What is odd, else its version and path."""
    python, executable = host.facts.python, host.facts.executable
    found = [*_reach(host), *_environment(host), *_twice(host)]
    if not at_least(python, OLDEST):
        what = f"Python {python}; trainkit requires {OLDEST} or newer"
        found.insert(0, Finding("problem", what, (executable,), ("uv venv -p 3.12",)))
    return found or [ok(f"Python {python}", executable)]


def _reach(host: Host) -> Iterator[Finding]:
    """A checkout is imported because it is the working folder; ranks do not look there (python -P)."""
    own = os.path.realpath(Path(__file__).parents[3])
    if own == os.path.realpath(host.folder) and own not in map(os.path.realpath, host.packages):
        quoted = shlex.quote(own)
        evidence = (f"trainkit is in {own}, the working folder, and not on the search path",)
        install = f"{host.pip} install -e {quoted}      # or for good"
        fix = (f"export PYTHONPATH={quoted}${{PYTHONPATH:+:$PYTHONPATH}}", install)
        yield Finding("problem", "the ranks of a run could not import trainkit", evidence, fix)


def _environment(host: Host) -> Iterator[Finding]:
    """A shell says that one environment is active, and this is another: `pip install` would not reach this one."""
    # A venv inside a conda environment sets both variables, and the venv is the active one.
    name = "VIRTUAL_ENV" if host.environ.get("VIRTUAL_ENV") else "CONDA_PREFIX"
    executable, active = Path(host.facts.executable), host.environ.get(name)
    if active and Path(active) not in executable.parents:
        evidence = (f"{name}={active}", f"this interpreter: {executable}")
        fix = (f"{shlex.quote(str(Path(active, 'bin', 'python')))} -m trainkit doctor",)
        yield Finding("note", "another environment is active than the one that trainkit runs in", evidence, fix)


def _twice(host: Host) -> Iterator[Finding]:
    places: dict[str, list[tuple[str, str]]] = {}
    for folder in dict.fromkeys(host.packages):
        for name, version in sorted(distributions(folder)):
            if name in host.facts.packages:
                places.setdefault(name, []).append((version, folder))
    for name, found in places.items():
        if len({version for version, _ in found}) == 1:
            continue
        evidence = tuple(f"{version} in {folder}" for version, folder in found)
        if len({folder for _, folder in found}) == 1:
            what = f"{name} is there in two versions; one was left behind by an installation that broke off"
            again = install(host.facts.executable, "--force-reinstall", name)
            yield Finding("warning", what, evidence, (again,))
        else:  # environments on top of others are made so on purpose
            what = f"{name} is there in two versions; the first one is imported"
            yield Finding("note", what, evidence, (f"unset PYTHONPATH      # or remove {name} from {found[0][1]}",))
