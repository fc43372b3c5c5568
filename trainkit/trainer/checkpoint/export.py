"""Checkpoints exported for other tools: full weights, or only adapters; optionally with files for the Hub."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException

from trainkit import lora
from trainkit.data.tokenizer import tokenizer_files
from trainkit.errors import TrainingError, TrainkitError
from trainkit.hub.cache import name_of, public_name
from trainkit.recipe.schema import HfModel, Recipe, TargetModel
from trainkit.recipe.schema.model import quantized_bits
from trainkit.text import pluralize
from trainkit.trainer.checkpoint.manifest import read_manifest, reason, refuse_damaged, refuse_other_base
from trainkit.trainer.checkpoint.safe_loading import StateReader, only_data
from trainkit.trainer.models import MODELS, skeleton
from trainkit.trainer.models.adapters import (
    add_adapters,
    base_fingerprint,
    kept_tensors,
    merge_adapters,
    write_adapters,
)
from trainkit.trainer.models.base import Model
from trainkit.trainer.models.quantized import dequantize
from trainkit.trainer.optim import DTYPES
from trainkit.trainer.parallel.single_and_ddp import STATE, quiet
from trainkit.trainer.parallel.swapping import FOLDER, swapped_weights
from trainkit.trainer.parallel.zero import TAG, import_deepspeed
from trainkit.trainer.randomness import seed_generators
from trainkit.trainer.settings import World, read_settings

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
MASTER = "single_partition_of_fp32_groups"  # DeepSpeed's 32-bit weights at stages 1 and 2
_SHARD = re.compile(r"zero_pp_rank_(\d+)_")  # DeepSpeed's file of a rank


def export(checkpoint: Path, destination: Path, *, trusted: bool = False, for_hub: bool = False) -> None:
    """Write a folder with the weights in 32 bits and the model's settings; it appears complete or not at all.

    trusted: run the model code that the run names. for_hub: add a model card and the run's tokenizer.
    """
    model, recipe, manifest = trained_model(checkpoint, trusted=trusted)
    if recipe.peft.kind == "lora":
        merge_adapters(model)
    if bits := quantized_bits(recipe):
        what = f"the base model was quantised to {bits} bits: its weights are written dequantised, in 32 bits"
        sys.stderr.write(f"note: {what}, with the adapters merged in\n")
    inner: Any = getattr(model, "inner", model)  # with its own parameter names, without those of our wrapper
    with _whole(destination) as folder:
        if recipe.model.kind == "hf":  # weights and config.json for `from_pretrained`
            inner.save_pretrained(folder)
        else:
            tensors: dict[str, Tensor] = {}
            seen: set[int] = set()
            for name, tensor in inner.state_dict().items():
                # Tied weights share memory, and safetensors does not allow tensors that overlap.
                memory = tensor.untyped_storage().data_ptr()
                tensors[name] = tensor.clone().contiguous() if memory in seen else tensor.contiguous()
                seen.add(memory)
            save_file(tensors, folder / WEIGHTS, metadata={"format": "pt", "step": str(manifest["step"])})
            _write_config(recipe, manifest, folder)
        if for_hub:
            complete_for_hub(folder, recipe, manifest)


def export_adapters(checkpoint: Path, destination: Path, *, trusted: bool = False, for_hub: bool = False) -> None:
    """Write a folder with only the adapters, in peft's format. TrainingError for a run without adapters."""
    recipe = _recipe(checkpoint)
    if recipe.peft.kind != "lora":
        raise TrainingError(
            f"{checkpoint} belongs to a run without adapters (peft.kind: {recipe.peft.kind})",
            hint="leave --adapter out to export the full weights",
        )
    model, recipe, manifest = trained_model(checkpoint, trusted=trusted, base=False)
    with _whole(destination) as folder:
        write_adapters(model, recipe, folder, manifest["step"])
        if recipe.model.kind != "hf":  # peft writes the path of the base model, which ours does not have
            _write_config(recipe, manifest, folder)
        if for_hub:
            complete_for_hub(folder, recipe, manifest)


@contextlib.contextmanager
def _whole(destination: Path) -> Iterator[Path]:
    """A folder to fill; it gets its final name once it is complete."""
    scratch = destination.with_name(f".{destination.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        scratch.rename(destination)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_config(recipe: Recipe, manifest: Mapping[str, Any], folder: Path) -> None:
    config = {
        "model_type": f"trainkit-{recipe.model.kind}",
        "model": recipe.model.model_dump(mode="json", by_alias=True),
        "sequence_length": recipe.data.sequence_length,
        "seed": recipe.train.seed,  # the seed from which the adapters' base weights were drawn
        "step": manifest["step"],
        "training_digest": manifest["training_digest"],
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def trained_model(
    checkpoint: Path, *, trusted: bool = False, base: bool = True
) -> tuple[Model, Recipe, dict[str, Any]]:
    """The model with a checkpoint's weights and adapters, the recipe and the manifest. TrainingError if it is damaged.

    base: False to leave out the base weights of adapters: they are then neither read nor kept in memory.
    """
    manifest, recipe = read_manifest(checkpoint), _recipe(checkpoint)
    if isinstance(recipe.model, TargetModel) and not trusted:  # `os:system` is one too
        raise TrainingError(
            f"{checkpoint} belongs to a run whose model is custom code: model.target {recipe.model.target}",
            hint="--trust-code imports and runs that code: use it only if you trust the author of the run directory",
        )
    refuse_damaged(checkpoint, manifest, World())
    # A user's own class may do anything with its weights, so that they must exist.
    if base or isinstance(recipe.model, TargetModel):
        seed_generators(recipe.train.seed)  # the base weights of adapters are drawn from the seed
        model = MODELS[recipe.model.kind](recipe)
        if recipe.model.kind == "hf":  # in the format of precision.weights
            model.float()
        elif recipe.peft.kind == "lora":
            model.to(DTYPES[recipe.precision.weights]).float()
    else:
        model = skeleton(recipe)
    if recipe.peft.kind == "lora":
        if base:
            refuse_other_base(checkpoint, manifest, base_fingerprint(model))
            dequantize(model)
        add_adapters(model, recipe.peft)
    try:
        load_weights(model, checkpoint, manifest["world_size"], adapts=recipe.peft.kind == "lora", base=base)
    except TrainkitError:
        raise
    # torch and DeepSpeed raise any exception for files that they did not write
    except (Exception, CheckpointException) as error:
        raise TrainingError(f"{checkpoint} does not contain the weights of its run's model: {reason(error)}") from error
    return model, recipe, manifest


def _recipe(checkpoint: Path) -> Recipe:
    return read_settings(checkpoint.absolute().parents[1] / "trainer.json").recipe


def load_weights(model: nn.Module, checkpoint: Path, ranks: int, *, adapts: bool, base: bool = True) -> None:
    """Load what `ranks` ranks saved into a model. UnpicklingError for more than plain data, others for another model.

    adapts: whether frozen weights may be missing; then they stay as they are. base: whether they are wanted.
    """
    least = kept_tensors(model) if adapts else {}
    if (checkpoint / STATE).is_dir():
        with quiet(), only_data():  # torch assembles the shards itself
            reader = StateReader(checkpoint / STATE)
            saved = reader.read_metadata().state_dict_metadata
            weights = {
                name: torch.empty_like(each, device="cpu") if each.is_meta else each
                for name, each in model.state_dict().items()
                if not least or name in least or (base and f"model.{name}" in saved)
            }
            state_dict_loader.load({"model": weights}, storage_reader=reader)
    else:
        import_deepspeed(torch.device("cpu"), "warning")
        with only_data():
            swapped = (checkpoint / FOLDER).is_dir()
            weights = swapped_weights(checkpoint, ranks) if swapped else dict(zero_weights(checkpoint))
    if lacking := least.keys() - weights.keys():
        raise ValueError(f"it lacks {', '.join(sorted(lacking)[:3])}")
    model.load_state_dict(weights, strict=not adapts, assign=not base)


def zero_weights(checkpoint: Path) -> Mapping[str, Tensor]:
    """Every parameter and buffer by its name, in 32 bits, assembled from DeepSpeed's own files."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint, get_model_state_files

    # Memory-mapped: the optimizer state in the same files is several times larger than the weights, and is not needed.
    read = partial(torch.load, map_location="cpu", mmap=True, weights_only=True)
    numbered = ((_SHARD.search(path.name), path) for path in (checkpoint / TAG).glob("*_optim_states.pt"))
    shards = sorted((int(number[1]), path) for number, path in numbered if number)  # by rank
    saved = [read(path)["optimizer_state_dict"] for _, path in shards]
    module = read(get_model_state_files(str(checkpoint / TAG))[0])
    if all("zero_stage" not in state for state in saved):
        return {**module["module"], **_joined(saved, module)}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        weights = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag=TAG)
    # At stage 1, DeepSpeed (engine.py, save_frozen_param) keeps frozen parameters only in the full module's state.
    return {**module["module"], **weights} if saved[0]["zero_stage"] == 1 else weights


def _joined(saved: list[Mapping[str, Any]], module: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Weights of ZeRO stage 1 in bf16, which uses another optimizer class: DeepSpeed's own reader refuses that."""
    # runtime/bf16_optimizer.py, state_dict: each rank has a slice of each flat group of parameters, which follow one
    # another in the order of `param_shapes`.
    weights: dict[str, Tensor] = {}
    for group, shapes in enumerate(module["param_shapes"]):
        flat, offset = torch.cat([state[MASTER][group] for state in saved]), 0
        for name, shape in shapes.items():
            weights[name] = flat.narrow(0, offset, shape.numel()).view(shape)
            offset += shape.numel()
    for twin, name in module["shared_params"].items():
        weights[twin] = weights[name]
    return weights


def complete_for_hub(folder: Path, recipe: Recipe, manifest: dict[str, Any]) -> None:
    """Add the files that readers on the Hub expect to a folder of exported weights or adapters."""
    base = recipe.model.path if isinstance(recipe.model, HfModel) else None
    adapters = folder / lora.CONFIG
    if adapters.exists():
        config = json.loads(adapters.read_text())
        config["base_model_name_or_path"] = public_name(base) if base else None
        adapters.write_text(json.dumps(config, indent=2) + "\n")
    tokenizer = getattr(recipe.data, "tokenizer", None)
    for path in tokenizer_files(Path(tokenizer)) if tokenizer else ():
        shutil.copyfile(path, folder / path.name)
    (folder / CARD).write_text(card(recipe, manifest, base, adapters=adapters.exists()))


def card(recipe: Recipe, manifest: dict[str, Any], path: str | None, *, adapters: bool) -> str:
    """The model card: the Hub's metadata (hub docs, model cards), then what was trained, and for how long.

    path: the folder of the base model, if there is one.
    """
    base, named = public_name(path) if path else "", name_of(path or "")
    exactly = f"{base} at {named[1]}" if named else base
    if bits := quantized_bits(recipe):
        exactly += f", which was in {bits} bits"
    library = "peft" if adapters else "transformers" if recipe.model.kind == "hf" else ""
    metadata = {"library_name": library, "base_model": base if "/" in base else ""}
    head = "".join(f"{name}: {value}\n" for name, value in metadata.items() if value)
    best = manifest.get("best") or {}
    loss = f", evaluation loss {best['loss']:.4f} at step {best['step']}" if best.get("loss") is not None else ""
    what = f"{recipe.model.kind}, adapters of {exactly or 'a seeded model'}" if adapters else recipe.model.kind
    if base and not adapters:
        what += f", from {exactly}"
    return (
        f"---\n{head}tags:\n- trainkit\n---\n\n# {recipe.name}\n\n"
        f"Trained with trainkit ({what}): {pluralize(manifest['step'], 'step')}{loss}.\n"
    )
