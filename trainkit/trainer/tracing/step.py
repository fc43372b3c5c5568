"""Trace a micro step of a recipe: its model and its techniques as a run builds them, on the meta device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainkit.errors import TrainingError, first_line
from trainkit.foresight.trace import COPIES, GRADIENTS, Kind, Module, Parameter, Trace, Wanted, Work
from trainkit.recipe.schema import Compile, Fsdp, HfModel, Recipe
from trainkit.tasks import CAUSAL, LABELLING, WRITING, task_of
from trainkit.trainer.data.source import Lengths, bound_of, sample_length
from trainkit.trainer.models.base import Model
from trainkit.trainer.models.quantized import is_quantized, scales
from trainkit.trainer.optim import DTYPES
from trainkit.trainer.parallel import STRATEGIES
from trainkit.trainer.tracing.meter import Meter
from trainkit.trainer.tracing.stand_in import StandIn

DEVIATIONS = 3  # standard ones above the mean: of a thousand batches about one has more hidden tokens


def traced(wanted: Wanted, standing_in: type[StandIn] = StandIn) -> Trace:
    """The trace of a micro step that finds no gradients, and of one that finds some. TrainingError as of a run."""
    from trainkit.trainer.setup import made_model

    recipe = Recipe.model_validate(wanted.recipe)
    plain = recipe.efficiency.model_copy(update={"compile": Compile()})
    recipe = recipe.model_copy(update={"efficiency": plain})
    kind, dtype = recipe.strategy.kind, DTYPES[wanted.dtype]
    casts = STRATEGIES[kind].casts
    lowers = not casts and wanted.dtype != "fp32" and recipe.precision.weights == "fp32"
    meter = Meter(wanted.device)
    stand_in = standing_in(wanted.device, wanted.capability, dtype if lowers else None, zero3=kind == "zero3")
    with stand_in:
        model = made_model(recipe, wanted.dtype, "meta").train()
    for block in model.blocks:  # backward, which recomputes it, leaves the mode
        checkpointed: Any = block.forward
        if getattr(checkpointed, "func", None) is checkpoint:
            forward, *more = checkpointed.args
            block.forward = partial(checkpoint, stand_in.again(forward), *more, **checkpointed.keywords)
    held = parameters_of(model)
    # The strategy keeps the weights, and hands the model copies in the format of the computation.
    if casts and (kind != "fsdp" or recipe.precision.weights == "fp32"):
        for each in model.parameters():
            if each.is_floating_point():
                each.data = each.data.to(dtype)
    stand_in.copied, stand_in.recomputing = partial(_note_copy, meter), partial(setattr, meter, "recomputing")
    tracer = Tracer(model, meter, zero3=kind == "zero3", units=_units(model, recipe))
    meter.exclude([*model.parameters(), *model.buffers(), *scales(model)])
    with stand_in, meter:
        model.expect(counted_at_most(recipe, wanted))
        first = _possible(tracer, recipe, wanted, stand_in)
        counted = Counter(meter.work)
        further = first if casts else tracer.micro_step(batch(recipe, wanted), stand_in)
        inputs = batch(recipe, wanted)
    buffers = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in model.buffers()}
    return Trace(
        parameters=held,
        modules=tracer.modules,
        buffers=sum(buffers.values()),
        batch=sum(each.numel() * each.element_size() for each in inputs.values()),
        sizes=tuple(meter.sizes),
        parts=tuple(meter.parts),
        operators=tuple(meter.operators),
        names=tuple(meter.names),
        gradients=tracer.gradients,
        first=first,
        further=further,
        work=_works(counted),
        recomputed=meter.recomputed / (1 if casts else 2),  # of both micro steps
    )


def _possible(tracer: Tracer, recipe: Recipe, wanted: Wanted, stand_in: StandIn) -> tuple[int, ...]:
    """The events of the first micro step. TrainingError where the model's code needs a device."""
    try:
        return tracer.micro_step(batch(recipe, wanted), stand_in)
    except TrainingError:
        raise
    except Exception as error:  # a model's own code raises anything
        raise TrainingError(
            f"the model's step cannot be traced without a device: {first_line(error)}",
            hint="a run itself says what memory it takes",
        ) from error


def _works(counted: Counter[tuple[float, float, str]]) -> tuple[Work, ...]:
    return tuple(Work(count, *key) for key, count in counted.items())


def _note_copy(meter: Meter, made: Tensor) -> None:
    if (number := meter.number(made)) is not None:
        meter.parts[number] = COPIES


def parameters_of(model: Model) -> tuple[Parameter, ...]:
    """The parameters as the run holds them: quantised ones packed, with the constants that give their values back."""
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    constants = {id(each.weight): sum(map(_bytes, scales(each))) for each in model.modules() if is_quantized(each)}
    found = []
    for name, each in model.named_parameters():
        state = getattr(each, "quant_state", None)
        shape, item = (
            (each.shape, each.element_size()) if state is None else (state.shape, each.numel() / state.shape.numel())
        )
        found.append(
            Parameter(name, tuple(shape), item, each.requires_grad, id(each) in tables, constants.get(id(each), 0))
        )
    return tuple(found)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _units(model: Model, recipe: Recipe) -> list[nn.Module]:
    """The units of sharding, in the order in which FSDP wraps them."""
    from trainkit.trainer.parallel.fsdp import WRAPPING

    asked = recipe.strategy
    return list(WRAPPING[asked.auto_wrap](model, asked)) if isinstance(asked, Fsdp) else list(model.blocks)


def batch(recipe: Recipe, wanted: Wanted) -> dict[str, Tensor]:
    """The inputs of a micro batch, at their longest, as the recipe's source of data gives them."""
    shape = (wanted.micro, sample_length(recipe))

    def ids(*sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=torch.int64, device="meta")

    task = task_of(recipe)
    if task == CAUSAL or not isinstance(recipe.model, HfModel):
        inputs = {"tokens": ids(*shape), "targets": ids(*shape)}
        return {**inputs, "position_ids": ids(*shape)} if wanted.packed else inputs
    target = Lengths.of(recipe.data).target if task == WRITING else shape[1]
    labels = ids(wanted.micro) if task == LABELLING else ids(wanted.micro, target)
    mask = {"attention_mask": ids(*shape)} if wanted.padded else {}
    return {"input_ids": ids(*shape), **mask, "labels": labels}


def counted_at_most(recipe: Recipe, wanted: Wanted) -> int | None:
    """The bound of a micro batch's counted targets as a run finds it, in a batch of many hidden tokens; else None."""
    model = recipe.model
    if not isinstance(model, HfModel) or model.task != "masked_lm":
        return None
    size, share = wanted.micro * sample_length(recipe), model.mask_share
    count = share * size + DEVIATIONS * math.sqrt(size * share * (1 - share))
    return bound_of(min(size, math.ceil(count)), size)


class Tracer:
    """Runs micro steps and marks where a strategy acts. gradients: storage -> parameter, by number.

    zero3: whether it acts at every module, and a module's own parameters are also those that it asks another one for,
    as an output layer that is tied (deepspeed/runtime/zero/parameter_offload.py: ZeROOrderedDict).
    """

    def __init__(self, model: Model, meter: Meter, *, zero3: bool, units: Sequence[nn.Module]) -> None:
        self.model, self.meter = model, meter
        self.gradients: dict[int, int] = {}
        self._numbers = {id(each): number for number, each in enumerate(model.parameters())}
        self._zero3 = zero3
        self._inside: list[int] = []  # modules whose forward goes on
        self._own: list[tuple[int, ...]] = []
        self._watched = self._watch(units)
        for number, each in enumerate(model.parameters()):
            if each.requires_grad:
                hook = partial(self._ready, number)
                each.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @property
    def modules(self) -> tuple[Module, ...]:
        return tuple(replace(each, own=own) for each, own in zip(self._watched, self._own, strict=True))

    def _watch(self, units: Sequence[nn.Module]) -> list[Module]:
        chosen, found = {id(each) for each in units}, list[Module]()
        for name, module in self.model.named_modules():
            unit = id(module) in chosen
            if not unit and not self._zero3:
                continue
            number = len(found)
            own = self._numbered(module.parameters(recurse=False))
            self._own.append(own)
            found.append(Module(name, own, self._numbered(module.parameters()), unit))
            module.register_forward_pre_hook(partial(self._enter, number), with_kwargs=True)
            module.register_forward_hook(partial(self._leave, number))
            if self._zero3:
                module._parameters = _Noticed(module._parameters, self._asked)
        return found

    def _asked(self, parameter: nn.Parameter) -> None:
        """A parameter that no module around has becomes one of the innermost's."""
        number = self._numbers.get(id(parameter))
        if number is not None and self._inside and not any(number in self._own[each] for each in self._inside):
            self._own[self._inside[-1]] += (number,)

    def _numbered(self, parameters: Iterable[nn.Parameter]) -> tuple[int, ...]:
        return tuple(self._numbers[id(each)] for each in parameters)

    def _enter(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.meter.mark(Kind.ENTER, number)
        self._inside.append(number)
        left = partial(self.meter.mark, Kind.AFTER, number)
        # DeepSpeed's hooks are not told of arguments by name
        return _through(_Marked, left, args), kwargs if self._zero3 else _through(_Marked, left, kwargs)

    def _leave(self, number: int, module: nn.Module, args: Any, output: Any) -> Any:
        self.meter.mark(Kind.LEAVE, number)
        if number in self._inside:
            del self._inside[self._inside.index(number) :]
        reached = partial(self.meter.mark, Kind.REACH, number)
        if self._zero3:
            return _through(_Marked, reached, output)
        _hooked(_Once(reached), output)  # as FSDP: what follows may change the output in place
        return output

    def _ready(self, number: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and (storage := self.meter.number(gradient)) is not None:
            self.gradients.setdefault(storage, number)
            self.meter.parts[storage] = GRADIENTS
        self.meter.mark(Kind.READY, number)

    def micro_step(self, inputs: Mapping[str, Tensor], stand_in: StandIn) -> tuple[int, ...]:
        """The events of a micro step; its gradients stay."""
        meter = self.meter
        meter.exclude(list(inputs.values()))
        begin = len(meter.events)
        self._inside = []
        meter.mark(Kind.FORWARD)
        with stand_in.autocast():
            loss = self.model(**inputs)
        meter.mark(Kind.BACKWARD)
        # Tensor.backward would leave the modes around it
        torch.autograd.backward(loss * 1.0)
        del loss
        self.model.keep_load()
        meter.mark(Kind.END)
        meter.survivors(begin)
        return tuple(meter.events[begin:])


class _Noticed(dict[str, Any]):
    """The parameters of a module, which tell when one is asked for."""

    def __init__(self, parameters: Mapping[str, Any], asked: Callable[[nn.Parameter], None]) -> None:
        super().__init__(parameters)
        self._asked = asked

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if found is not None:
            self._asked(found)
        return found


class _Marked(torch.autograd.Function):
    """Hands tensors on, and says when their gradients come back, before it hands those on."""

    @staticmethod
    def forward(context: Any, reached: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        context.reached = reached
        context.set_materialize_grads(False)  # what has no gradient gets no zeros
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[Any, ...]:
        context.reached()
        return (None, *gradients)


class _Once:
    """Tells of the first call alone."""

    def __init__(self, told: Callable[[], None]) -> None:
        self._told: Callable[[], None] | None = told

    def __call__(self, _: Tensor) -> None:
        if self._told is not None:
            self._told()
        self._told = None


def _hooked(reached: Callable[[Tensor], None], value: Any) -> None:
    """Be told of the gradient of each tensor in a nest that has one."""
    from torch.utils._pytree import tree_leaves

    for each in tree_leaves(value):
        if isinstance(each, Tensor) and each.requires_grad and torch.is_grad_enabled():
            each.register_hook(reached)  # type: ignore[no-untyped-call]


def _through(marked: Any, reached: Any, value: Any) -> Any:
    """The same nest with its tensors, of those that have a gradient, handed through one function."""
    from torch.utils._pytree import tree_flatten, tree_unflatten

    leaves, form = tree_flatten(value)
    places = [place for place, each in enumerate(leaves) if isinstance(each, Tensor) and each.requires_grad]
    if not places or not torch.is_grad_enabled():
        return value
    for place, made in zip(places, marked.apply(reached, *(leaves[place] for place in places)), strict=True):
        leaves[place] = made
    return tree_unflatten(leaves, form)
