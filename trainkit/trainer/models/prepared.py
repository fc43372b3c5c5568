"""The model of a run with the techniques that work on the model itself, and the data as it can take it."""

from __future__ import annotations

from pathlib import Path

from trainkit.errors import TrainingError
from trainkit.recipe.schema import Fsdp, Recipe
from trainkit.trainer.data.mlm_masking import masked
from trainkit.trainer.data.source import Source
from trainkit.trainer.data.vocabulary import checked
from trainkit.trainer.models import MODELS, Model
from trainkit.trainer.models.adapters import add_adapters
from trainkit.trainer.models.saved_adapters import load_adapters
from trainkit.trainer.models.target import own_loss
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

