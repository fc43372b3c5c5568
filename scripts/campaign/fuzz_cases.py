"""Cases for the campaign `fuzz`: recipes, words, environments, imports and records of runs, each from one seed."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from cases import ROOT, changed

from trainkit.recipe.schema.fields import Setting, members, schema
from trainkit.tools.accelerate.launcher import FLAGS as ACCELERATE
from trainkit.tools.deepspeed.launcher import FLAGS as DEEPSPEED
from trainkit.tools.torchrun import FLAGS as TORCHRUN

CORPUS = ROOT / "tests" / "corpus"
MACHINES = ("8xh100", "1x4090", "laptop-cpu", "m3-max")
# What nobody expects in the place of a value.
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 10**30, -(10**30), 0.0, -0.0, 1e308, -1e308, 1e-320, float("nan"), float("inf"),
    "", " ", "0", "1e3", "null", "~", "~/x", "/", "..", "../../etc/passwd", "a" * 5000, "\0", "a\0b", "\ud800",
    "é\u202e",
    "${", "${}", "${train}", "${train.steps}", "${oc.env:HOME}", "${oc.env:NOTHING}", "${oc.env:API_KEY,x}", "$(id)",
    "`id`", "%s", "{x}", "-", "--", "-x", "@", "*", "!", "&a", "*a", "x: y", "[", "]", "{", "}", [], [[]], [None], {},
    {"": ""}, {"a": {"b": {"c": []}}}, [1, "a", None, {}], ["x"] * 300, "auto", "none", "all",
)  # fmt: skip
MODIFIERS = ("", "", "", "", "!", "+", "++", "!+", " ")
SHELL = (
    "$X", "${X:-2}", "$(cat y)", "$((1+2))", "'a b'", '"$HOME/x"', "~", "*.json", "{a,b}", "<model>", "\\", "|", "&&",
    ";",
    "> log", "2>&1", "#", "$@", '"', "'", "`", "(", ")", "<<EOF", "--", "=", "\n", "\t", "\0", "é",
)  # fmt: skip


@dataclass
class Case:
    """files: text or bytes by name, in the folder of the case; argv: of trainkit; environ: added variables."""

    kind: str
    argv: list[str]
    files: dict[str, bytes] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)


def case_of(seed: int, kinds: tuple[str, ...] | None = None) -> Case:
    """The case of a seed."""
    draw = random.Random(seed)
    return KINDS[draw.choice(kinds or tuple(KINDS))](draw)


def value_for(draw: random.Random, setting: Setting) -> Any:
    """A value of a setting: one that it takes, or anything."""
    if draw.random() < 0.4:
        return draw.choice(ODD)
    kinds = [member for member, _ in members(setting.annotation)]
    kind = draw.choice(kinds) if kinds else str
    if get_origin(kind) is list:
        return [draw.choice(ODD) for _ in range(draw.randrange(4))]
    if literal := [each for each in get_args(kind) if isinstance(each, str | int)]:
        return draw.choice(literal)
    simple: dict[Any, Callable[[], Any]] = {
        bool: lambda: draw.random() < 0.5,
        int: lambda: draw.choice((0, 1, 2, 3, 8, 1000, 4096, 10**6)),
        float: lambda: draw.choice((0.0, 1e-5, 0.1, 1, 3.5, 1e6)),
        str: lambda: draw.choice(("x", "a/b", "train.py", "1", "h:29500")),
    }
    return simple.get(kind, lambda: draw.choice(ODD))()


def tree_of(draw: random.Random, most: int = 7) -> dict[str, Any]:
    """A recipe of some settings, right and wrong, with modifiers and unknown keys."""
    settings, tree = list(schema().all_settings()), dict[str, Any]()
    for setting in draw.sample(settings, draw.randrange(1, most)):
        parts = setting.key.split(".")
        below: Any = tree
        for part in parts[:-1]:
            below = below.setdefault(part + draw.choice(MODIFIERS), {})
            if not isinstance(below, dict):
                break
        else:
            name = parts[-1] if draw.random() < 0.97 else "".join(draw.sample(string.ascii_lowercase, 4))
            below[name + draw.choice(MODIFIERS)] = value_for(draw, setting)
    if draw.random() < 0.5:
        tree.setdefault("train", {"steps": 3})
    if draw.random() < 0.2:
        tree["extends"] = draw.choice(
            ("strategy/fsdp", "devices/cpu", ["strategy/zero2"], "r.yaml", "gone", None, [[]], 3)
        )
    if draw.random() < 0.1:
        tree["variants"] = draw.choice(
            ({"a": {"train": {"steps": 1}}}, {"a": None}, {"": {}}, [], {"a": {"extends": "x"}})
        )
    return tree


def dumped(tree: Any) -> str:
    """YAML, or JSON where YAML cannot say it."""
    try:
        return str(yaml.safe_dump(tree, allow_unicode=True, sort_keys=False))
    except (yaml.YAMLError, UnicodeEncodeError):
        return json.dumps(tree)


def damaged(draw: random.Random, content: bytes) -> bytes:
    """A few bytes or lines taken out, doubled, moved or made up."""
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(len(content) + 1)
        what = draw.randrange(7)
        if what == 0:
            content = content[:place]
        elif what == 1:
            content = (
                content[:place] + bytes(draw.randrange(256) for _ in range(draw.randrange(1, 5))) + content[place:]
            )
        elif what == 2:
            content = content[:place] + content[place + draw.randrange(1, 9) :]
        elif what == 3:
            lines = content.split(b"\n")
            lines.insert(draw.randrange(len(lines) + 1), draw.choice(lines))
            content = b"\n".join(lines)
        elif what == 4:
            lines = content.split(b"\n")
            draw.shuffle(lines)
            content = b"\n".join(lines) if draw.random() < 0.3 else content
        elif what == 5:
            piece = draw.choice(
                (b"\t", b"\xef\xbb\xbf", b"\xff\xfe", b"&a ", b"*a", b"<<: *a", b"? ", b"- ", b"---\n", b"%")
            )
            content = content[:place] + piece + content[place:]
        else:
            content = content.replace(
                *draw.choice(((b":", b""), (b" ", b""), (b"\n", b"\r\n"), (b'"', b"'"), (b"0", b"9" * 30)))
            )
    return content


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape" if "\udc80" <= max(text, default="") <= "\udcff" else "replace")


def _typed(value: Any) -> str:
    """As a word or a variable can hold it: no NUL, and no half of a surrogate pair but as a byte that is not UTF-8."""
    return str(value).replace("\0", "").replace("\ud800", "\udcff")


def _command(draw: random.Random, recipe: str) -> list[str]:
    on = ["--on", draw.choice(MACHINES)]
    return draw.choice((
        ["check", recipe], ["plan", recipe, *on], ["plan", recipe, *on, "--json"], ["plan", recipe, *on, "--shell"],
        ["explain", recipe], ["plan", recipe, *on, "--diff", "quickstart"],
    ))  # fmt: skip


def _recipe(draw: random.Random) -> Case:
    content = _encoded(dumped(tree_of(draw)))
    return Case("recipe", _command(draw, "r.yaml"), {"r.yaml": content})


def _damaged_recipe(draw: random.Random) -> Case:
    source = draw.choice(sorted((ROOT / "recipes").glob("*.yaml")))
    return Case("damaged recipe", _command(draw, "r.yaml"), {"r.yaml": damaged(draw, source.read_bytes())})


def _words(draw: random.Random) -> Case:
    words = []
    for setting in draw.sample(list(schema().all_settings()), draw.randrange(1, 5)):
        value = str(value_for(draw, setting))
        flag = f"--{setting.flag or setting.key}"
        words += draw.choice(([f"{setting.key}{draw.choice(MODIFIERS)}={value}"], [flag, value], [f"{flag}={value}"]))
    words += draw.choice(
        ([], ["--with", draw.choice(("strategy/fsdp", "x", "")), "--variant", "y"], [str(draw.choice(ODD))])
    )
    return Case("words", [*_command(draw, "quickstart"), *map(_typed, words)])


def _environment(draw: random.Random) -> Case:
    environ = {}
    for setting in draw.sample(list(schema().all_settings()), draw.randrange(1, 4)):
        name = "TRAINKIT__" + setting.key.upper().replace(".", "__") + draw.choice(("", "", "", "__X", "_"))
        environ[name] = _typed(value_for(draw, setting))
    return Case("environment", _command(draw, "quickstart"), environ=environ)


def _line(draw: random.Random) -> Case:
    tool = draw.choice(
        (["torchrun"], ["accelerate", "launch"], ["deepspeed"], ["python"], ["trl", "sft"], ["fabric", "run"])
    )
    flags = {"torchrun": TORCHRUN, "accelerate": ACCELERATE, "deepspeed": DEEPSPEED}.get(tool[0], ())
    words = list(tool)
    for flag in draw.sample(list(flags), min(len(flags), draw.randrange(5))):
        words.append(f"--{flag.name}")
        if not flag.switch:
            words.append(draw.choice(("2", "1", "gpu", "x", "bf16", draw.choice(SHELL), str(draw.choice(ODD)))))
    words += [draw.choice(("train.py", "-m pkg.main", "", draw.choice(SHELL)))]
    words += [
        draw.choice((f"--{draw.choice(('lr', 'bf16', 'token', 'x'))}", draw.choice(SHELL), str(draw.choice(ODD))))
        for _ in range(draw.randrange(5))
    ]
    if draw.random() < 0.4:
        words.insert(0, draw.choice(("CUDA_VISIBLE_DEVICES=1,0", "X=3", "export Y=2;", "cd d &&", "nohup", "srun -N2")))
    text = draw.choice((" ", " ", " ", " \\\n")).join(words)
    if draw.random() < 0.5:
        return Case("import", ["import", "go.sh"], {"go.sh": _encoded(text), "train.py": b"import torch\n"})
    return Case("import", ["import", _typed(text)], {"train.py": b"import transformers.Trainer\n"})


def _corpus_file(draw: random.Random) -> Case:
    source = draw.choice(sorted(path for path in CORPUS.rglob("*") if path.is_file() and path.suffix != ".md"))
    content = source.read_bytes()
    if source.suffix == ".json" and draw.random() < 0.7:
        content = json.dumps(changed(draw, json.loads(content), ODD)).encode()
    else:
        content = damaged(draw, content)
    name = f"x{source.suffix}"
    program = ["--", "train.py", "--deepspeed", name] if draw.random() < 0.3 and source.suffix == ".json" else []
    return Case("file", ["import", name, *program], {name: content, "train.py": b"from transformers import Trainer\n"})


def records() -> Mapping[str, Any]:
    """What a run leaves, by its place in the run directory; a whole run as trainkit writes it, but for long texts."""
    verdict = {"exit_code": 0, "failure": None, "why": "", "rank": None, "signal": None}
    manifest = {"step": 4, "training_digest": "d", "strategy": "single", "world_size": 1, "files": {}, "best": {}}
    who = {
        "name": "r",
        "strategy": "single",
        "launcher": "python",
        "program": "builtin",
        "device": "cpu",
        "world_size": 1,
    }
    rank = {"rank": 0, "local_rank": 0, "host": "h", "wrapper_pid": 2, "pid": 3, "ended": 9.0, "exit_code": 0}
    status = {
        "state": "ended",
        "run_id": "20260101-000000-abcdef",
        "attempt": 1,
        "started": 1.0,
        "ended": 9.0,
        "host": "h",
    }
    pids = {"trainkit": 1, "ranks": {"0": 3}}
    shown = {
        "steps": 4,
        "final_loss": 2.5,
        "wall_seconds": 8.0,
        "in_force": {"0": {}},
        "memory": [{"rss": 1}],
        "reasons": {},
    }
    return {
        "status.json": {**status, **verdict, "pids": pids, "survivors": []},
        "summary.json": {**verdict, **who, **shown},
        "attempts/1/ranks/rank-0.json": rank,
        "metrics.jsonl": {"event": "start", "steps": 4},
        "checkpoints/step-00000004/manifest.json": manifest,
    }


def _run(draw: random.Random) -> Case:
    root, found = "runs/quickstart/20260101-000000-abcdef", dict(records())
    found["plan.json"] = json.loads(PLAN.read_text()) if PLAN.exists() else {}
    name = draw.choice(list(found))
    files = {f"{root}/{each}": json.dumps(tree).encode() for each, tree in found.items()}
    whole = files[f"{root}/{name}"]
    files[f"{root}/{name}"] = (
        json.dumps(changed(draw, found[name], ODD)).encode() if draw.random() < 0.6 else damaged(draw, whole)
    )
    argv = draw.choice((
        ["runs", "list"], ["runs", "list", "--json"], ["runs", "show"], ["runs", "show", root], ["check", root],
        ["plan", "quickstart", "--on", "laptop-cpu", "checkpoint.resume=auto"],
        ["plan", "quickstart", "--on", "laptop-cpu", f"checkpoint.resume={root}/checkpoints/step-00000004"],
        ["plan", "quickstart", "--on", "laptop-cpu", "--diff", root],
        ["plan", "quickstart", "--on", "laptop-cpu", "--diff", f"{root}/plan.json"],
    ))  # fmt: skip
    return Case("run", argv, files)


PLAN = Path()  # of a whole plan, which the campaign makes at its start
KINDS: Mapping[str, Callable[[random.Random], Case]] = {
    "recipe": _recipe,
    "damaged recipe": _damaged_recipe,
    "words": _words,
    "environment": _environment,
    "import": _line,
    "file": _corpus_file,
    "run": _run,
}
