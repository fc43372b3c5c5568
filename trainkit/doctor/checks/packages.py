"""Whether the versions of the packages that training uses fit together, by what each of them says it requires."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from trainkit.doctor.check import Check, Finding, ok, skipped
from trainkit.doctor.host import Host, Target
from trainkit.doctor.installed import canonical, installed
from trainkit.machine.versions import at_least
from trainkit.optimizers import OPTIMIZERS
from trainkit.planner.requirements import REQUIREMENTS

if TYPE_CHECKING:
    from importlib.metadata import Distribution

    from packaging.requirements import Requirement

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


def run(host: Host, target: Target) -> list[Finding]:
    """A finding for each requirement that is not met, else one that all fit."""
    try:
        import packaging.requirements  # noqa: F401 - comes with torch's companions, not with trainkit
    except ImportError:
        return [skipped("the package `packaging` is not installed, which compares versions: pip install packaging")]
    found = installed(host.packages)
    left_out = unused(target)
    driven = [name for name in DRIVEN if name in found and name not in left_out]
    pip = host.pip
    findings = [
        *_missing(found, pip, target),
        *_too_old({name: each for name, each in found.items() if name not in left_out}, pip),
        *(each for name in driven for each in _unmet(name, found, pip)),
        *_pynvml(found, pip),
    ]
    return findings or [ok(f"{len(driven)} packages that training uses fit together", _versions(driven, found))]


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


def _missing(found: Mapping[str, Distribution], pip: str, target: Target) -> Iterator[Finding]:
    """With a recipe, the plan says what is missing."""
    if target.anything and "torch" not in found:
        what = "torch is not installed: recipes can be checked and planned, and none can be run"
        yield Finding("warning", what, (), (f"{pip} install 'trainkit[train]'",))


def _versions(names: list[str], found: Mapping[str, Distribution]) -> str:
    return ", ".join(f"{name} {found[name].version}" for name in names)


def _too_old(found: Mapping[str, Distribution], pip: str) -> Iterator[Finding]:
    """What trainkit itself asks of a package that is there."""
    for requirement in {each.package: each for each in REQUIREMENTS}.values():
        distribution = found.get(requirement.package)
        if distribution is not None and not at_least(distribution.version, requirement.minimum):
            what = f"{requirement.package} {distribution.version} is too old: trainkit needs {requirement.minimum}"
            fix = f"{pip} install -U '{requirement.package}>={requirement.minimum}'"
            yield Finding("problem", what, (_place(distribution),), (fix,))


def _unmet(name: str, found: Mapping[str, Distribution], pip: str) -> Iterator[Finding]:
    """As `pip check` would say it: requirements of the bare package, on this system."""
    from packaging.requirements import InvalidRequirement, Requirement

    for text in found[name].requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:  # an older way of writing; pip skips it too
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        yield from _judged(name, requirement, found, pip)


def _judged(name: str, requirement: Requirement, found: Mapping[str, Distribution], pip: str) -> Iterator[Finding]:
    owner = f"{name} {found[name].version}"
    wanted = f"{requirement.name}{requirement.specifier}"
    other = found.get(canonical(requirement.name))
    if other is None:
        yield Finding(
            "problem",
            f"{owner} needs {wanted}, which is not installed",
            (_place(found[name]),),
            (f"{pip} install '{wanted}'",),
        )
    elif not requirement.specifier.contains(other.version, prereleases=True):
        what = f"{owner} needs {wanted}, and {other.version} is installed"
        fix = f"{pip} install '{name}' '{wanted}'      # one resolver run, so that both fit"
        yield Finding("problem", what, (_place(other),), (fix,))


def _pynvml(found: Mapping[str, Distribution], pip: str) -> Iterator[Finding]:
    """https://pypi.org/project/pynvml/ says itself that nvidia-ml-py replaces it; both bring a module of that name."""
    if (old := found.get("pynvml")) is not None:
        evidence = (f"pynvml {old.version}: {_place(old)}",)
        fix = f"{pip} uninstall -y pynvml && {pip} install --force-reinstall --no-deps nvidia-ml-py"
        yield Finding(
            "warning", "the package pynvml is out of use; nvidia-ml-py brings the module pynvml", evidence, (fix,)
        )


def _place(distribution: Distribution) -> str:
    return str(distribution.locate_file(""))


PACKAGES = Check("packages", "packages", 8.0, run)
