"""Installed packages: whether what they require is met, and whether they bring CUDA libraries of one version only."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from trainkit.doctor.check import Check, Finding, ok, skipped, without_cuda
from trainkit.doctor.host import Host, Target
from trainkit.machine.versions import at_least
from trainkit.optimizers import OPTIMIZERS
from trainkit.planner.requirements import all_requirements

if TYPE_CHECKING:
    from importlib.metadata import Distribution


# Those whose requirements are looked at; what they require may be anything.
DRIVEN = (
    "torch", "torchvision", "torchaudio", "triton", "accelerate", "deepspeed", "transformers", "tokenizers",
    "huggingface-hub", "safetensors", "peft", "datasets", "bitsandbytes", "torch-optimi", "flash-attn", "xformers",
    "trl", "lightning", "pytorch-lightning", "torchmetrics", "numpy", "nvidia-ml-py", "tensorboard", "wandb",
    "trainkit",
)  # fmt: skip

# The built-in trainer imports these for some choices only; a program of the user's own may import anything.
HUGGING_FACE = frozenset({"accelerate", "transformers", "tokenizers", "huggingface-hub", "peft", "datasets"})
OTHERS = frozenset({"torchvision", "torchaudio", "xformers", "trl", "lightning", "pytorch-lightning", "torchmetrics"})
PLAIN_DATA = frozenset({"text", "random", "tokens"})

_FOLDER = re.compile(r"^(?P<name>[^-]+)-(?P<version>[^-]+)(?:-[^-]+)*\.(?:dist|egg)-info$")
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
        return [skipped("the package `packaging` is not installed, which compares versions: pip install packaging")]
    found = installed(host.packages)
    left_out = unused(target)
    driven = [name for name in DRIVEN if name in found and name not in left_out]
    pip, findings = host.pip, []
    if target.anything and "torch" not in found:  # with a recipe, the plan says what is missing
        what = "torch is not installed: recipes can be checked and planned, and none can be run"
        findings.append(Finding("warning", what, (), (f"{pip} install 'trainkit[train]'",)))
    findings += [
        *_too_old({name: each for name, each in found.items() if name not in left_out}, pip),
        *(each for name in driven for each in _unmet(name, found, pip)),
        *_pynvml(found, pip),
    ]
    versions = ", ".join(f"{name} {found[name].version}" for name in driven)
    return findings or [ok(f"{len(driven)} packages that training uses fit together", versions)]


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
        "wandb": "wandb" in recipe.logging.report_to,
    }
    not_chosen = {name for name, used in chosen.items() if not used}
    if plain:
        return OTHERS | not_chosen | (HUGGING_FACE - chosen.keys())
    return OTHERS | (not_chosen - HUGGING_FACE)


def _too_old(found: Mapping[str, Distribution], pip: str) -> Iterator[Finding]:
    """What trainkit itself asks of a package that is there."""
    for requirement in {each.package: each for each in all_requirements()}.values():
        distribution = found.get(requirement.package)
        if distribution is not None and not at_least(distribution.version, requirement.minimum):
            what = f"{requirement.package} {distribution.version} is too old: trainkit requires {requirement.minimum}"
            fix = f"{pip} install -U '{requirement.package}>={requirement.minimum}'"
            yield Finding("problem", what, (_place(distribution),), (fix,))


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
            fix = fix.replace("install", f"install '{name}'") + "      # one resolver run, so that both fit"
            yield Finding("problem", f"{what}, and {other.version} is installed", (_place(other),), (fix,))


def _pynvml(found: Mapping[str, Distribution], pip: str) -> Iterator[Finding]:
    """https://pypi.org/project/pynvml/ says itself that nvidia-ml-py replaces it; both bring a module of that name."""
    if (old := found.get("pynvml")) is not None:
        evidence = (f"pynvml {old.version}: {_place(old)}",)
        fix = f"{pip} uninstall -y pynvml && {pip} install --force-reinstall --no-deps nvidia-ml-py"
        what = "the package pynvml is obsolete; nvidia-ml-py brings the module pynvml"
        yield Finding("warning", what, evidence, (fix,))


def _place(distribution: Distribution) -> str:
    return str(distribution.locate_file(""))


def cuda_libraries(host: Host, target: Target) -> list[Finding]:
    """Two majors side by side, and files that both bring."""
    found = installed(host.packages)
    majors: dict[int, list[str]] = {}
    for name, distribution in found.items():
        if (major := cuda_major(name, distribution.version)) is not None:
            majors.setdefault(major, []).append(name)
    if not majors:
        return [skipped("no package here brings CUDA libraries")]
    if len(majors) == 1:
        ((major, names),) = majors.items()
        return [ok(f"all {len(names)} packages are for CUDA {major}")]
    return list(_mixed(majors, found, host.pip))


def cuda_major(name: str, version: str) -> int | None:
    """The CUDA major version that a distribution is for; None where neither its name nor its version says."""
    if match := _SUFFIX.search(name):
        return int(match[1])
    if name in _TOOLKIT:
        head = version.split(".", maxsplit=1)[0]
        return int(head) if head.isdigit() and int(head) > 10 else None
    return None


def _mixed(majors: Mapping[int, list[str]], found: Mapping[str, Distribution], pip: str) -> Iterator[Finding]:
    listed: tuple[str, ...] = ()
    for major, names in sorted(majors.items()):
        shown = [f"{name} {found[name].version}" for name in sorted(names)]
        more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
        listed += (f"CUDA {major}: {', '.join(shown[:3])}{more}",)
    kept = max(majors, key=lambda major: (len(majors[major]), major))
    odd = sorted(name for major, names in majors.items() if major != kept for name in names)
    others = " or ".join(str(major) for major in sorted(majors) if major != kept)
    fix = f"{pip} uninstall -y {' '.join(odd)}      # if nothing that you use needs CUDA {others}"
    shared = _shared_files(majors, found)
    if shared:
        again = f"{pip} install --force-reinstall --no-deps {' '.join(sorted(majors[kept]))}"
        what = "packages of two CUDA versions have written the same files; what is loaded depends on their order"
        yield Finding("problem", what, listed + shared[:3], (fix, again))
    else:
        yield Finding("warning", "two CUDA runtimes in one environment", listed, (fix,))


def _shared_files(majors: Mapping[int, list[str]], found: Mapping[str, Distribution]) -> tuple[str, ...]:
    """Libraries that distributions of different majors list as theirs."""
    owner: dict[str, int] = {}
    shared = []
    for major, names in majors.items():
        for name in names:
            for path in found[name].files or ():
                text = str(path)
                if ".so" in path.name and owner.setdefault(text, major) != major:
                    shared.append(text)
    return tuple(sorted(set(shared)))


def canonical(name: str) -> str:
    """The form in which names of distributions are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def every_version(folders: Iterable[str], names: Collection[str]) -> Mapping[str, list[tuple[str, str]]]:
    """(version, folder) of each place with a distribution of these names, in the order of the folders."""
    found: dict[str, list[tuple[str, str]]] = {}
    for folder in dict.fromkeys(folders):
        try:
            entries = sorted(os.listdir(folder))  # noqa: PTH208 - names are all that is needed
        except OSError:  # zip files and folders that are gone may be on sys.path
            continue
        for entry in entries:
            match = _FOLDER.match(entry)
            if match and (name := canonical(match["name"])) in names:
                found.setdefault(name, []).append((match["version"], folder))
    return found


def installed(folders: Iterable[str]) -> Mapping[str, Distribution]:
    """Every distribution by its canonical name; the first folder wins, as it does for an import."""
    from importlib.metadata import distributions  # 30 ms, which checks before a run do not spend

    found: dict[str, Distribution] = {}
    for distribution in distributions(path=list(folders)):
        name = distribution.metadata["Name"]
        if name:  # a folder that a broken installation left behind has no metadata
            found.setdefault(canonical(name), distribution)
    return found


PACKAGES = Check("packages", "packages", 8.0, packages)
CUDA_LIBRARIES = Check("cuda-libraries", "CUDA libraries", 6.0, cuda_libraries, without_cuda)
