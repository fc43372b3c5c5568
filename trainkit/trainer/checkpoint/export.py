"""Checkpoints exported as `from_pretrained` and serving engines expect: weights or adapters, tokenizer, model card."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException

from trainkit import lora
from trainkit.data.tokenizer import Encoder, tokenizer_files
from trainkit.errors import TrainingError, TrainkitError
from trainkit.files import read_json, write_json
from trainkit.hub.cache import public_name, shown
from trainkit.hub.references import with_values
from trainkit.recipe.paths import inputs
from trainkit.recipe.schema import GptModel, HfModel, Recipe, TargetModel
from trainkit.recipe.schema.data import BYTES
from trainkit.recipe.schema.model import quantized_bits
from trainkit.runner.rundir.layout import MANIFEST
from trainkit.trainer.checkpoint.card import card
from trainkit.trainer.checkpoint.gpt2 import byte_tokenizer, gpt2_config, gpt2_weights
from trainkit.trainer.checkpoint.manifest import as_decided, read_manifest, reason, refuse_damaged, refuse_other_base
from trainkit.trainer.checkpoint.safe_loading import StateReader, only_data
from trainkit.trainer.data.source import sample_length
from trainkit.trainer.models import MODELS, skeleton
from trainkit.trainer.models.adapters import (
    add_adapters,
    base_fingerprint,
    kept_tensors,
    merge_adapters,
    write_adapters,
)
from trainkit.trainer.models.base import Model, cast_weights
from trainkit.trainer.models.quantized import dequantize
from trainkit.trainer.optim import DTYPES
from trainkit.trainer.parallel.single_and_ddp import STATE, quiet
from trainkit.trainer.parallel.swapping import FOLDER, swapped_weights
from trainkit.trainer.parallel.zero import TAG, import_deepspeed
from trainkit.trainer.prompts import chosen_template, encoder_of, is_of_bytes, stop_ids, tokenizer_folder
from trainkit.trainer.randomness import seed_generators
from trainkit.trainer.settings import World, read_settings

WEIGHTS, CONFIG, CARD, GENERATION = "model.safetensors", "config.json", "README.md", "generation_config.json"
TEMPLATE = "chat_template.jinja"
_FOLDERS = ("model.path", "data.tokenizer", "data.chat_template")  # that an export reads
MASTER = "single_partition_of_fp32_groups"  # DeepSpeed's 32-bit weights at stages 1 and 2
_SHARD = re.compile(r"zero_pp_rank_(\d+)_")  # DeepSpeed's file of a rank
_FORMATS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}


def export(
    checkpoint: Path, destination: Path, *, trusted: bool = False, for_hub: bool = False, dtype: str = ""
) -> None:
    """Write a folder with weights, settings, tokenizer and model card; it appears complete or not at all.

    trusted: run the model code that the run names. dtype: fp32, bf16 or fp16; by default that of the base model.
    for_hub: without paths of this machine.
    """
    model, recipe, manifest = trained_model(checkpoint, trusted=trusted)
    if recipe.peft.kind == "lora":
        merge_adapters(model)
    dtype = dtype or weights_format(recipe)
    if bits := quantized_bits(recipe):
        what = f"the base model was quantised to {bits} bits: its weights are written dequantised, in {dtype}"
        sys.stderr.write(f"note: {what}, with the adapters merged in\n")
    inner: Any = getattr(model, "inner", model)  # with its own parameter names, without those of our wrapper
    cast_weights(inner, DTYPES[dtype])
    with _whole(destination) as folder:
        if isinstance(recipe.model, HfModel):  # weights and config.json for `from_pretrained`
            if recipe.model.task == "sequence_classification":
                name_labels(inner.config, label_names(recipe, manifest))
            if recipe.model.task == "seq2seq_lm" and inner.generation_config.decoder_start_token_id is None:
                inner.generation_config.decoder_start_token_id = inner.config.decoder_start_token_id
            own = Path(recipe.model.path or "") / GENERATION
            if has_own := recipe.model.path is not None and own.is_file():
                inner.generation_config = type(inner.generation_config)()  # else some that are in use are refused
            inner.save_pretrained(folder)
            if has_own:
                shutil.copyfile(own, folder / GENERATION)
        else:
            _write_native(inner, recipe, manifest, folder)
        _complete(folder, recipe, manifest, checkpoint, for_hub=for_hub)


def export_adapters(
    checkpoint: Path, destination: Path, *, trusted: bool = False, for_hub: bool = False, dtype: str = ""
) -> None:
    """Write a folder with only the adapters, in peft's format. TrainingError for a run without adapters.

    dtype: by default that in which they are trained.
    """
    recipe = _recipe(checkpoint, read_manifest(checkpoint))
    if recipe.peft.kind != "lora":
        raise TrainingError(
            f"{checkpoint} belongs to a run without adapters (peft.kind: {recipe.peft.kind})",
            hint="leave --adapter out to export the full weights",
        )
    model, recipe, manifest = trained_model(checkpoint, trusted=trusted, base=False)
    with _whole(destination) as folder:
        write_adapters(model, recipe, folder, manifest["step"], DTYPES[dtype] if dtype else None)
        if recipe.model.kind != "hf":  # peft writes the path of the base model, which ours does not have
            _write_config(recipe, manifest, folder)
        _complete(folder, recipe, manifest, checkpoint, for_hub=for_hub)


def weights_format(recipe: Recipe) -> str:
    """The number format of exported weights: that of the base model's files, else of the run's weights."""
    if quantized_bits(recipe):
        return "bf16"
    if not isinstance(recipe.model, HfModel) or recipe.model.path is None:
        return recipe.precision.weights
    folder = Path(recipe.model.path)
    config = read_json(folder / CONFIG)
    if named := config.get("dtype") or config.get("torch_dtype"):
        return _FORMATS.get(named, "fp32")
    for file in sorted(folder.glob("*.safetensors"))[:1]:
        with safe_open(file, "pt") as tensors:
            formats = (tensors.get_slice(name).get_dtype() for name in tensors.keys())  # noqa: SIM118 - no mapping
            return next((_FORMATS[each] for each in formats if each in _FORMATS), "fp32")
    return "fp32"


def label_names(recipe: Recipe, manifest: Mapping[str, Any]) -> Sequence[str]:
    """The names of a classifier's labels, by number: those of the recipe, or that the run has found in its data."""
    return getattr(recipe.data, "labels", ()) or (manifest.get("data") or {}).get("labels", ())


def name_labels(config: Any, names: Sequence[str]) -> None:
    """Name the labels of a configuration, if the names are as many."""
    if len(names) == config.num_labels:
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}


def _write_native(inner: Any, recipe: Recipe, manifest: Mapping[str, Any], folder: Path) -> None:
    """A model that is none of transformers': the native GPT as GPT-2, others in a format of our own."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in inner.state_dict().items():
        # Tied weights share memory, and safetensors does not allow tensors that overlap.
        memory = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone().contiguous() if memory in seen else tensor.contiguous()
        seen.add(memory)
    model = recipe.model
    if isinstance(model, GptModel) and not model.moe.experts:
        tensors, context = gpt2_weights(tensors), sample_length(recipe)
        end = _end_of_text(recipe)
        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        write_json(folder / CONFIG, gpt2_config(model, context, dtype, end))
        # It has no places beyond these, and fails there.
        write_json(folder / GENERATION, {"max_length": context} | ({} if end is None else {"eos_token_id": end}))
    else:
        _write_config(recipe, manifest, folder)
        if isinstance(model, GptModel):
            what = "transformers has no class for a native GPT with experts: it is written in trainkit's own format"
            sys.stderr.write(f"note: {what}, which `trainkit generate` reads\n")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt", "step": str(manifest["step"])})


def _end_of_text(recipe: Recipe) -> int | None:
    ends = encoder_of(recipe).closing(final=True) if tokenizer_folder(recipe) else []
    return ends[-1] if ends else None


def _complete(folder: Path, recipe: Recipe, manifest: Mapping[str, Any], checkpoint: Path, *, for_hub: bool) -> None:
    """Add tokenizer and model card to weights or adapters, and give every file the mode that the umask lets it have."""
    if (source := tokenizer_folder(recipe)) is not None:
        for path in [*tokenizer_files(source), *source.glob("additional_chat_templates/*.jinja")]:
            target = folder / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
        if template := chosen_template(recipe):
            (folder / TEMPLATE).write_text(template)
        drawn = isinstance(recipe.model, HfModel) and recipe.model.path is None  # so that nothing says how texts end
        chats = (manifest.get("data") or {}).get("chats")
        if (chats or drawn) and (folder / GENERATION).exists():
            _stop_at_answers(folder, encoder_of(recipe))
    elif is_of_bytes(recipe):
        for name, content in byte_tokenizer().items():
            write_json(folder / name, content)
    base = recipe.model.path if isinstance(recipe.model, HfModel) else None
    adapters = folder / lora.CONFIG
    if for_hub and adapters.exists():
        config = {**read_json(adapters), "base_model_name_or_path": public_name(base) if base else None}
        write_json(adapters, config)
    (folder / CARD).write_text(card(recipe, manifest, checkpoint.absolute().parents[1], adapters=adapters.exists()))
    mode = folder.stat().st_mode  # as mkdir made it; safetensors lets nobody else read its files
    for path in folder.rglob("*"):
        path.chmod(mode & (0o7777 if path.is_dir() else 0o666))


def _stop_at_answers(folder: Path, encoder: Encoder) -> None:
    """Have generation end with the token that ends an answer in the template: that of the base may be another."""
    config = read_json(folder / GENERATION)
    declared = config.get("eos_token_id", read_json(folder / CONFIG).get("eos_token_id"))
    known = declared if isinstance(declared, list) else [declared]
    if more := stop_ids(encoder) - {*known}:
        ids = [*(each for each in known if each is not None), *sorted(more)]
        write_json(folder / GENERATION, {**config, "eos_token_id": ids})


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
    write_json(folder / CONFIG, config)


def trained_model(
    checkpoint: Path, *, trusted: bool = False, base: bool = True
) -> tuple[Model, Recipe, dict[str, Any]]:
    """The model with a checkpoint's weights and adapters, the recipe and the manifest. TrainingError if it is damaged.

    base: False to leave out the base weights of adapters: they are then neither read nor kept in memory.
    """
    manifest = read_manifest(checkpoint)
    recipe = as_decided(_recipe(checkpoint, manifest), manifest)
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
        if not (checkpoint / MANIFEST).exists():  # renamed by a run in progress, which keeps the newest
            what = f"{checkpoint} was removed while it was read: its run goes on, and has newer ones"
            raise TrainingError(what, hint="try again; checkpoint.keep keeps more of them") from error
        raise TrainingError(f"{checkpoint} does not contain the weights of its run's model: {reason(error)}") from error
    return model, recipe, manifest


def _recipe(checkpoint: Path, manifest: Mapping[str, Any]) -> Recipe:
    """A run's recipe with paths as its working folder has them, which this process may not be in.

    TrainingError where its tokenizer is gone, as then none would be taken for it.
    """
    recipe = read_settings(checkpoint.absolute().parents[1] / "trainer.json").recipe
    folder = Path(str(manifest.get("folder") or "."))
    if folder != Path.cwd():
        named = {key: folder / path for key, path in inputs(recipe) if key in _FOLDERS}
        recipe = with_values(recipe, {key: str(path) for key, path in named.items() if path.exists()})
    tokenizer = getattr(recipe.data, "tokenizer", None)
    if tokenizer not in (None, BYTES) and tokenizer_folder(recipe) is None:
        what = f"data.tokenizer: there is no tokenizer in {shown(tokenizer)}"
        raise TrainingError(what, hint=f"put it back where it was; the run's working folder was {folder}")
    return recipe


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
