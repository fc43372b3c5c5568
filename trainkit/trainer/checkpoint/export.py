"""Write a checkpoint's weights as safetensors: ``python -m trainkit.trainer.checkpoint.export``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from trainkit.errors import TrainingError, TrainkitError, in_words
from trainkit.recipe.schema import Recipe
from trainkit.trainer.checkpoint.loading import read_manifest, refuse_damaged
from trainkit.trainer.checkpoint.weights import load_weights
from trainkit.trainer.models import MODELS
from trainkit.trainer.models.adapters import add_adapters, merge_adapters, write_adapters
from trainkit.trainer.models.base import Model
from trainkit.trainer.randomness import seed_generators
from trainkit.trainer.settings import World, read_settings

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Export one checkpoint, on the CPU and without a process group. Failures are one line and exit code 1."""
    parser = argparse.ArgumentParser(prog="python -m trainkit.trainer.checkpoint.export", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="<run>/checkpoints/step-<8 digits>")
    parser.add_argument("--destination", type=Path, required=True, help="folder to make; it must not exist")
    parser.add_argument("--adapter", action="store_true", help="the adapters alone, as peft reads them")
    given = parser.parse_args(argv)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers imports DeepSpeed, which would guess aloud
    try:
        (export_adapters if given.adapter else export)(given.checkpoint, given.destination)
    except TrainkitError as error:
        sys.stderr.write(in_words(error))
        return int(error.exit_code)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        sys.stderr.write(f"error: {given.destination} cannot be written: {reason}\n")
        return 1
    return 0


def export(checkpoint: Path, destination: Path) -> None:
    """Make the folder with the weights in 32 bits and the model's settings; it appears whole or not at all."""
    model, recipe, manifest = trained_model(checkpoint)
    if recipe.peft.kind == "lora":
        merge_adapters(model)
    inner: Any = getattr(model, "inner", model)  # by its own names: it knows nothing of what we put around it
    with _whole(destination) as folder:
        if recipe.model.kind == "hf":  # weights and config.json as `from_pretrained` reads them
            inner.save_pretrained(folder)
            return
        metadata = {"format": "pt", "step": str(manifest["step"])}
        save_file(_apart(inner.state_dict()), folder / WEIGHTS, metadata=metadata)
        _write_config(recipe, manifest, folder)


def export_adapters(checkpoint: Path, destination: Path) -> None:
    """Make the folder with the adapters alone, in peft's format, and the settings of a model that only trainkit makes.

    TrainingError for a run without adapters.
    """
    recipe = _recipe(checkpoint)
    if recipe.peft.kind != "lora":
        raise TrainingError(
            f"{checkpoint} is of a run without adapters (peft.kind: {recipe.peft.kind})",
            hint="leave --adapter out: its weights are exported whole",
        )
    model, recipe, manifest = trained_model(checkpoint)
    with _whole(destination) as folder:
        write_adapters(model, recipe, folder, manifest["step"])
        if recipe.model.kind != "hf":
            _write_config(recipe, manifest, folder)


def trained_model(checkpoint: Path) -> tuple[Model, Recipe, dict[str, Any]]:
    """The model with a checkpoint's weights, its adapters beside them, with the recipe and the manifest.

    TrainingError if the checkpoint is damaged, or of another model than its run's.
    """
    manifest, recipe = read_manifest(checkpoint), _recipe(checkpoint)
    refuse_damaged(checkpoint, manifest, World())
    seed_generators(recipe.train.seed)
    model = MODELS[recipe.model.kind](recipe)
    if recipe.peft.kind == "lora":
        add_adapters(model, recipe.peft)
    try:
        load_weights(model, checkpoint, manifest["world_size"])
    except (RuntimeError, ValueError, KeyError, UnpicklingError) as error:
        raise TrainingError(f"{checkpoint} does not hold the weights of its run's model: {error}") from error
    return model, recipe, manifest


def _recipe(checkpoint: Path) -> Recipe:
    return read_settings(checkpoint.absolute().parents[1] / "trainer.json").recipe


@contextlib.contextmanager
def _whole(destination: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when all is in it."""
    scratch = destination.with_name(f".{destination.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        scratch.rename(destination)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, copied where they share memory, as tied weights do: safetensors takes none that overlap."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone().contiguous() if memory in seen else tensor.contiguous()
        seen.add(memory)
    return found


def _write_config(recipe: Recipe, manifest: Mapping[str, Any], folder: Path) -> None:
    config = {
        "model_type": f"trainkit-{recipe.model.kind}",
        "model": recipe.model.model_dump(mode="json", by_alias=True),
        "sequence_length": recipe.data.sequence_length,
        "seed": recipe.train.seed,  # of which the weights were drawn that adapters belong to
        "step": manifest["step"],
        "training_digest": manifest["training_digest"],
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
