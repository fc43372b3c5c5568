"""The model of a run with the techniques that work on the model itself, and the data as it can take it."""

from __future__ import annotations

from pathlib import Path

from trainkit.errors import TrainingError
from trainkit.recipe.schema import Fsdp, Recipe
from trainkit.trainer.data.checked import checked
from trainkit.trainer.data.mlm_masking import masked
from trainkit.trainer.data.source import Source
from trainkit.trainer.models import MODELS, Model
from trainkit.trainer.models.adapters import add_adapters
from trainkit.trainer.models.own_loss import own_loss
from trainkit.trainer.models.saved_adapters import load_adapters
from trainkit.trainer.optim.precision import DTYPES
from trainkit.trainer.perf.activation_checkpointing import checkpoint_blocks
from trainkit.trainer.perf.compiling import compile_model
from trainkit.trainer.settings import Settings


def prepared_model(settings: Settings) -> Model:
    """The model of the recipe, on the CPU, with weights drawn from torch's default generator."""
    recipe = settings.recipe
    model = MODELS[recipe.model.kind](recipe).to(DTYPES[recipe.precision.weights])
    model.judge, model.own_loss = own_loss(recipe), recipe.train.loss is not None
    require_blocks(model, recipe)
    if recipe.peft.kind == "lora":
        add_adapters(model, recipe.peft)
        if recipe.peft.path is not None:
            load_adapters(model, Path(recipe.peft.path))
    if recipe.efficiency.gradient_checkpointing.every:
        checkpoint_blocks(model.blocks, recipe.efficiency.gradient_checkpointing, dropout=model.stochastic)
    if recipe.efficiency.compile.enabled:
        compile_model(model, recipe.efficiency.compile, recipe.strategy.kind)
    return model


def require_blocks(model: Model, recipe: Recipe) -> None:
    """TrainingError where a technique works block by block and the model has no list of like modules."""
    if any(True for _ in model.blocks):
        return
    strategy, compiling = recipe.strategy, recipe.efficiency.compile
    wants = {
        "efficiency.gradient_checkpointing": bool(recipe.efficiency.gradient_checkpointing.every),
        "efficiency.compile.scope: blocks": compiling.enabled and compiling.scope == "blocks",
        "strategy.auto_wrap: transformer": isinstance(strategy, Fsdp)
        and strategy.auto_wrap == "transformer"
        and not strategy.wrap_classes,
        "peft": recipe.peft.kind != "none" and not recipe.peft.target_modules,
    }
    for key, wanted in wants.items():
        if wanted:
            what = f"{key} works on the blocks of a model, and this one holds no list of modules (torch.nn.ModuleList)"
            raise TrainingError(what, hint="put its repeated layers in one, or leave the setting out")


def fitting_source(source: Source, model: Model, recipe: Recipe) -> Source:
    """The source with samples that are compared with what the model knows. TrainingError as of the checks below."""
    check_vocabulary(source, model)
    check_labels(source, model)
    return checked(masked(source, recipe, model.vocabulary), model.vocabulary, model.labels)


def check_vocabulary(source: Source, model: Model) -> None:
    """TrainingError if the data holds a token that the model does not know, which would index past its embedding."""
    if model.vocabulary is not None and source.highest >= model.vocabulary:
        where = f" of {source.where}" if source.where else " in the data"
        raise TrainingError(
            f"model: a vocabulary of {model.vocabulary} is too small for token {source.highest}{where}",
            hint=f"it must be {source.highest + 1} or more; 256 holds every byte",
        )


def check_labels(source: Source, model: Model) -> None:
    """TrainingError if a label is none of the model's, or the data is filled up with what the model takes for text."""
    if model.labels is None:
        return
    if model.padding is None:
        raise TrainingError(
            "model.config.pad_token_id is not set, without which the model cannot tell where a text ends",
            hint=f"set it to {source.padding or 0}",
        )
    found = source.labels
    if found is not None and found.highest >= model.labels:
        raise TrainingError(
            f"data.path: {found.where}: label {found.highest} is too high: the model has {model.labels}, from 0",
            hint=f"set model.config.num_labels to {found.highest + 1} or more, or mend the data",
        )
    if source.padding is not None and source.padding != model.padding:
        raise TrainingError(
            f"model.config.pad_token_id is {model.padding}, and texts are filled up with {source.padding}: the model "
            "would read that as text",
            hint=f"set model.config.pad_token_id to {source.padding}",
        )
