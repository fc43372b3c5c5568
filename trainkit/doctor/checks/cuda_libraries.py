"""Whether the packages of this environment bring CUDA libraries of more than one major version."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from trainkit.doctor.check import Check, Finding, ok, skipped, without_cuda
from trainkit.doctor.host import Host, Target
from trainkit.doctor.installed import installed

if TYPE_CHECKING:
    from importlib.metadata import Distribution

# `nvidia-cublas-cu12`, `cupy-cuda12x`, `jax-cuda12-plugin`; since CUDA 13 NVIDIA's own wheels carry no suffix.
_SUFFIX = re.compile(r"-cu(?:da)?(\d\d)(?:\d*x?)?(?:-|$)")
_TOOLKIT = frozenset(
    f"nvidia-{part}"
    for part in (
        "cublas", "cuda-cupti", "cuda-nvcc", "cuda-nvrtc", "cuda-runtime", "cuda-crt", "nvvm", "nvjitlink", "nvtx",
    )
)  # fmt: skip


def run(host: Host, target: Target) -> list[Finding]:
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
    """The CUDA major version that a distribution is for; None where it says nothing of the kind."""
    if match := _SUFFIX.search(name):
        return int(match[1])
    if name in _TOOLKIT:
        head = version.split(".", maxsplit=1)[0]
        return int(head) if head.isdigit() and int(head) > 10 else None
    return None


def _mixed(majors: Mapping[int, list[str]], found: Mapping[str, Distribution], pip: str) -> Iterator[Finding]:
    listed = tuple(f"CUDA {major}: {_named(names, found)}" for major, names in sorted(majors.items()))
    kept = max(majors, key=lambda major: (len(majors[major]), major))
    odd = sorted(name for major, names in majors.items() if major != kept for name in names)
    fix = f"{pip} uninstall -y {' '.join(odd)}      # if nothing that you use needs CUDA {_others(majors, kept)}"
    shared = _shared_files(majors, found)
    if shared:
        again = f"{pip} install --force-reinstall --no-deps {' '.join(sorted(majors[kept]))}"
        what = "packages of two CUDA versions have written the same files; what is loaded depends on their order"
        yield Finding("problem", what, listed + shared[:3], (fix, again))
    else:
        yield Finding("warning", "two CUDA runtimes in one environment", listed, (fix,))


def _named(names: list[str], found: Mapping[str, Distribution]) -> str:
    shown = [f"{name} {found[name].version}" for name in sorted(names)]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _others(majors: Mapping[int, list[str]], kept: int) -> str:
    return " or ".join(str(major) for major in sorted(majors) if major != kept)


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


CUDA_LIBRARIES = Check("cuda-libraries", "CUDA libraries", 6.0, run, without_cuda)
