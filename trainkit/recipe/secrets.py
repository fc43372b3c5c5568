"""Which values are secrets, by their names or by themselves, and how values and lines are shown without them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

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
# `data_file_keys`: what may stand between such a word and the one that counts.
_BETWEEN = _set("file path field name")
# `num_keys`, `use_auth_token`, `append_concat_token`: how many, or whether.
_COUNTS = _set("num n nr number use no has add append prepend with without skip is enable disable keep")
# Whose key or token it is: such a one is never a plain word.
_OWNERS = _set(
    "api auth access hf hub huggingface wandb github gitlab openai anthropic aws azure google gcp comet mlflow neptune "
    "kaggle slack telegram session refresh private signing encryption bearer service deploy"
)
# `PGPASSWORD`, `DB_PASS`, `vaultpass`, `PASS_PHRASE`, but not `forward_pass`; `COMPASS` and `PASSES` are other words.
_PASSWORDS = ("password", "passwords", "passwd", "passphrase", "passphrases", "passcode", "passcodes")
_PASS_ENDS = _set("phrase code word wd")
_PASSES = _set(
    "forward backward first second last one two single multi low high band all by full per num n max min train eval"
    " com encom tres sur over under re sub render get surrogate"
)
_SWITCHES = _set("true false yes no on off none null auto")
_NUMBER = re.compile(r"[+-]?\d{1,9}(\.\d{0,9})?([eE][+-]?\d{1,3})?")
# A word, or an entry of a vocabulary (`<cat-toy>`, `[MASK]`).
_PLAIN_WORD = re.compile(r"(?=.{1,16}$)[A-Za-z]?[a-z]*([_.-][a-z]+)*|(<[\w|/-]{1,24}>[+,]?)+|\[[A-Z]{1,12}\]")
# Tokens by their beginning and length, as the services make them and secret scanners know them, and keys in PEM.
_TOKENS = (
    "hf_[A-Za-z0-9]{34}", "gh[opsur]_[A-Za-z0-9]{36}", r"github_pat_\w{50,}", r"glpat-[\w-]{20,}",
    "sk-[A-Za-z0-9]{20,}", r"sk-(?:proj|svcacct|admin|ant|or)-[\w-]{20,}", "[sr]k_live_[A-Za-z0-9]{20,}",
    "A[KS]IA[A-Z0-9]{16}", r"AIza[\w-]{35}", r"xox[abeoprs]-[\w-]{10,}", "npm_[A-Za-z0-9]{36}", r"pypi-[\w-]{50,}",
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----(?s:.*)",
)  # fmt: skip
_KEY = re.compile(
    r"(-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----)((?:(?!(?:\n[^\w\n]{0,80})?-----END|\n@@ |\ndiff --git ).)*)", re.DOTALL
)
# What stands for a value: `$PW`, `$db_pw`, `${PW}`, `$(cat pw)`, `<password>`, `{pw}`, `%s`, `***`; not `$Geheim7`.
_STANDS_FOR = (
    r"(?:\$(?:[A-Z_][A-Z0-9_]*|\d|[a-z]+(?:_[a-z0-9]+|[A-Z][a-z]+)*)(?!\w)|\$\{(?:[^{}]|\{[^{}]*\})*\}|\$\([^()]*\)"
    r"|<[^<>]*>|\{+[^{}]*\}+|%s|%\(\w+\)s|%\w+%|\*{3}|\.{3}|…)"
)
_ENDS = r"(?:[/\s?#,;&|)\]}>]|$)"
# A password in a URL, or in a path that one became (`https:/u:…`). It may hold `/` and blanks; a port is none.
_BY_VALUE = re.compile(
    r"""(?:(?<=://)|(?<=[a-z]{2}:/))(?P<user>[^\s/@:"'\[?#]*:)"""
    rf"(?!\s|\d{{1,5}}{_ENDS}|{_STANDS_FOR}+(?:@|{_ENDS}))"
    r"""(?:(?:(?!:/)[^\s"'])+(?=@)|(?:(?!:/)[^"'\n])+?(?=@[\w.\[]))"""
    rf"|(?<![A-Za-z0-9])(?:{'|'.join(_TOKENS)})(?![A-Za-z0-9])"
)
# `user:password@registry/image`; `name:tag@sha256:…` is none.
_LOGIN = re.compile(
    rf"""(?<![\w@:/.$-])(?P<user>[\w.-]+:)(?!{_STANDS_FOR}+@)[^\s/@:"'}}]+(?=@(?!sha\d)[\w.-]+(?::\d+)?/)"""
)
_WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
# A name is the whole of a run of name characters behind what cannot begin it. The lookbehind and the possessive
# quantifiers keep the search from trying every shorter name in a long word, which would take quadratic time.
_ASSIGNED = re.compile(
    r"""(?<![\w.\-])(?:(?![A-Za-z0-9_])[\w.\-])*+(?P<name>[A-Za-z0-9_][\w.\-]*+)"""
    r"""(?P<between>["']?\s*[+!]?(?:[:=]|\s(?=\S))\s*)"""
)
# `NAME=value` inside of a value: a word for a shell, a part of a URL's query. Code (`key=len(x)`) and paths are none.
_SET = re.compile(r"(?<![\w.\-])(?:(?![A-Za-z0-9_])[\w.\-])*+(?P<name>[A-Za-z0-9_][\w.\-]*+)=")
_SET_TO = re.compile(
    rf"""(?!\\?["']?(?:{_STANDS_FOR}(?!\w)|\$[({{]|`|[A-Za-z_][\w.]*[(\[]))("[^"]*"?|'[^']*'?|[^\s"']+)"""
)
_VARIABLE = re.compile(r"[A-Za-z_]{1,24}(\.[A-Za-z_]{1,24})*")
_PATH = re.compile(r"(?:~|\.{0,2})/[\w./-]*")
# `{name: DB_PASS, value: …}`, as Kubernetes writes variables.
_FLAT = re.compile(r"\{[^{}]*\}")
_NAMED = re.compile(r"""(?<![\w.\-])name\\?["']?\s*:\s*\\?["']?([\w.\-]+)""")
_VALUED = re.compile(r"""((?<![\w.\-])value\\?["']?\s*:\s*)("(?:[^"\\]|\\.)*"?|'[^']*'?|[^,}]+)""")
_VALUE = re.compile(r"""\s*("(?:[^"\\]|\\.)*"?|'[^']*'?|[^\s,}\]]+)""")


class SecretHolder(NamedTuple):
    """What holds a secret: the name of a variable, flag or setting (empty for a word alone), and what tells it."""

    name: str
    by: Literal["", "name", "value"]


def mask_values(text: str) -> str:
    """The text without what is a secret whatever its name: passwords in URLs, tokens of services, private keys."""
    return _LOGIN.sub(rf"\g<user>{MASK}", _mask_values(text))


def _mask_values(text: str) -> str:
    text = _BY_VALUE.sub(lambda match: f"{match['user'] or ''}{MASK}", text)
    if "=" not in text:
        return text
    shown, position = [], 0
    for match, end in _set_secrets(text):
        shown += [text[position : match.end()], MASK]
        position = end
    return "".join([*shown, text[position:]])


def _set_secrets(text: str) -> Iterator[tuple[re.Match[str], int]]:
    """Where the text gives a value to the name of a secret (`DB_PASS=…`), each with the end of the value."""
    position = 0
    for match in _SET.finditer(text):
        name = match["name"].rpartition(".")[2]
        if match.start() < position or not is_secret_name(name):
            continue
        value = _SET_TO.match(text, match.end())
        if value and _is_set(name, value[1].strip("\"'\\")):
            position = value.end()
            yield match, position


def _is_set(name: str, value: str) -> bool:
    """Whether a value that stands in the midst of others is a secret: `key=value` and `ssh-key=~/.ssh/id` are none."""
    if not _is_secret_by_name(name, value):
        return False
    words = [word.lower() for word in _WORDS.findall(name)]
    if _says_password(words):
        return True
    if any(word in _OWNERS for word in words):
        return _PATH.fullmatch(value) is None
    harmless = (_NUMBER, _PLAIN_WORD, _PATH, _VARIABLE)
    return words[-1] not in ("key", "keys") and not any(each.fullmatch(value.rstrip(",;)]}")) for each in harmless)


def mask_private_keys(text: str) -> str:
    """The text without the bodies of private keys, as many lines as before. A hunk of a diff may lack their ends."""
    return _KEY.sub(lambda match: match[1] + re.sub(r"(?<=\n)([-+ ]?)[^\n]+", rf"\1{MASK}", match[2]), text)


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
    if _says_password(words):
        return True
    named = [word for word in words[:-1] if word not in _BETWEEN]
    return words[-1] in _WEAK and words[0] not in _COUNTS and not (named and named[-1] in _HARMLESS)


def _says_password(words: Sequence[str]) -> bool:
    """Whether a name's words say that its value is a secret whatever it is."""
    if any(word in _STRONG or word.endswith(_PASSWORDS) for word in words):
        return True
    named = [word for word in words if not word.isdigit() and word not in _TRAILING]
    if len(named) > 1 and named[-1] in _PASS_ENDS:
        named.pop()
    if not named or not named[-1].endswith("pass"):
        return False
    return named[-1].removesuffix("pass") not in _PASSES and (len(named) == 1 or named[-2] not in _PASSES)


def why_secret(name: str, value: object) -> Literal["", "name", "value"]:
    """What tells that a value under a name is a secret; empty where it is none."""
    if is_secret_name(name) and _is_secret_by_name(name, value):
        return "name"
    if not isinstance(value, str):
        return ""
    known = mask_values if name == "image" else _mask_values
    return "value" if known(value) != value else ""


def _is_secret_by_name(name: str, value: object) -> bool:
    """Never a switch, and for names that say little no number or plain word.

    A password or a bare ``--token`` may be anything, and so may a service's key; ``--sort_by_key name`` and
    ``--token_type_key 3`` are none.
    """
    text = str(value).strip()
    if value is None or text == "" or text.lower() in _SWITCHES or not is_secret_name(name):
        return False
    words = [word.lower() for word in _WORDS.findall(name)]
    if len(words) == 1 or _says_password(words) or any(word in _OWNERS for word in words):
        return True
    return not (_NUMBER.fullmatch(text) or _PLAIN_WORD.fullmatch(text))


def mask(value: object) -> str:
    """What is shown in place of a secret value: nothing of it, not even its length."""
    return MASK if value not in (None, "") else str(value or "")


def mask_line(line: str) -> str:
    """The line without secrets by value, and without the values of secret names (``HF_TOKEN: abc``, ``TOKEN=abc``)."""
    shown, position = [], 0
    line = _FLAT.sub(_mask_pair, mask_values(line))
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


def _mask_pair(match: re.Match[str]) -> str:
    name = _NAMED.search(match[0])
    return _VALUED.sub(rf"\1{MASK}", match[0]) if name and is_secret_name(name[1]) else match[0]


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
    return ends and not why_secret(name.rpartition(".")[2] or name, value[1].strip("\"'"))


def mask_words(words: Sequence[str]) -> list[str]:
    """The words of a command line without secret values (``--token abc``, ``--api-key=abc``, ``env.HF_TOKEN=abc``)."""
    secret = {position for position, held in secret_arguments(words).items() if held.by == "name"}
    return [
        MASK if position in secret and not word.startswith("-") else mask_line(word)
        for position, word in enumerate(words)
    ]


def secret_arguments(arguments: Sequence[object]) -> dict[int, SecretHolder]:
    """Words of an argument list that hold a secret (``--token=abc``, or ``abc`` behind ``--token``), by position."""
    found: dict[int, SecretHolder] = {}
    flag = ""
    for position, word in enumerate(arguments):
        name, value, flag = flag, word, ""
        if isinstance(word, str) and word.startswith("-"):
            name, equals, behind = word.lstrip("-").partition("=")
            value, flag = (behind, "") if equals else ("", name)
        if by := why_secret(name, value):
            found[position] = SecretHolder(name or _name_in(str(word)), by)
    return found


def secret_keys(tree: object, prefix: str = "") -> Iterator[tuple[str, SecretHolder]]:
    """Keys of values that are secrets: scalars and elements of lists, by the names above them or by themselves.

    And names that hold one, and the `value` beside a `name` that says so, as Kubernetes writes variables.
    """
    if not isinstance(tree, Mapping):
        return
    if why_secret(str(tree.get("name")), tree.get("value")) == "name":
        yield f"{prefix}value", SecretHolder(str(tree["name"]), "name")
    for raw, value in tree.items():
        name = raw.rstrip("+!")
        key = f"{prefix}{name}"
        if why_secret("", name):
            yield key, SecretHolder("", "value")
        if isinstance(value, Mapping):
            yield from secret_keys(value, f"{key}.")
        elif isinstance(value, list):
            found = {
                position: SecretHolder(name, by)
                for position, each in enumerate(value)
                if (by := why_secret(name, each))
            }
            found |= secret_arguments(value)
            yield from ((f"{key}.{position}", held) for position, held in sorted(found.items()))
            for position, each in enumerate(value):
                yield from secret_keys(each, f"{key}.{position}.")
        elif by := why_secret(name, value):
            yield key, SecretHolder(name, by)
        # A variable is for a tool, and may be a credential whatever it looks like.
        elif prefix == "env." and is_secret_name(name) and why_secret("secret", value):
            yield key, SecretHolder(name, "name")


def _name_in(word: str) -> str:
    """The name of the secret that a word gives a value to; empty for one that is known by itself."""
    return next((match["name"] for match, _ in _set_secrets(word)), "")
