"""Which values are secrets by their names and looks, and how a value or a line of text is shown without them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

MASK = "***"  # the same for every value, so that not even a length is shown


def _set(words: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", words))


# Any of these as a whole word makes a name secret, unless it ends in a word that says it only points to the secret.
_STRONG = _set(
    "secret secrets password passwd passphrase pwd credential credentials apikey apikeys apitoken authtoken accesskey"
)
# These words also name harmless things, so they count only at the end of a name.
_WEAK = _set("key token keys auth bearer")
_POINTERS = _set("file path dir directory name id url uri length len size count num type field column")
# `HF_TOKEN_2`, `API_KEY_PROD`: what may follow the word that counts.
_TRAILING = _set("prod production dev test staging value b64 base64 ci main default")
# Words before `token` and `key` that make them vocabulary or column names (`--pad_token`, `text_key`).
_HARMLESS = _set(
    "pad eos bos unk sep cls mask image audio video special start end stop prefix suffix middle fim decoder forced"
    " text label labels prompt response sort primary foreign column row group index dataset data sample cache map"
    " source target input output messages message partition public max min placeholder modifier initializer trigger"
    " class unique instance concept"
)
# `num_keys`, `use_auth_token`, `append_concat_token`: how many, or whether.
_COUNTS = _set("num n nr number use no has add append prepend with without skip is enable disable keep")
# Whose key or token it is: such a one is never a plain word.
_OWNERS = _set(
    "api auth access hf hub huggingface wandb github gitlab openai anthropic aws azure google gcp comet mlflow neptune "
    "kaggle slack telegram session refresh private signing encryption bearer service deploy"
)
_SWITCHES = _set("true false yes no on off none null auto")
_NUMBER = re.compile(r"[+-]?\d{1,9}(\.\d{0,9})?([eE][+-]?\d{1,3})?")
# A word, or an entry of a vocabulary (`<cat-toy>`, `[MASK]`).
_PLAIN_WORD = re.compile(r"(?=.{1,16}$)[A-Za-z]?[a-z]*([_.-][a-z]+)*|(<[\w|/-]{1,24}>[+,]?)+|\[[A-Z]{1,12}\]")
_WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
# A name is the whole of a run of name characters behind what cannot begin it. The lookbehind and the possessive
# quantifiers keep the search from trying every shorter name in a long word, which would take quadratic time.
_ASSIGNED = re.compile(
    r"""(?<![\w.\-])(?:(?![A-Za-z0-9_])[\w.\-])*+(?P<name>[A-Za-z0-9_][\w.\-]*+)"""
    r"""(?P<between>["']?\s*[+!]?(?:[:=]|\s(?=\S))\s*)"""
)
_VALUE = re.compile(r"""\s*("(?:[^"\\]|\\.)*"?|'[^']*'?|[^\s,}\]]+)""")


def public_names(listed: object) -> tuple[str, ...]:
    """What `program.public` lists, before it is known to be a list of names."""
    return tuple(map(str, listed)) if isinstance(listed, Sequence) and not isinstance(listed, str) else ()


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether a variable's or argument's name says, in a whole word, that its value is a secret.

    Words end at ``_``, ``-``, ``.`` and case changes, so ``tokenizer_name``, ``max_tokens`` and
    ``num_key_value_heads`` say nothing.
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    while len(words) > 1 and (words[-1].isdigit() or words[-1] in _TRAILING):
        words.pop()
    if not words or words[-1] in _POINTERS:
        return False
    if any(word in _STRONG for word in words):
        return True
    return words[-1] in _WEAK and words[0] not in _COUNTS and not (len(words) > 1 and words[-2] in _HARMLESS)


def is_secret(name: str, value: object) -> bool:
    """Whether a value under a name is a secret: never a switch, and for names that say little no number or plain word.

    A password or a bare ``--token`` may be anything, and so may a service's key; ``--sort_by_key name`` and
    ``--token_type_key 3`` are none.
    """
    text = str(value).strip()
    if value is None or text == "" or text.lower() in _SWITCHES or not is_secret_name(name):
        return False
    words = [word.lower() for word in _WORDS.findall(name)]
    if len(words) == 1 or any(word in _STRONG or word in _OWNERS for word in words):
        return True
    return not (_NUMBER.fullmatch(text) or _PLAIN_WORD.fullmatch(text))


def mask(value: object) -> str:
    """What is shown in place of a secret value: nothing of it, not even its length."""
    return MASK if value not in (None, "") else str(value or "")


def mask_line(line: str) -> str:
    """The line with the values of secret names replaced (``HF_TOKEN: abc``, ``--api-key=abc``, ``TOKEN=abc``)."""
    shown, position = [], 0
    bracketed = "{" in line or "[" in line
    for match in _ASSIGNED.finditer(line):
        if match.start("name") < position or not _assigns_secret(match, line):
            continue
        value = _VALUE.match(line, match.end())
        if value is None or _is_harmless(match["name"], value, line):
            continue
        shown += [line[position : match.end()], MASK]
        # What an unquoted value runs on to cannot be seen from a line alone: outside brackets it is the whole rest.
        quoted = line[match.end() : match.end() + 1] in "\"'"
        position = value.end() if quoted or bracketed else len(line)
    return "".join([*shown, line[position:]])


def _assigns_secret(match: re.Match[str], line: str) -> bool:
    """A name and a blank alone assign only behind dashes: `--token abc` does, `the token abc` does not."""
    name = match["name"]
    if not is_secret_name(name.rpartition(".")[2] or name):
        return False
    start = match.start("name")
    return match["between"].strip(" \t\"'") != "" or line[start - 1 : start] == "-"


def _is_harmless(name: str, value: re.Match[str], line: str) -> bool:
    """Whether a whole value is no secret; of an unquoted text the line may show only the first word."""
    ends = re.match(r"\s*($|[,}\]]|-)", line[value.end() : value.end() + 80]) is not None
    return ends and not is_secret(name.rpartition(".")[2] or name, value[1].strip("\"'"))


def mask_words(words: Sequence[str]) -> list[str]:
    """The words of a command line without secret values (``--token abc``, ``--api-key=abc``, ``env.HF_TOKEN=abc``)."""
    secret = set(secret_arguments(words))
    return [
        MASK if position in secret and not word.startswith("-") else mask_line(word)
        for position, word in enumerate(words)
    ]


def secret_arguments(arguments: Sequence[object]) -> list[int]:
    """Positions of words in an argument list that hold a secret (``--token=abc``, or ``abc`` behind ``--token``)."""
    found = []
    for position, word in enumerate(arguments):
        if not isinstance(word, str) or not word.startswith("-"):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if equals:
            found += [position] if is_secret(name, value) else []
        elif position + 1 < len(arguments) and is_secret(name, behind := str(arguments[position + 1])):
            found += [] if behind.startswith("-") else [position + 1]
    return found
