"""Attacks by recipes, command lines, scripts and other tools' files from strangers."""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import security_content as hostile
import yaml
from security_judge import PAYLOAD, SURFACES, WROTE, Attack, command

from trainkit.cli.boundary import run_command_line
from trainkit.recipe.schema.fields import schema

MACHINE = ("--on", "laptop-cpu")
TEXTS: tuple[str, ...] = (
    "${oc.env:AWS_SECRET_ACCESS_KEY}", "${oc.${name}:AWS_SECRET_ACCESS_KEY}",
    "${oc.env:${oc.env:X,AWS_SECRET_ACCESS_KEY}}", "${oc.decode:'${oc.env:HF_TOKEN}'}",
    '${oc.decode:"$\\{oc.env:HF_TOKEN\\}"}', "${oc.select:oc.env,${oc.env:HF_TOKEN}}", "${ oc . env:HF_TOKEN}",
    "${oc.create:${oc.env:HF_TOKEN}}", "${oc.coerce:str,${oc.env:HF_TOKEN}}", "${oc.deprecated:name}",
    "${oc.dict.keys:env}", "${eval:1}", "${now:}", "${hydra:x}", "$(touch PWNED)", "`touch PWNED`", "'; touch PWNED; '",
    '"; touch PWNED; "', "x\ntouch PWNED\n", "$AWS_SECRET_ACCESS_KEY", "a\\'; touch PWNED #", "--config=PWNED", "-c",
    "--", "../../../outside/x", "/dev/stdin", "~root/x", "x/../../y", "payload:Model", "os:system", f"{PAYLOAD}.py",
    "$'\\x1b]0;x\\x07'", "\x1b]52;c;Y2FuYXJ5\x07", "\x1b[2J\x1b[1;1Hok", "a\u202etxt.lmay", "a\u2066b", "\x9b31m",
    "a\rb", "a\nerror: b", "a\x08\x08", "\u200b", "é" * 300, "x" * 200_000,
)  # fmt: skip
NODES = (
    "!!python/object/apply:os.system ['touch {mark}']", "!!python/name:os.system", "!!python/module:payload",
    "!!python/object/new:os.mkdir ['{mark}']", "!!binary eA==", "!include payload.py",
    "!!python/object:payload.Model {{}}", "&a [*a]", "*nothing", "{{<<: [*x]}}", "!!set {{a, b}}",
    "!!timestamp 2001-01-01",
)  # fmt: skip
NAMED_FILES = (
    "/etc/shadow", "/proc/self/environ", "/dev/zero", "/proc/self/mem", "http://127.0.0.1:9/x.yaml", "planted.yaml",
    "file:///etc/passwd", "./",
)  # fmt: skip
SCRIPT = (
    "open({mark!r}, 'w')\nimport os, payload\nos.system('touch {mark}')\n"
    "from transformers import Trainer, HfArgumentParser\n"
)


def hostile_text(draw: random.Random) -> str:
    """A text that some part of a command may take for more."""
    return draw.choice(TEXTS) + (draw.choice(TEXTS)[:40] if draw.random() < 0.2 else "")


def _tree(draw: random.Random) -> dict[str, Any]:
    """A recipe with hostile texts in some settings."""
    tree: dict[str, Any] = {"name": "env", "train": {"steps": 3}, "data": {"kind": "text", "path": "."}}
    for setting in draw.sample(list(schema().all_settings()), draw.randrange(1, 5)):
        below: Any = tree
        *above, last = setting.key.split(".")
        for part in above:
            below = below.setdefault(part, {}) if isinstance(below, dict) else {}
        if isinstance(below, dict):
            below[last] = hostile_text(draw) if draw.random() < 0.8 else [hostile_text(draw), hostile_text(draw)]
    one, other, file = hostile_text(draw), hostile_text(draw), draw.choice((*NAMED_FILES, hostile_text(draw)))
    kind, script = draw.choice(("script", "hf", "accelerate")), draw.choice(("payload.py", one))
    sections: dict[str, Any] = {
        "name": one,
        "output": {"root": one},
        "env": {one[:40]: other, "MY": one},
        "env_from": [one],
        "program": {"kind": kind, "script": script, "args": [one, other]},
        "extends": file,
        "variants": {one[:50]: {"name": other}},
        "data": {"kind": "text", "path": file},
    }
    return tree | {key: sections[key] for key in draw.sample(list(sections), draw.randrange(3))}


def _recipe_text(draw: random.Random, folder: Path) -> str:
    what = draw.random()
    mark = str(folder / WROTE)
    if what < 0.05:
        levels = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
        return f"a0: &a0 [x, x]\n{levels}"
    if what < 0.08:
        again = (("[", 100_000), ("{a: ", 100_000), ("- ", 100_000), ("? ", 20_000), ("&a ", 10_000), ("a: ", 5_000))
        piece, times = draw.choice(again)
        return piece * times
    if what < 0.1:
        return "".join(f"x{n}: 1\n" for n in range(200_000))
    try:
        text = str(yaml.safe_dump(_tree(draw), allow_unicode=True, sort_keys=False, width=10**6))
    except (yaml.YAMLError, UnicodeEncodeError):
        text = json.dumps(_tree(draw))
    for _ in range(draw.randrange(3)):
        lines = text.split("\n")
        place = draw.randrange(len(lines))
        node = f"{lines[place].partition(':')[0]}: {draw.choice(NODES).format(mark=mark)}"
        lines[place] = node if draw.random() < 0.7 else draw.choice(lines)
        text = "\n".join(lines)
    return text


def _recipe(draw: random.Random) -> Attack:
    words = draw.choice(_commands(hostile_text(draw)))
    seed, runs = draw.random(), "--shell" in words

    def prepare(folder: Path) -> None:
        inner, work = random.Random(seed), folder / "work"
        (work / "r.yaml").write_text(_recipe_text(inner, folder), errors="replace")
        (work / f"{PAYLOAD}.py").write_text(SCRIPT.format(mark=str(folder / WROTE)))
        if inner.random() < 0.5:
            name = inner.choice(("planted.yaml", "planted.yaml", "r.yaml", "payload.py", "runs"))
            hostile.plant(inner, work / name, folder / "outside")

    call, starts = _shell(words) if runs else command(*words), runs or words[0] == "config"
    return Attack("", shlex.join(words)[:300], prepare, call, raw=runs, starts=starts, named=True)


def _commands(odd: str) -> tuple[list[str], ...]:
    """Commands that read r.yaml, and ones with odd words; none of them may start what they read."""
    return (
        ["check", "r.yaml"],
        ["check", "r.yaml", "--json"],
        ["plan", "r.yaml", *MACHINE],
        ["plan", "r.yaml", "--json", *MACHINE],
        ["plan", "r.yaml", "--shell", *MACHINE],
        ["explain", "r.yaml", "name", *MACHINE],
        ["explain", "r.yaml", *MACHINE],
        ["plan", "quickstart", "--diff", "r.yaml", *MACHINE],
        ["plan", "r.yaml", "--diff", "quickstart", *MACHINE],
        ["plan", "quickstart", "--with", "./r.yaml", *MACHINE],
        ["plan", "quickstart", f"name={odd}".replace("\0", ""), *MACHINE],
        ["plan", "quickstart", f"output.root={odd}", *MACHINE],
        ["plan", "quickstart", "--on", "r.yaml"],
        ["check", odd],
        ["plan", *MACHINE, "payload.py", odd],
        ["config", "--defaults", "--set", f"name={odd}", "--output", "new.yaml"],
        ["schema", "--reference"],
        ["plan", "r.yaml", "--variant", odd, *MACHINE],
        ["ls", odd],
        ["plan", "r.yaml", "--export", "accelerate", *MACHINE],
    )


def _shell(words: list[str]) -> Callable[[Path], int]:
    """The script that a plan prints, run with programs that do nothing."""

    def call(folder: Path) -> int:
        stubs = folder / "work/stubs"
        stubs.mkdir()
        for name in ("python", "torchrun", "accelerate", "deepspeed", "trainkit"):
            (stubs / name).write_text("#!/bin/sh\nexit 0\n")
            (stubs / name).chmod(0o755)
        code = run_command_line(words)
        sys.stdout.flush()
        if code == 0:
            argv: list[str | bytes] = ["bash", "-c", 'eval "$1"', "sh", (folder / "said").read_bytes()]
            environ = {"PATH": f"{stubs}:/usr/bin:/bin", "HOME": str(folder / "tmp")}
            with (folder / "tmp/shell").open("wb") as out:
                subprocess.run(
                    argv, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=15, check=False
                )
        return code

    return call


_LINES = (
    "torchrun --nproc_per_node $(touch PWNED; echo 2) train.py --lr `touch PWNED`",
    "export X=$(cat ../outside/secret.txt); python train.py --x $X",
    "eval 'touch PWNED'; python train.py",
    "source payload.sh; accelerate launch train.py",
    "accelerate launch --config_file {text} train.py",
    "deepspeed --hostfile {text} train.py --deepspeed {text}",
    'python -c \'open("PWNED","w")\'',
    "python -m payload {text}",
    "python train.py --token $AWS_SECRET_ACCESS_KEY --x {text}",
    "OMP={text} python {text}",
    "python train.py <(touch PWNED) > PWNED2",
    "exec > PWNED3; python train.py",
    "cat <<EOF > PWNED4\n$(touch PWNED)\nEOF\npython train.py",
    "[[ $(touch PWNED) ]] && python train.py",
    "for i in $(seq 1000000000); do python train.py; done",
    "x={{1..100000000}}; python train.py $x",
    "f() {{ f | f & }}; f; python train.py",
    ": ${{X:=$(touch PWNED)}}; python train.py ${{X@P}}",
    "python train.py $((a[$(touch PWNED)]))",
    "alias python='touch PWNED'; python train.py {text}",
)


_OFFLOAD = {"stage": 2, "offload_param": {"device": "nvme", "nvme_path": "/x"}}
_ZERO = {"train_batch_size": 8, "zero_optimization": _OFFLOAD, "fp16": {"enabled": True}}


def _import(draw: random.Random) -> Attack:
    text = hostile_text(draw)
    line = draw.choice(_LINES).format(text=shlex.quote(text) if draw.random() < 0.7 else text)
    kind = draw.choice(("line", "line.sh", "a.yaml", "ds.json", "n.ipynb"))
    seed = draw.random()

    def prepare(folder: Path) -> None:
        inner, work = random.Random(seed), folder / "work"
        cells = [f"!{line}\n", f"%run {line}", f"%%bash\n{line}"]
        contents = {
            "line.sh": f"#!/bin/bash\n{line}\n",
            "a.yaml": "compute_environment: LOCAL_MACHINE\n" + _recipe_text(inner, folder),
            "ds.json": hostile.dumped(inner, _ZERO).decode("utf-8", "replace"),
            "n.ipynb": json.dumps({"cells": [{"cell_type": "code", "source": cells}], "nbformat": 4}),
        }
        for name, content in contents.items():
            (work / name).write_text(content, errors="replace")
        for name in ("train.py", f"{PAYLOAD}.py", "payload.sh"):
            (work / name).write_text(SCRIPT.format(mark=str(folder / WROTE)))
        if inner.random() < 0.25:
            hostile.plant(inner, work / inner.choice((*contents, "train.py")), folder / "outside")

    words = ["import", line.replace("\0", "") if kind == "line" else kind]
    words += draw.choice(([], ["--output", "new.yaml"], []))
    return Attack("", shlex.join(words)[:300], prepare, command(*words), named=True)


SURFACES |= {"recipes": _recipe, "imports": _import}
