"""What a repository of the Hub has beside weights and config: a model card, the tokenizer, no paths of this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from trainkit import lora
from trainkit.hub.cache import name_of, public_name
from trainkit.recipe.schema import HfModel, Recipe
from trainkit.recipe.schema.model import quantized_bits
from trainkit.text import counted
from trainkit.trainer.data.encoding import tokenizer_files

CARD = "README.md"


def complete_for_hub(folder: Path, recipe: Recipe, manifest: dict[str, Any]) -> None:
    """Add to a folder of exported weights, or adapters, what their readers look for on the Hub."""
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
    """The model card: metadata of the Hub's in front (hub docs, model cards), then what was trained, and how long.

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
        f"Trained with trainkit ({what}): {counted(manifest['step'], 'step')}{loss}.\n"
    )
