"""Where the time of a step goes: some steps under torch.profiler, by group of operators, forward and backward apart."""

from __future__ import annotations

import logging
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from trainkit.recipe.schema import Profile as ProfileSettings
from trainkit.trainer.distributed import wait_for

log = logging.getLogger("trainkit.trainer")
MARK = "trainkit: "  # before the name of a phase, in the trace too
REST = "rest"  # the update, evaluation between steps, and what else is neither forward nor backward
PHASES = ("forward", "backward", REST)
_STEP = "ProfilerStep"
_QUIET = "6"  # Kineto announces its beginning and end on standard error up to level 5


class Profiler:
    """Profiles the steps that the recipe names, on the reporting rank. It does not affect losses."""

    def __init__(self, settings: ProfileSettings, folder: Path, device: torch.device, *, main: bool) -> None:
        self._settings, self._device = settings, device
        self._trace = folder / "profile" / "trace.json.gz"
        self._profile: Any = None
        self._done = 0  # steps since the beginning
        self._wanted = main and settings.steps > 0
        self.report: dict[str, Any] | None = None

    def begin(self) -> None:
        """Before the first step."""
        if not self._wanted:
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        after, steps = self._settings.after, self._settings.steps
        # The step before the first watched one starts the profiler up, which takes its time.
        plan = schedule(skip_first=after - 1, wait=0, warmup=1, active=steps, repeat=1)
        self._profile = profile(activities=activities, schedule=plan, on_trace_ready=self._take)
        self._profile.start()

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Context of a forward or a backward pass."""
        return nullcontext() if self._profile is None else record_function(f"{MARK}{name}")

    def step_done(self) -> None:
        """After each optimizer step."""
        self._done += 1
        if self._profile is not None:
            # The host runs ahead of a GPU. At both ends it waits, so that the watched seconds are those of the work
            # that was launched in them; in between it does not, for that would change what is watched.
            if self._done in (self._settings.after, self._settings.after + self._settings.steps):
                wait_for(self._device)
            self._profile.step()
            if self.report is not None:  # all is seen: no more steps pay for it
                self._profile.stop()
                self._profile = None

    def finish(self) -> None:
        """After the last step. Fewer steps than were asked for are reported all the same, with a warning."""
        if self._profile is not None:
            wait_for(self._device)
            self._profile.stop()
        seen = self.report["steps"] if self.report else 0
        if self._wanted and seen < self._settings.steps:
            log.warning(
                "warning: %d of %d steps were profiled: the run ended before; train.steps must be profile.after + "
                "profile.steps or more",
                seen,
                self._settings.steps,
            )

    def _take(self, watched: Any) -> None:
        events = [event for event in watched.events() if event.device_type.name == "CPU"]
        steps = sorted((each.time_range.start, each.time_range.end) for each in events if each.name.startswith(_STEP))
        del steps[max(0, self._done - self._settings.after) :]  # one that began when the last was over
        if not steps:
            return
        events = [event for event in events if event.time_range.start < steps[-1][1]]
        self.report = {
            "steps": len(steps),
            "seconds": round(sum(end - start for start, end in steps) / 1e6, 6),
            "operators": seconds_by_group(events, on_device=self._device.type == "cuda"),
            "trace": str(self._trace),  # for chrome://tracing or Perfetto
        }
        try:
            self._trace.parent.mkdir(exist_ok=True)
            watched.export_chrome_trace(str(self._trace))
        except (OSError, RuntimeError) as error:  # a full disk costs the file, not the run
            log.warning("%s cannot be written: %s", self._trace, error)
            self.report["trace"] = None


def seconds_by_group(events: Iterable[Any], *, on_device: bool) -> dict[str, dict[str, float]]:
    """Seconds of all operators, by phase and group, over all watched steps. on_device: of the kernels they started."""
    every = list(events)
    marks = sorted(
        (event.time_range.start, event.time_range.end, event.name.removeprefix(MARK))
        for event in every
        if event.name.startswith(MARK)
    )
    starts = [start for start, _, _ in marks]
    totals = {phase: dict.fromkeys(GROUPS, 0.0) for phase in PHASES}
    for event in every:
        if event.is_user_annotation:  # a phase or a step, not an operator
            continue
        place = bisect_right(starts, event.time_range.start) - 1
        inside = place >= 0 and event.time_range.start < marks[place][1]
        # An operator counts without those that it calls, so that the sum is the whole.
        spent = event.self_device_time_total if on_device else event.self_cpu_time_total
        totals[marks[place][2] if inside else REST][group_of(event.name)] += spent / 1e6
    return {phase: {group: round(spent, 9) for group, spent in row.items()} for phase, row in totals.items()}


Group = Literal["contractions", "normalizations", "element-wise", "other"]
GROUPS: tuple[Group, ...] = ("contractions", "normalizations", "element-wise", "other")


# Names of torch's operators, without `aten::`, underscores at either end, `_foreach` and `_backward…`.
_NAMES: Mapping[Group, str] = {
    "contractions": """
        addbmm addmm addmv addr baddbmm bmm conv1d conv2d conv3d convolution dot einsum linear matmul mkldnn_convolution
        mkldnn_linear mkldnn_rnn_layer mm mv tensordot vdot int_mm scaled_mm grouped_mm scaled_grouped_mm
        scaled_dot_product_attention scaled_dot_product_attention_math scaled_dot_product_flash_attention
        scaled_dot_product_flash_attention_for_cpu scaled_dot_product_efficient_attention
        scaled_dot_product_cudnn_attention scaled_dot_product_fused_attention_overrideable flash_attention_forward
        flash_attention efficient_attention_forward efficient_attention cudnn_attention_forward thnn_fused_lstm_cell
        cudnn_convolution slow_conv2d_forward flex_attention
        """,
    "normalizations": """
        batch_norm cudnn_batch_norm fused_rms_norm group_norm layer_norm log_softmax logsumexp native_batch_norm
        native_group_norm native_layer_norm rms_norm safe_softmax softmax std_mean var_mean masked_softmax
        """,
    "element-wise": """
        abs add addcdiv addcmul bernoulli bitwise_and bitwise_not bitwise_or ceil clamp clamp_max clamp_min clip cos
        div dropout elu eq erf exp exp2 expm1 feature_dropout floor fused_adam fused_adamw fused_adagrad fused_sgd
        fused_dropout ge gelu glu gt hardtanh isfinite isnan le leaky_relu lerp log log1p logical_and logical_not
        logical_or lt masked_fill masked_scale maximum minimum mul native_dropout ne neg pow reciprocal relu rsqrt rsub
        sigmoid sign silu sin softplus sqrt square sub tanh threshold where xlogy
        """,
}
NAMES = {group: frozenset(names.split()) for group, names in _NAMES.items()}
# Kernels that torch.compile makes: inductor names them by what they are.
KERNELS: Mapping[str, Group] = {
    "triton_tem_": "contractions",
    "triton_mm_": "contractions",
    "triton_per_": "normalizations",
    "triton_red_": "normalizations",
    "triton_poi_": "element-wise",
}
_BARE = re.compile(r"^(?:aten::)?_*(?:foreach_)?(?P<bare>\w+?)(?:_backward(?:_\w+)?)?_*$")


def group_of(name: str) -> Group:
    """The group of an operator, by the name that the profiler gives it."""
    for prefix, group in KERNELS.items():
        if name.startswith(prefix):
            return group
    bare = _BARE.match(name)
    found = (group for group, names in NAMES.items() if bare and bare["bare"] in names)
    return next(found, "other")
