"""The parts of an update: optimizers, learning rates, clipping, and number formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainkit.errors import TrainingError
from trainkit.optimizers import is_hidden_matrix, optimizer
from trainkit.recipe.schema import Optimizer, Schedule
from trainkit.trainer.parallel import STRATEGIES
from trainkit.trainer.settings import Settings
from trainkit.trainer.user_code import imported

Groups = list[dict[str, Any]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
IMPLEMENTATIONS = {"fused", "foreach", "triton"}  # arguments of which one excludes the others


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> Groups:
    """Weight decay applies to matrices; not to biases, norms and other one-dimensional parameters."""
    # Weight decay would shrink the gains of norms, which does not regularise.
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    decayed = [parameter for parameter in trainable if parameter.dim() >= 2]
    others = [parameter for parameter in trainable if parameter.dim() < 2]
    groups: Groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """The weights of linear layers inside blocks."""
    embeddings = {each.weight for each in model.modules() if isinstance(each, nn.Embedding)}
    return {
        each
        for name, each in model.named_parameters()
        if is_hidden_matrix(name, each.dim(), embedding=each in embeddings)
    }


def _by_matrix(groups: Groups, hidden: Set[nn.Parameter]) -> Groups:
    """Each group in two: those of its parameters that are matrices of blocks, and the others."""
    split = [
        {**group, "params": [each for each in group["params"] if (each in hidden) is matrices], "matrices": matrices}
        for group in groups
        for matrices in (True, False)
    ]
    return [group for group in split if group["params"]]


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """The optimizer that the recipe names. TrainingError when it cannot be imported or refuses what it is given."""
    groups = parameter_groups(model.parameters(), settings.weight_decay)
    if optimizer(settings.name).by_matrix:
        groups = _by_matrix(groups, hidden_matrices(model))
    make, arguments = optimizer_class(settings)
    parameters = [parameter for group in groups for parameter in group["params"]]
    devices = {parameter.device.type for parameter in parameters}
    if len(devices) == 1 and not IMPLEMENTATIONS & settings.args.keys():
        arguments |= optimizer(settings.name).fixed_on.get(devices.pop(), {})  # of offloaded shards the CPU's
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            arguments |= optimizer(settings.name).fixed_sharded
    if optimizer(settings.name).embeddings_in_32_bit:
        # Rarely hit and unevenly, so that 8-bit state is unstable for them (bitsandbytes' documentation).
        for module in [each for each in model.modules() if isinstance(each, nn.Embedding)]:
            _bitsandbytes_manager().register_module_override(module, "weight", {"optim_bits": 32})
    try:
        made: torch.optim.Optimizer = make(groups, lr=settings.lr, **arguments, **settings.args)
    except (TypeError, ValueError, RuntimeError) as error:
        message = f"optimizer {settings.name} does not take what the recipe gives it: {error}"
        raise TrainingError(message, hint="see optimizer.args") from error
    return made


def optimizer_class(settings: Optimizer) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The optimizer's class, and the arguments that follow from the recipe's settings."""
    known = optimizer(settings.name)
    arguments: dict[str, Any] = {
        name: tuple(getattr(settings, each) for each in keys) if isinstance(keys, tuple) else getattr(settings, keys)
        for name, keys in known.arguments.items()
    }
    return imported(known.path, "optimizer.name"), arguments | dict(known.fixed)


def forget_embeddings() -> None:
    """Release the models whose embeddings are kept in 32 bits: bitsandbytes would hold them for ever."""
    _bitsandbytes_manager().initialize()


def _bitsandbytes_manager() -> Any:
    return imported("bitsandbytes.optim:GlobalOptimManager", "optimizer.name").get_instance()  # type: ignore[attr-defined]


# Share of the decay phase gone, 0 to 1 -> share of the way from minimum to peak
SHAPES: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda gone: 0.5 * (1.0 + math.cos(math.pi * gone)),
    "linear": lambda gone: 1.0 - gone,
    "constant": lambda gone: 1.0,
    "constant_with_warmup": lambda gone: 1.0,
    "sqrt": lambda gone: 1.0 - math.sqrt(gone),  # of wsd's decay: Hägele et al. 2024 (arXiv:2405.18392), equation 1
}


def learning_rate(optimizer: Optimizer, schedule: Schedule, steps: int) -> Callable[[int], float]:
    """The learning rate for each step, counted from 0; it reaches peak x `min_lr_ratio` at the last one.

    With `from_zero` behind it, as of transformers (optimization.py: get_cosine_schedule_with_warmup and its like).
    """
    warmup = 0 if schedule.name == "constant" else _in_steps(schedule.warmup_steps, steps)
    peak, lowest = optimizer.lr, optimizer.lr * schedule.min_lr_ratio
    ahead = 0 if schedule.from_zero else 1
    if schedule.name == "wsd":
        return _warmup_stable_decay(peak, lowest, schedule, warmup, steps)
    decay_steps, shape = max(1, steps - ahead - warmup), SHAPES[schedule.name]

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + ahead) / (warmup + ahead)  # ahead: never 0, which would waste a step
        return lowest + (peak - lowest) * shape(min(1.0, (step - warmup) / decay_steps))

    return rate


def _warmup_stable_decay(
    peak: float, lowest: float, schedule: Schedule, warmup: int, steps: int
) -> Callable[[int], float]:
    """Rates of `wsd`: a line up, the peak, and `decay_steps` down (MiniCPM, arXiv:2404.06395, section 4.2).

    A run too short for both decays in the steps behind its warm-up.
    """
    ahead, shape = (0 if schedule.from_zero else 1), SHAPES[schedule.decay_type]
    decay_steps = max(1, min(_in_steps(schedule.decay_steps, steps), steps - warmup))
    start = lowest if schedule.from_zero else 0.0  # where transformers begins (optimization.py: get_wsd_schedule)
    stable_until = max(warmup, steps - decay_steps)

    def rate(step: int) -> float:
        if step < warmup:
            return start + (peak - start) * (step + ahead) / (warmup + ahead)
        if step < stable_until:
            return peak
        return lowest + (peak - lowest) * shape(min(1.0, (step + ahead - stable_until) / decay_steps))

    return rate


def _in_steps(length: float, steps: int) -> int:
    return math.ceil(steps * length) if 0 < length < 1 else int(length)


def clip_gradients(divided: Sequence[tuple[Sequence[nn.Parameter], Any]], max_norm: float | None) -> Tensor:
    """Scale the gradients in place, so that their norm is at most `max_norm`; without one they stay as they are.

    divided: parameters, each with the process group whose ranks have parts of them that no DTensor knows of, or None.
    Returns the norm before (Pascanu et al. 2013, algorithm 1). Loss scaling must be undone before.
    """
    # Computed even without clipping: the metrics line shows the norm, and non-finite gradients end the run.
    norms = []
    for parameters, group in divided:
        norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
        # Of sharded gradients (FSDP2) each rank has a share of the sum of squares; this is where they are added up.
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if group is not None:
            torch.distributed.all_reduce(squares := norm.square(), group=group)
            norm = squares.sqrt()
        norms.append(norm)
    whole = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
    if max_norm:
        for parameters, _ in divided:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, whole)
    return whole


def autocast(settings: Settings, dtype: str, device: torch.device) -> AbstractContextManager[object]:
    """Context of one forward pass: fp32 weights stay, matrix products run in `dtype`."""
    recipe = settings.recipe
    # A strategy that casts (FSDP, ZeRO) has 16-bit weights inside, so that autocast would only cast once more.
    if dtype == "fp32" or STRATEGIES[recipe.strategy.kind].casts or recipe.precision.weights != "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[dtype])


@contextmanager
def cached_casts() -> Iterator[None]:
    """In this context autocast keeps the 16-bit copies of the weights from one forward pass to the next.

    For passes between which the weights do not change: the micro steps of one step.
    """
    # torch forgets them when the outermost autocast ends, and this is around it. It is none itself, for backward, which
    # is inside, computes in the formats of forward by itself (torch.amp: no autocast around backward).
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


class SkippedSteps:
    """Counts updates that fp16 loss scaling skips: a few at the start are normal, an unbroken series is fatal."""

    PATIENCE = 24  # the scale starts at 2**16 and each skip halves it: by then it is below what any sound loss needs

    def __init__(self) -> None:
        self._step = self._total = self._in_a_row = 0

    def note(self, step: int, total: int) -> None:
        """Record the skips up to a step. TrainingError if all of the latest steps were skipped."""
        fresh, steps = total - self._total, step - self._step
        self._in_a_row = self._in_a_row + fresh if fresh == steps else 0
        self._step, self._total = step, total
        if self._in_a_row >= self.PATIENCE:
            raise TrainingError(
                f"fp16 has skipped the {self._in_a_row} steps up to step {step}: loss or gradients are not finite "
                "at any scale",
                hint="set precision to bf16, which has the range of fp32, or to fp32",
            )


def set_tf32(enabled: bool | None) -> None:
    """TensorFloat-32 for matrix products and convolutions on CUDA; None leaves PyTorch's defaults."""
    # By default convolutions use it and matrix products do not (torch 1.12 and later).
    if enabled is not None:
        torch.backends.cuda.matmul.allow_tf32 = enabled
        torch.backends.cudnn.allow_tf32 = enabled
