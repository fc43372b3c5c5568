"""A trained model's answers: from a checkpoint of a run, or from a folder of transformers or peft."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from trainkit import lora
from trainkit.data.files import refuse_special
from trainkit.data.formats import KEEPS_APART
from trainkit.data.tokenizer import Encoder, open_encoder, tokenizer_files
from trainkit.errors import MachineError, TrainingError, first_line
from trainkit.files import read_json
from trainkit.hub.cache import public_name
from trainkit.recipe.schema import GptModel, HfModel
from trainkit.trainer.checkpoint.export import CONFIG, label_names, name_labels, trained_model, weights_format
from trainkit.trainer.checkpoint.shards import WEIGHTS, weight_files
from trainkit.trainer.models.adapters import merge_adapters
from trainkit.trainer.models.base import cast_weights
from trainkit.trainer.models.gpt import Gpt
from trainkit.trainer.models.hf import TASKS, EncoderDecoder
from trainkit.trainer.optim import DTYPES
from trainkit.trainer.prompts import (
    PromptError,
    TextStream,
    encoder_of,
    has_template,
    is_of_bytes,
    prompt_ids,
    stop_ids,
    tokenizer_folder,
)

TEMPERATURE = 0.7  # where neither the caller nor the model's generation_config.json says another
# What the name of an architecture of transformers ends with, or peft's name -> `model.task`.
_TASK_OF = {
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
    "ForConditionalGeneration": "seq2seq_lm",
    "ForSequenceClassification": "sequence_classification",
    "CAUSAL_LM": "causal_lm",
    "SEQ_2_SEQ_LM": "seq2seq_lm",
    "SEQ_CLS": "sequence_classification",
}
TOGETHER, TOKENS_TOGETHER = 16, 1 << 15  # prompts that are answered at a time, and their tokens with the answers
_OF_WHOLE_TEXTS = {"num_beams", "repetition_penalty", "no_repeat_ngram_size", "sequence_bias"}
_WRITERS = "only models of transformers that write or label texts are used here"
Write = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. temperature: 0 takes the likeliest token; None, as for top_p, is the model's own."""

    tokens: int  # at most
    temperature: float | None = None
    top_p: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model makes of a prompt. ended: by the model itself, not by a limit."""

    text: str = ""
    tokens: int = 0
    ended: bool = True
    labels: Mapping[str, float] | None = None  # of a classifier, with their probabilities, the likeliest first


@dataclass(frozen=True, slots=True)
class Answerer:
    """A model on a device with its tokenizer. inner: a native GPT, or a model of transformers for a task."""

    inner: Any
    task: str  # "" for a native GPT
    encoder: Encoder
    device: torch.device
    prefix: str = ""  # goes before each prompt that is a text
    begun: Tensor | None = None  # what a decoder begins with (1, ids)

    def is_chat(self, *, plain: bool) -> bool:
        """Whether prompts go through a chat template."""
        return self.task in ("", "causal_lm") and has_template(self.encoder) and not plain

    def ids(self, row: Mapping[str, Any], *, system: str = "", plain: bool = False) -> list[int]:
        """What the model reads of `prompt` or `messages`. PromptError where it cannot be made, or is too long."""
        text = self.prefix + row.get("prompt", "")
        if self.task in ("", "causal_lm"):
            ids = prompt_ids(self.encoder, {**row, "prompt": text}, system=system, plain=plain)
        elif "prompt" not in row or system:
            raise PromptError("the model reads one text, and no chat", "write it in `prompt`, without a system message")
        else:
            ids = self.encoder.source(text, 1 << 40)[0]
        if not ids and self.task:
            raise PromptError("the tokenizer makes no token of it", "write more")
        if (places := self.context) is not None and len(ids) > places - (self.task == "causal_lm"):
            raise PromptError(
                f"it has {len(ids):,} tokens, and the model reads {places:,}, with its answer", "shorten it"
            )
        return ids

    @property
    def context(self) -> int | None:
        """The most tokens that the model can read; None without a limit. A native GPT reads the last ones."""
        if not self.task:
            return None
        config = self.inner.config.get_text_config()
        if self.task == "seq2seq_lm":  # T5's `n_positions` limits nothing
            return getattr(config, "max_position_embeddings", None)
        return getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)

    @torch.no_grad()
    def answer(self, ids: Sequence[int], sampling: Sampling, write: Write = lambda _: None) -> Answer:
        """The answer to what :meth:`ids` gives; `write` gets its text piece by piece."""
        tokens = torch.tensor([ids], dtype=torch.int64, device=self.device)
        if self.task == "sequence_classification":
            shares = self.inner(input_ids=tokens).logits[0].float().softmax(dim=-1).tolist()
            named = {str(self.inner.config.id2label[number]): round(share, 6) for number, share in enumerate(shares)}
            return Answer(labels=dict(sorted(named.items(), key=lambda each: -each[1])))
        stream, stops = TextStream(self.encoder), self._stops()
        written: list[int] = []

        def take(*numbers: int) -> None:
            written.extend(numbers)
            if piece := stream.add(*(each for each in numbers if each not in stops)):
                write(piece)

        if self.task:
            self._generate(tokens, sampling, stops, take)
        else:
            temperature = TEMPERATURE if sampling.temperature is None else sampling.temperature
            generator, places = torch.Generator().manual_seed(sampling.seed), self.inner.positions.num_embeddings
            draw = Drawing(generator, temperature, 1.0 if sampling.top_p is None else sampling.top_p)
            for each in continued(self.inner, tokens, draw, count=sampling.tokens, places=places, stops=stops):
                take(each)
        if left := stream.end():
            write(left)
        return Answer(self.encoder.decode(stream.ids), len(written), bool(written) and written[-1] in stops)

    def answers(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Iterator[Answer]:
        """The answers to several prompts in their order: several at a time where that gives the same ones."""
        together = self._most_together(prompts, sampling)
        for start in range(0, len(prompts), together):
            if together > 1:
                yield from self._together(prompts[start : start + together], sampling)
            else:
                yield self.answer(prompts[start], sampling)

    def _most_together(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> int:
        """How many prompts are answered at a time: several where neither chance nor padding changes an answer."""
        longest = max(map(len, prompts)) + sampling.tokens
        if self.task != "causal_lm" or sampling.temperature != 0 or longest > (self.context or longest):
            return 1
        own = self.inner.generation_config.to_diff_dict()  # penalties and beams count what is padded, too
        if {*own} & _OF_WHOLE_TEXTS or self.inner.config.model_type not in KEEPS_APART:  # positions are not the mask's
            return 1
        return max(1, min(TOGETHER, TOKENS_TOGETHER // longest))

    @torch.no_grad()
    def _together(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Iterator[Answer]:
        """The answers to prompts that are padded on their left."""
        stops, begun = self._stops(), max(map(len, prompts))
        tokens = torch.zeros((len(prompts), begun), dtype=torch.int64, device=self.device)
        mask = torch.zeros_like(tokens)
        for row, ids in enumerate(prompts):
            tokens[row, begun - len(ids) :] = torch.tensor(ids, device=self.device)
            mask[row, begun - len(ids) :] = 1
        options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if stops:
            options["eos_token_id"] = sorted(stops)
        options["pad_token_id"] = min(stops, default=0)  # behind the end of an answer
        made = self.inner.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=sampling.tokens, **options)
        for written in made[:, begun:].tolist():
            end = next((place for place, each in enumerate(written) if each in stops), len(written))
            text = self.encoder.decode(written[:end])
            yield Answer(text, min(end + 1, len(written)), end < len(written))

    def _stops(self) -> frozenset[int]:
        configs = (self.inner.generation_config, self.inner.config) if self.task else ()
        return stop_ids(self.encoder, [getattr(each, "eos_token_id", None) for each in configs])

    def _generate(self, tokens: Tensor, sampling: Sampling, stops: frozenset[int], take: Callable[..., None]) -> None:
        """By transformers, with its cache of keys and values."""
        own = self.inner.generation_config
        if (temperature := sampling.temperature) is None:
            chosen = own.temperature if own.do_sample and own.temperature else TEMPERATURE
            temperature = 0.0 if self.task == "seq2seq_lm" and not own.do_sample else chosen
        options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if temperature > 0:
            top_p, top_k = own.top_p if sampling.top_p is None else sampling.top_p, own.to_diff_dict().get("top_k", 0)
            top_p = 1.0 if top_p is None else top_p
            options = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k, "num_beams": 1}
        begun, limit = tokens.shape[1], sampling.tokens
        if self.begun is not None:
            options |= {"decoder_input_ids": self.begun, "decoder_start_token_id": int(self.begun[0, 0])}
            begun = self.begun.shape[1]
        if self.context is not None:
            limit = min(limit, self.context - begun)
        in_beams = (options.get("num_beams") or own.num_beams or 1) > 1  # which end together
        if not in_beams:
            options["streamer"] = _Streamer(take)
        if stops:
            options["eos_token_id"] = sorted(stops)
        options["pad_token_id"] = self.encoder.padding if own.pad_token_id is None else own.pad_token_id
        torch.manual_seed(sampling.seed)
        mask = torch.ones_like(tokens)
        made = self.inner.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=limit, **options)
        if in_beams:
            take(*made[0, begun:].tolist())


class _Streamer:
    """What transformers hands each token to, after the prompt."""

    def __init__(self, take: Callable[..., None]) -> None:
        self._take, self._is_prompt = take, True

    def put(self, ids: Tensor) -> None:
        if not self._is_prompt:
            self._take(*ids.flatten().tolist())
        self._is_prompt = False

    def end(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Drawing:
    """How the next token is drawn. temperature: 0 takes the likeliest."""

    generator: torch.Generator
    temperature: float
    top_p: float = 1.0  # draws from the likeliest tokens that have this probability together (nucleus sampling)

    def __call__(self, logits: Tensor) -> int:
        """The token for logits (vocabulary,). On the CPU in fp32, so that every rank draws the same."""
        logits = logits.float().cpu()
        if self.temperature == 0:
            return int(logits.argmax())
        shares = (logits / self.temperature).softmax(dim=-1)
        if self.top_p < 1:
            ordered, places = shares.sort(descending=True)
            beyond = ordered.cumsum(dim=-1) - ordered >= self.top_p
            beyond[0] = False
            shares = shares.index_fill(0, places[beyond], 0.0)
        return int(torch.multinomial(shares, 1, generator=self.generator))


def continued(
    model: Callable[[Tensor], Tensor], tokens: Tensor, draw: Drawing, *, count: int, places: int, stops: Collection[int]
) -> Iterator[int]:
    """The ids with which a model continues tokens (1, length), up to `count`, or to one that stops, included.

    model: gives logits (1, length, vocabulary) for at most `places` tokens. Every rank must go through it, because
    weights may be sharded.
    """
    if not tokens.shape[1]:  # bytes have no token that begins a text
        tokens = tokens.new_zeros((1, 1))
    for _ in range(count):
        number = draw(model(tokens[:, -places:])[0, -1])
        yield number
        if number in stops:
            return
        tokens = torch.cat([tokens, tokens.new_tensor([[number]])], dim=1)


def beginning(encoder: Encoder, model: EncoderDecoder, device: torch.device) -> tuple[Tensor, int | None]:
    """The ids that the decoder begins with (1, ids), and the id that ends a target."""
    opening, closing = encoder.target_ends
    begun = model.begin(torch.tensor([[*opening, *closing] or [0]]))
    tokens = torch.cat([begun, torch.tensor([opening], dtype=torch.int64)], dim=1).to(device)
    return tokens, closing[0] if closing else None


def device_named(name: str) -> torch.device:
    """The device of a name; "" is the first GPU that torch can use, else the CPU. MachineError if torch cannot."""
    gpus = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    kind = name.partition(":")[0]
    if gpus.get(kind, True) is False:
        raise MachineError(f"--device {name}: torch {torch.__version__} can use none here", hint="--device cpu")
    try:
        return torch.device(name or next((each for each, usable in gpus.items() if usable), "cpu"))
    except RuntimeError as error:
        raise MachineError(f"--device {name} is no device of torch", hint="name cpu, cuda, cuda:1 or mps") from error


def _task_of(name: str) -> str:
    return next((task for end, task in _TASK_OF.items() if name.endswith(end)), "")


def open_checkpoint(checkpoint: Path, device: torch.device, *, trusted: bool = False) -> Answerer:
    """The model of a run's checkpoint, as an export has it. TrainingError if it writes nothing."""
    model, recipe, manifest = trained_model(checkpoint, trusted=trusted)
    inner: Any = getattr(model, "inner", model)
    task = recipe.model.task if isinstance(recipe.model, HfModel) else _task_of(type(inner).__name__)
    if recipe.model.kind != "gpt" and task not in _TASK_OF.values():
        what = f"{checkpoint} holds a {type(inner).__name__}, and {_WRITERS}"
        raise TrainingError(what, hint="export it, and call it yourself")
    if recipe.peft.kind == "lora":
        merge_adapters(model)
    cast_weights(inner, DTYPES[weights_format(recipe)])
    if task == "sequence_classification":
        name_labels(inner.config, label_names(recipe, manifest))
    if tokenizer_folder(recipe) is None and not is_of_bytes(recipe):
        what = f"{checkpoint} was trained on ready-made ids (data.kind: {recipe.data.kind}), whose tokenizer is unknown"
        raise TrainingError(what, hint="export it, copy the tokenizer's files into the folder, and name that")
    chats = (manifest.get("data") or {}).get("chats", True)  # of earlier releases nothing is known
    encoder = encoder_of(recipe, chats=chats)
    prefix = getattr(recipe.data, "prompt_prefix", None) or ""
    begun = beginning(encoder, model, device)[0] if isinstance(model, EncoderDecoder) else None
    return Answerer(inner.to(device).eval(), task, encoder, device, prefix, begun)


def open_folder(folder: Path, device: torch.device) -> Answerer:
    """The model of a folder that transformers, peft or an export has written. TrainingError if there is none."""
    refuse_special(str(folder), "the model")
    config, adapters = read_json(folder / CONFIG), read_json(folder / lora.CONFIG)
    is_own = str(config.get("model_type", "")).startswith("trainkit-")
    if is_own and (adapters or config["model_type"] != "trainkit-gpt"):
        what = f"{folder} holds a part of a model, whose other part is only in trainkit: in its run"
        raise TrainingError(what, hint="name the run, or its checkpoint")
    kinds = [str(adapters.get("task_type"))] if adapters else [str(each) for each in config.get("architectures") or ()]
    task = next(filter(None, map(_task_of, kinds)), "")
    if not (task or is_own):
        what = f"{folder} holds {', '.join(kinds) or 'no model that its config.json names'}"
        raise TrainingError(f"{what}, and {_WRITERS}", hint="see docs/use.md")
    if adapters and not (folder / lora.WEIGHTS).is_file():  # without it peft reads pickles
        raise TrainingError(f"there is no {folder / lora.WEIGHTS}", hint="write the adapters as safetensors")
    base = str(adapters.get("base_model_name_or_path")) if adapters else str(folder)
    known: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if Path(base).is_dir():
        refuse_special(base, "the base model")
    else:
        known["revision"] = adapters.get("revision") or "main"
    if adapters and task == "sequence_classification":
        known["num_labels"] = _number_of_labels(folder)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
    inner: Any
    try:
        if is_own:
            inner = Gpt(GptModel.model_validate(config["model"]), int(config["sequence_length"]))
            files = {*(weight_files(folder) or {WEIGHTS: folder / WEIGHTS}).values()}
            inner.load_state_dict({name: each for file in files for name, each in load_file(file).items()})
        else:
            import transformers

            transformers.utils.logging.set_verbosity_error()
            transformers.utils.logging.disable_progress_bar()
            inner = getattr(transformers, TASKS[task][0]).from_pretrained(base, torch_dtype="auto", **known)
        if adapters:
            inner = _with_adapters(inner, folder)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # the libraries, and the Rust below them, raise anything
        hint = "export it again"
        if adapters:
            on_disk = Path(base).is_absolute()
            where = f"in {base}, or where {lora.CONFIG} says" if on_disk else f"here: hf download {base}"
            hint = f"the adapters' base must be {where}"
        raise TrainingError(f"{public_name(base)} cannot be loaded: {first_line(error)}", hint=hint) from error
    encoder = _encoder_in(next((each for each in (folder, Path(base)) if tokenizer_files(each)), folder))
    begun = beginning(encoder, EncoderDecoder(inner), device)[0] if task == "seq2seq_lm" else None
    return Answerer(inner.to(device).eval(), task, encoder, device, begun=begun)


def _with_adapters(model: Any, folder: Path) -> Any:
    """The model with adapters merged in: in 32 bits, as in an export. What peft imports and calls says nothing."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        from peft import PeftModel

        dtype = model.dtype
        merged = PeftModel.from_pretrained(model.float(), str(folder)).merge_and_unload()
    cast_weights(merged, dtype)
    return merged


def _encoder_in(folder: Path) -> Encoder:
    if not tokenizer_files(folder):
        raise TrainingError(f"{folder} has no tokenizer", hint="copy that of its model into it")
    return open_encoder(str(folder))


def _number_of_labels(folder: Path) -> int:
    """Of a classifier's adapters: the layer that gives the labels is the narrowest that is saved whole."""
    whole = [each for name, each in load_file(folder / lora.WEIGHTS).items() if ".lora_" not in name and each.dim() > 1]
    return min((each.shape[0] for each in whole), default=2)
