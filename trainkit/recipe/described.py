"""What small files say of a model's or a tokenizer's folder, read as the libraries that will load it read them."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trainkit import lora
from trainkit.recipe.paths import FileChecks
from trainkit.recipe.resolved import Described
from trainkit.recipe.schema import HfModel, Recipe
from trainkit.recipe.schema.launching import argument

Read = Callable[[str], bytes]  # the bytes of a file; raises OSError
Settings = tuple[Mapping[str, Any], tuple[str, str] | None]  # a file's, or what is wrong, with a remedy
CONFIG, TOKENIZER, TEMPLATE, OTHERS = (
    *("config.json", "tokenizer_config.json"),
    *("chat_template.jinja", "additional_chat_templates"),
)

MODEL_ARGUMENT = "model_name_or_path"  # how scripts on Trainer call the folder of their model


def described(recipe: Recipe, files: FileChecks, absolute: Callable[[str], str]) -> Described:
    """Of the folders that a recipe names. absolute: from the working folder."""
    if recipe.program.kind == "hf":
        folder = argument(recipe.program.args, MODEL_ARGUMENT)
        if folder is None:
            return Described()
        return Described(model=read_config(absolute(recipe.program.seen(folder)), files.read)[0])
    if recipe.program.kind != "builtin":
        return Described()
    found = Described()
    model, named = (recipe.model.path if isinstance(recipe.model, HfModel) else None), recipe.peft.path
    if model and files.exists(absolute(model)):
        settings, fault = read_config(absolute(model), files.read)
        found = replace(found, model=settings, fault=fault)
    if named and files.exists(absolute(named)):
        settings, misfit = read_adapters(absolute(named), files.read)
        found = replace(found, adapters=settings, misfit=misfit)
    tokenizer: str | None = getattr(recipe.data, "tokenizer", None)
    if tokenizer and files.exists(absolute(tokenizer)):
        found = replace(found, chats=has_template(absolute(tokenizer), files.read, files.exists))
    return found


def read_config(folder: str, read: Read) -> Settings:
    """The config.json of a model's folder, or why there is none, with a remedy."""
    remedy = "name a folder as save_pretrained of transformers writes it, or a repository of the Hub"
    found, fault = _object(posixpath.join(folder, CONFIG), read, "which says what the model is", remedy)
    return found, (_adapters(folder, read) or fault) if fault else None


def read_adapters(folder: str, read: Read) -> Settings:
    """The same of adapters: their adapter_config.json."""
    remedy = "name a folder as peft or trainkit export --adapter writes it, or a repository of the Hub"
    return _object(posixpath.join(folder, lora.CONFIG), read, "which says what adapters these are", remedy)


def _object(path: str, read: Read, role: str, remedy: str) -> Settings:
    """The JSON object in a file."""
    try:
        found = json.loads(read(path))
    except (FileNotFoundError, NotADirectoryError):
        return {}, (f"there is no {path}, {role}", remedy)
    except OSError as error:
        return {}, (f"{path} cannot be read: {error.strerror or error}", "make it readable")
    except (ValueError, RecursionError) as error:
        return {}, (f"{path} is no JSON: {error}", remedy)
    if not isinstance(found, dict):
        return {}, (f"{path} is no JSON object", remedy)
    return found, None


def _adapters(folder: str, read: Read) -> tuple[str, str] | None:
    """What there is to say of a folder that holds adapters in place of a model."""
    settings, fault = read_adapters(folder, read)
    if fault is not None:
        return None
    base = settings.get("base_model_name_or_path")
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
