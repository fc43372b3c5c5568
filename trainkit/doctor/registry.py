"""All checks, in the order in which they are shown. Adding one takes its module in `checks/` and its name here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainkit.doctor.check import Check, Finding, Host, Target, ok, skipped
from trainkit.doctor.checks.build_tools import BUILD_TOOLS, DEEPSPEED_OPS
from trainkit.doctor.checks.collectives import COLLECTIVES
from trainkit.doctor.checks.cuda_toolkits import TOOLKIT_VERSION, TOOLKITS
from trainkit.doctor.checks.disk import DISK_SPACE, WRITE_SPEED
from trainkit.doctor.checks.gpus import DRIVER, GPU_HEALTH
from trainkit.doctor.checks.host_compiler import HOST_COMPILER
from trainkit.doctor.checks.limits import PROCESS_LIMITS, SHARED_MEMORY
from trainkit.doctor.checks.network import HOST_NAMES, PORTS
from trainkit.doctor.checks.packages import CUDA_LIBRARIES, INTERPRETER, PACKAGES
from trainkit.doctor.checks.stale_settings import STALE_SETTINGS


def plan_blockers(host: Host, target: Target) -> Iterator[Finding]:
    """What the plan itself finds missing on this machine: cards, packages, whatever stops `trainkit run`."""
    if target.plan is None:
        yield skipped("no recipe is named")
        return
    for notice in target.plan.blockers:
        yield Finding("problem", notice.what, (), (notice.hint,) if notice.hint else ())
    if not target.plan.blockers:
        yield ok("this machine can run it, as far as the plan can tell")


PLAN_BLOCKERS = Check("plan", "plan", 1.0, plan_blockers)  # not fast: `trainkit run` shows the blockers itself
_ORDER = (
    PLAN_BLOCKERS, INTERPRETER, PACKAGES, CUDA_LIBRARIES, DRIVER, GPU_HEALTH, TOOLKITS, TOOLKIT_VERSION, HOST_COMPILER,
    BUILD_TOOLS, DEEPSPEED_OPS, COLLECTIVES, SHARED_MEMORY, PROCESS_LIMITS, DISK_SPACE, WRITE_SPEED, PORTS, HOST_NAMES,
    STALE_SETTINGS,
)  # fmt: skip
CHECKS: Mapping[str, Check] = {check.name: check for check in _ORDER}
FAST: tuple[Check, ...] = tuple(check for check in _ORDER if check.fast)


def checks_for(target: Target) -> tuple[Check, ...]:
    """All of them; that of the plan only where there is one."""
    return _ORDER if target.plan else tuple(check for check in _ORDER if check is not PLAN_BLOCKERS)
