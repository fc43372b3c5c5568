"""What small files say of a model's or a tokenizer's folder, read as the libraries that will load it read them."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Callable, Mapping
from typing import Any

from trainkit.recipe.layers.paths import Files
from trainkit.recipe.resolved import Described
from trainkit.recipe.schema import HfModel, Recipe

Read = Callable[[str], bytes]  # the bytes of a file; raises OSError
CONFIG, TOKENIZER, TEMPLATE, OTHERS = (
    *("config.json", "tokenizer_config.json"),
    *("chat_template.jinja", "additional_chat_templates"),
)


def described(recipe: Recipe, files: Files, absolute: Callable[[str], str]) -> Described:
    """Of the folders that a recipe names. absolute: from the working folder."""
    if recipe.program.kind != "builtin":
        return Described()
    folder = recipe.model.path if isinstance(recipe.model, HfModel) else None
    named: str | None = getattr(recipe.data, "tokenizer", None)
    there = folder is not None and files.exists(absolute(folder))
    model, fault = read_config(absolute(folder), files.read) if folder and there else ({}, None)
    chats = None
    if named and files.exists(absolute(named)):
        chats = has_template(absolute(named), files.read, files.exists)
    return Described(model, fault, chats)


def read_config(folder: str, read: Read) -> tuple[Mapping[str, Any], tuple[str, str] | None]:
    """The config.json of a model's folder, or why there is none, with a remedy."""
    path = posixpath.join(folder, CONFIG)
    remedy = "name a folder as save_pretrained of transformers writes it, or a repository of the Hub"
    try:
        found = json.loads(read(path))
    except (FileNotFoundError, NotADirectoryError):
        return {}, _adapters(folder, read) or (f"there is no {path}, which says what the model is", remedy)
    except OSError as error:
        return {}, (f"{path} cannot be read: {error.strerror or error}", "make it readable")
    except (ValueError, RecursionError) as error:
        return {}, (f"{path} is no JSON: {error}", remedy)
    if not isinstance(found, dict):
        return {}, (f"{path} is no JSON object", remedy)
    return found, None


def _adapters(folder: str, read: Read) -> tuple[str, str] | None:
    """What there is to say of a folder that holds adapters in place of a model."""
    try:
        base = json.loads(read(posixpath.join(folder, "adapter_config.json"))).get("base_model_name_or_path")
    except (OSError, ValueError, RecursionError, AttributeError):
        return None
    named = f" ({base})" if base else ""
    hint = f"set model.path to the model that they belong to{named}, and peft.path to this folder"
    return f"{folder} holds adapters, and no model", hint


def has_template(folder: str, read: Read, exists: Callable[[str], bool]) -> bool | None:
    """Whether a tokenizer's folder has a chat template (transformers, tokenization_utils_base.py); None: not known."""
    if exists(posixpath.join(folder, TEMPLATE)):
        return True
    try:
        settings = json.loads(read(posixpath.join(folder, TOKENIZER)))
    except FileNotFoundError:
        settings = {} if exists(posixpath.join(folder, "tokenizer.json")) else None
    except (OSError, ValueError, RecursionError):  # the trainer says what is wrong with it
        return None
    # Templates of several names, and tokenizers that write chats in their code (mistral-common's), are theirs to judge.
    if not isinstance(settings, dict) or any(exists(posixpath.join(folder, each)) for each in (OTHERS, "tekken.json")):
        return None
    return settings.get("chat_template") is not None
