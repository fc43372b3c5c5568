"""The model card: the Hub's metadata (hub docs, model cards), what was trained on what, how it went, and the recipe."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from trainkit import __version__
from trainkit.files import read_json, read_json_lines
from trainkit.hub.cache import name_of, public_name
from trainkit.hub.push import signed
from trainkit.metrics import LOSS, PREFIX
from trainkit.recipe.schema import HfModel, Recipe
from trainkit.recipe.schema.model import quantized_bits
from trainkit.recipe.yaml_writer import block
from trainkit.runner.report.progress import evaluation_of
from trainkit.runner.rundir.layout import RunLayout
from trainkit.text import pluralize

# What decides what is learned; the rest is about machines.
_SECTIONS = {"model", "peft", "data", "precision", "batch", "optimizer", "schedule", "train"}
_PIPELINES = {
    "causal_lm": "text-generation",
    "seq2seq_lm": "text2text-generation",
    "masked_lm": "fill-mask",
    "sequence_classification": "text-classification",
}
_LIBRARIES = ("torch", "transformers", "peft")


def card(recipe: Recipe, manifest: Mapping[str, Any], run: Path, *, adapters: bool) -> str:
    """The card of an exported folder, without any path of this machine. run: the run directory."""
    model = recipe.model
    path = model.path if isinstance(model, HfModel) else None
    base, named = public_name(path) if path else "", name_of(path or "")
    exactly = f"{base} at {named[1]}" if named else base
    if bits := quantized_bits(recipe):
        exactly += f", which was in {bits} bits"
    readable = isinstance(model, HfModel) or (model.kind == "gpt" and not model.moe.experts)
    head = {
        "library_name": "peft" if adapters else "transformers" if readable else "",
        "base_model": base if "/" in base else "",
        "pipeline_tag": _PIPELINES[model.task if isinstance(model, HfModel) else "causal_lm"] if readable else "",
    }
    best = manifest.get("best") or {}
    value = best.get("value", best.get("loss"))  # earlier releases compared losses alone
    loss = f", evaluation {best.get('metric', LOSS)} {value:.4f} at step {best['step']}" if value is not None else ""
    what = f"{model.kind}, adapters of {exactly or 'a seeded model'}" if adapters else model.kind
    if base and not adapters:
        what += f", from {exactly}"
    header = "".join(f"{name}: {value}\n" for name, value in head.items() if value)
    rows = "".join(f"| {name} | {value} |\n" for name, value in _facts(recipe, manifest, run))
    tree = recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True, include=_SECTIONS)
    # Of sections of several kinds also the default one, which gives their other settings a meaning.
    tree |= {name: {"kind": getattr(recipe, name).kind, **tree.get(name, {})} for name in ("model", "data")}
    settings = "\n".join(block(_without_paths(tree)))
    return signed(
        f"---\n{header}tags:\n- trainkit\n---\n\n# {recipe.name}\n\n"
        f"Trained with trainkit ({what}): {pluralize(manifest['step'], 'step')}{loss}.\n\n"
        f"| | |\n| --- | --- |\n{rows}\n```yaml\n{settings}\n```\n"
    )


def _facts(recipe: Recipe, manifest: Mapping[str, Any], run: Path) -> Iterator[tuple[str, str]]:
    """The rows of the table."""
    layout, data = RunLayout(run), recipe.data
    named = [each.path for each in getattr(data, "mix", ()) if each.is_read] or [getattr(data, "path", "")]
    paths = [path for each in named for path in (each if isinstance(each, list) else [each]) if path]
    names = ", ".join(public_name(path) for path in paths) or data.kind
    described = str(read_json(layout.result).get("data") or "")  # with names of labels, whatever is in them
    yield "Data", " ".join("; ".join(filter(None, (names, described))).split()).replace("|", r"\|")
    peft = recipe.peft
    yield "Method", "all weights" if peft.kind == "none" else f"LoRA, rank {peft.rank}, alpha {peft.alpha:g}"
    records = [each for each in read_json_lines(layout.metrics) if each.get("step", 0) <= manifest["step"]]
    evaluated = dict.fromkeys(name for each in records for name in evaluation_of(each))
    for name, title in {"loss": "Loss", **{f"{PREFIX}{name}": f"Evaluation {name}" for name in evaluated}}.items():
        if seen := [each for each in records if isinstance(each.get(name), int | float)]:
            ends = dict.fromkeys(f"{each[name]:.4f} (step {each['step']})" for each in (seen[0], seen[-1]))
            yield title, " → ".join(ends)
    yield "Versions", ", ".join(f"{name} {version}" for name, version in _versions())


def _versions() -> Iterator[tuple[str, str]]:
    yield "trainkit", __version__
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


def _without_paths(value: Any) -> Any:
    """The value with folders and files of this machine by their last names."""
    if isinstance(value, Mapping):
        return {name: _without_paths(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_paths(each) for each in value]
    is_path = isinstance(value, str) and (posixpath.isabs(value) or value.startswith("~"))
    return public_name(value) if is_path else value
