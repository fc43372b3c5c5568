"""Checkpoints exported as `from_pretrained` and serving engines expect: weights or adapters, tokenizer, model card."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
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
from trainkit.trainer.checkpoint.reading import (
    HeldWeights,
    MergedWeights,
    Weights,
    saved_weights,
)
from trainkit.trainer.checkpoint.safe_loading import StateReader, only_data
from trainkit.trainer.checkpoint.shards import SHARD_BYTES, Shards
from trainkit.trainer.data.source import sample_length
from trainkit.trainer.models import MODELS, skeleton
from trainkit.trainer.models.adapters import (
    OWN,
    add_adapters,
    base_fingerprint,
    kept_tensors,
    merge_adapters,
    write_adapters,
)
from trainkit.trainer.models.base import Model, cast_weights
from trainkit.trainer.models.folder import FolderWeights, Tensors, folder_form, saved_once
from trainkit.trainer.models.quantized import dequantize, quantize_without_weights
from trainkit.trainer.optim import DTYPES
from trainkit.trainer.parallel.single_and_ddp import STATE, quiet
from trainkit.trainer.prompts import chosen_template, encoder_of, is_of_bytes, stop_ids, tokenizer_folder
from trainkit.trainer.randomness import seed_generators
from trainkit.trainer.settings import World, read_settings

CONFIG, CARD, GENERATION = "config.json", "README.md", "generation_config.json"
TEMPLATE = "chat_template.jinja"
_FOLDERS = ("model.path", "data.tokenizer", "data.chat_template")  # that an export reads
_FORMATS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model without adapters. weights: gives its values, adapters merged in; None if the model has them."""

    model: Model
    weights: Weights | None
    recipe: Recipe
    manifest: Mapping[str, Any]

    @property
    def inner(self) -> Any:
        """The model with its own parameter names, without those of our wrapper."""
        return getattr(self.model, "inner", self.model)


def export(
    checkpoint: Path,
    destination: Path,
    *,
    trusted: bool = False,
    for_hub: bool = False,
    dtype: str = "",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder with weights, settings, tokenizer and model card; it appears complete or not at all.

    Weights pass through memory one tensor, or one layer with adapters, at a time. trusted: run the model code that the
    run names. dtype: fp32, bf16 or fp16; by default that of the base model. for_hub: without paths of this machine.
    shard_bytes: most of the weights in a file.
    """
    with _opened(checkpoint, trusted=trusted) as trained:
        recipe = trained.recipe
        dtype = dtype or weights_format(recipe)
        if bits := quantized_bits(recipe):
            what = f"the base model was quantised to {bits} bits: its weights are written dequantised, in {dtype}"
            sys.stderr.write(f"note: {what}, with the adapters merged in\n")
        cast_weights(trained.inner, DTYPES[dtype])
        with _whole(destination) as folder:
            if isinstance(recipe.model, HfModel):
                form = _transformer_form(trained, recipe.model, folder)
            else:
                form = _native_form(trained, folder)
            _write_weights(trained, form, folder, (checkpoint, DTYPES[dtype], shard_bytes))
            _complete(folder, recipe, trained.manifest, checkpoint, for_hub=for_hub)


@dataclass(frozen=True, slots=True)
class Form:
    """How a model's tensors are written. names: with the other names of each; groups: what is converted together."""

    names: Mapping[str, Sequence[str]]
    groups: Sequence[Sequence[str]]
    convert: Callable[[Tensors], Tensors]
    metadata: Mapping[str, str]


def _on_meta(inner: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    return {name: each.to("meta") for name, each in inner.state_dict().items() if name in names}


def _write_weights(trained: Trained, form: Form, folder: Path, asked: tuple[Path, torch.dtype, int]) -> None:
    """Read, convert and write the weights, a group at a time. asked: checkpoint, format, and most bytes of a file."""
    checkpoint, dtype, shard_bytes = asked
    weights = trained.weights or HeldWeights(trained.model.state_dict())
    prefix = "" if trained.inner is trained.model else OWN
    shapes = _on_meta(trained.inner, form.names)
    sources = {}
    for name, others in form.names.items():
        held = (prefix + each for each in (name, *others))
        sources[name] = next((each for each in held if each in weights.names), None)
    with _blaming(checkpoint):
        if lacking := sorted(name for name, source in sources.items() if source is None):
            raise ValueError(f"it lacks {', '.join(lacking[:3])}")
    announced: dict[str, Tensor] = {}
    for group in form.groups:
        announced.update(form.convert({name: shapes[name] for name in group}))
    shards = Shards(folder, announced, shard_bytes, form.metadata)
    for group in form.groups:
        with _blaming(checkpoint):
            values = {name: weights.read(str(sources[name]), dtype) for name in group}
            if other := [name for name, each in values.items() if each.shape != shapes[name].shape]:
                raise ValueError(f"its {other[0]} is of another size than {tuple(shapes[other[0]].shape)}")
        for name, tensor in form.convert(values).items():
            shards.write(name, tensor)
        del values, tensor  # before the next are read
    shards.finish()


def _transformer_form(trained: Trained, asked: HfModel, folder: Path) -> Form:
    """As `save_pretrained`, which here writes all but the weights, for `from_pretrained`."""
    inner = trained.inner
    if asked.task == "sequence_classification":
        name_labels(inner.config, label_names(trained.recipe, trained.manifest))
    if asked.task == "seq2seq_lm" and inner.generation_config.decoder_start_token_id is None:
        inner.generation_config.decoder_start_token_id = inner.config.decoder_start_token_id
    own = Path(asked.path or "") / GENERATION
    if has_own := asked.path is not None and own.is_file() and inner.can_generate():
        inner.generation_config = type(inner.generation_config)()  # else some that are in use are refused
    inner.save_pretrained(folder, state_dict={})
    if has_own:
        shutil.copyfile(own, folder / GENERATION)
    names = saved_once(inner)
    return Form(names, *folder_form(inner, _on_meta(inner, names)), {"format": "pt"})


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


def _native_form(trained: Trained, folder: Path) -> Form:
    """A model that is none of transformers': the native GPT as GPT-2, others in a format of our own."""
    recipe, model = trained.recipe, trained.recipe.model
    state = trained.inner.state_dict()
    names, groups = dict.fromkeys(state, ()), [[name] for name in state]
    metadata = {"format": "pt", "step": str(trained.manifest["step"])}
    if isinstance(model, GptModel) and not model.moe.experts:
        context, end = sample_length(recipe), _end_of_text(recipe)
        dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
        write_json(folder / CONFIG, gpt2_config(model, context, dtype, end))
        # It has no places beyond these, and fails there.
        write_json(folder / GENERATION, {"max_length": context} | ({} if end is None else {"eos_token_id": end}))
        return Form(names, groups, gpt2_weights, metadata)
    _write_config(recipe, trained.manifest, folder)
    if isinstance(model, GptModel):
        what = "transformers has no class for a native GPT with experts: it is written in trainkit's own format"
        sys.stderr.write(f"note: {what}, which `trainkit generate` reads\n")
    return Form(names, groups, lambda tensors: tensors, metadata)


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
    recipe, manifest = _checked(checkpoint, trusted=trusted)
    return _in_memory(checkpoint, recipe, manifest, base=base), recipe, manifest


def _checked(checkpoint: Path, *, trusted: bool) -> tuple[Recipe, dict[str, Any]]:
    """A checkpoint's recipe and manifest. TrainingError if it is damaged, or needs code that is not trusted."""
    manifest = read_manifest(checkpoint)
    recipe = as_decided(_recipe(checkpoint, manifest), manifest)
    if isinstance(recipe.model, TargetModel) and not trusted:  # `os:system` is one too
        raise TrainingError(
            f"{checkpoint} belongs to a run whose model is custom code: model.target {recipe.model.target}",
            hint="--trust-code imports and runs that code: use it only if you trust the author of the run directory",
        )
    refuse_damaged(checkpoint, manifest, World())
    return recipe, manifest


@contextlib.contextmanager
def _opened(checkpoint: Path, *, trusted: bool) -> Iterator[Trained]:
    """The model of a checkpoint with what gives its values. TrainingError if it is damaged."""
    recipe, manifest = _checked(checkpoint, trusted=trusted)
    ranks, asked = manifest["world_size"], recipe.model
    with contextlib.ExitStack() as stack:
        if recipe.peft.kind != "lora" and not isinstance(asked, TargetModel):
            with _blaming(checkpoint):
                saved = saved_weights(checkpoint, ranks)
            model = skeleton(recipe)
            if isinstance(asked, HfModel) and asked.path is not None and (base := _base(model, asked.path)):
                base.__exit__()  # asked for the form of its files alone
            yield Trained(model, saved, recipe, manifest)
            return
        if recipe.peft.kind == "lora" and isinstance(asked, HfModel) and asked.path is not None:
            model = skeleton(recipe)
            if (base := _base(model, asked.path)) and _is_in(base, model):
                stack.enter_context(base)
                sized = skeleton(recipe)
                if asked.quantize.bits:
                    quantize_without_weights(sized, asked)
                refuse_other_base(checkpoint, manifest, base_fingerprint(sized, base.read))
                with _blaming(checkpoint):
                    merged = MergedWeights(model, recipe, base, saved_weights(checkpoint, ranks))
                yield Trained(model, merged, recipe, manifest)
                return
        # The base of adapters is drawn anew from the seed, all at once; a user's own class may do anything.
        model = _in_memory(checkpoint, recipe, manifest, base=True)
        merge_adapters(model)
        yield Trained(model, None, recipe, manifest)


def _base(model: Model, folder: str) -> FolderWeights | None:
    """The weights of a folder, if transformers reads them one at a time."""
    try:
        return FolderWeights(model, Path(folder))
    except ImportError:
        return None


def _is_in(base: FolderWeights, model: Model) -> bool:
    """Whether a folder holds all of a model but for its head, which is trained: what it lacks has been drawn."""
    head, inner = set(model.head()), cast("nn.Module", model.inner)
    tensors: dict[str, Tensor] = dict(inner.named_parameters(remove_duplicate=False))
    kept = [(name, *others) for name, others in saved_once(inner).items() if name in tensors]
    return all(tensors[names[0]] in head or any(OWN + name in base.names for name in names) for names in kept)


@contextlib.contextmanager
def _blaming(checkpoint: Path) -> Iterator[None]:
    """In this context whatever is raised over a checkpoint's content becomes a TrainingError that names it."""
    try:
        yield
    except TrainkitError:
        raise
    # torch and DeepSpeed raise any exception for files that they did not write
    except (Exception, CheckpointException) as error:
        if not (checkpoint / MANIFEST).exists():  # renamed by a run in progress, which keeps the newest
            what = f"{checkpoint} was removed while it was read: its run goes on, and has newer ones"
            raise TrainingError(what, hint="try again; checkpoint.keep keeps more of them") from error
        raise TrainingError(f"{checkpoint} does not contain the weights of its run's model: {reason(error)}") from error


def _in_memory(checkpoint: Path, recipe: Recipe, manifest: Mapping[str, Any], *, base: bool) -> Model:
    """The model with its weights and adapters. base: as for :func:`trained_model`."""
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
    with _blaming(checkpoint):
        load_weights(model, checkpoint, manifest["world_size"], adapts=recipe.peft.kind == "lora", base=base)
    return model


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
        given = saved_weights(checkpoint, ranks)
        weights = {name: given.read(name, torch.float32) for name in given.names}
    if lacking := least.keys() - weights.keys():
        raise ValueError(f"it lacks {', '.join(sorted(lacking)[:3])}")
    model.load_state_dict(weights, strict=not adapts, assign=not base)
