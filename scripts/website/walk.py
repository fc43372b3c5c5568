"""Ten tasks of a newcomer, walked by the pages alone in a clean clone with an empty home: `scripts/docs --walk`.

Nothing of a page is copied here: its files and commands are read from it and run in its order. Only what a command is
to show, and what a task is to leave, stands in `TASKS`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 1800  # seconds of one command
# What a newcomer has of the caller's environment: how packages and models are downloaded, and settings of trainkit.
KEPT = ("PIP_", "UV_", "SSL_", "HF_", "TRAINKIT__", "http", "no_proxy", "NO_PROXY", "LANG", "LC_ALL", "TMPDIR")
_BLOCK = re.compile(r"^(?:<!-- file (\S+) -->\n)?```(\w*)( \w+)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """A file to write, or a command to type."""

    text: str
    file: str = ""  # its name; of a command none


@dataclass(frozen=True)
class Task:
    """What somebody does by pages of docs/, each whole or one section (`use.md#export`).

    shows: how a command begins, and a regular expression for what it prints. leaves: patterns of paths that are there
    afterwards.
    """

    name: str
    pages: tuple[str, ...]
    shows: Mapping[str, str]
    leaves: tuple[str, ...] = field(default=())


TASKS = (
    Task(
        "first run",
        ("first-run.md",),
        {
            "trainkit plan quickstart --with strategy/ddp": r"torchrun    8 processes",
            "trainkit run quickstart": r"Run directory",
            "trainkit runs list": r"quickstart .* done ",
            "trainkit watch": r"step 20/20",
            "trainkit generate": r"\S",
            "trainkit explain": r"optimizer\.lr = 0\.003",
        },
        ("runs/quickstart/*/report.html", "runs/quickstart/*/summary.json", "my-run.yaml"),
    ),
    Task(
        "own chats",
        ("fine-tuning.md",),
        {
            "trainkit data pip.yaml  ": r"⟦Pip, the parrot of the Golden Anchor\. Squawk!<\|im_end\|>⟧",
            "trainkit run": r"trainkit generate ",
            "trainkit generate pip ": r"\S",
        },
        ("pip-model/model.safetensors", "pip-model/chat_template.jinja", "runs/pip/*/checkpoints/step-*"),
    ),
    Task(
        "classify",
        ("classify.md",),
        {
            "trainkit data": r"negative.*positive|positive.*negative",
            "trainkit runs list": r"accuracy",
            "trainkit generate": r"positive|negative",
        },
        ("reviews-model/model.safetensors", "runs/reviews/*/predictions.jsonl"),
    ),
    Task(
        "own script",
        ("own-scripts.md",),
        {
            "trainkit run train.py": r"two words: loss \d",
            "trainkit run --nproc_per_node 2": r"ddp",
            "trainkit explain": r'strategy\.kind = "ddp"',
        },
        ("runs/train/*/summary.json",),
    ),
    Task(
        "import a launch line",
        ("own-scripts.md#a-script-to-try-it-with", "coming-from.md"),
        {
            "trainkit import torchrun": r"processes_per_node: 2",
            "trainkit run from-torchrun.yaml": r"two words: loss \d",
        },
        ("from-torchrun.yaml", "tickets.yaml"),
    ),
    Task(
        "will it fit",
        ("estimate.md",),
        {
            "trainkit estimate gpt-1.3b --on 1x4090  ": r"does not fit",
            "trainkit estimate gpt-1.3b --on all": r"8xh100",
            "trainkit estimate quickstart --json": r"^\{",
        },
        ("memory.svg",),
    ),
    Task(
        "a sweep",
        ("sweeps.md",),
        {"trainkit sweep": r"optimizer\.lr"},
        ("runs/quickstart/sweep-*/best.yaml", "runs/quickstart/sweep-*/report.html"),
    ),
    Task(
        "a cluster job, planned",
        ("clusters.md", "outgrowing.md#on-slurm"),
        {
            "trainkit plan quickstart --with clusters/slurm": r"#SBATCH --nodes=2",
            "trainkit plan quickstart --with clusters/kubernetes": r"kind: JobSet",
            "trainkit explain": r"started once on each node",
            "trainkit plan slurm.yaml": r"#SBATCH --nodes=8",
        },
    ),
    Task(
        "compare two runs",
        ("watch.md",),
        {"trainkit runs diff": r"optimizer\.lr", "trainkit runs list  ": r"(?s)slow.*fast"},
        ("both.html",),
    ),
    Task(
        "python",
        ("python.md",),
        {"python first.py": r"\n20 \d", "python ranks.py": r"step 100/100"},
        ("runs/quickstart/*/report.html", "runs/.functions/*"),
    ),
)


class WalkError(Exception):
    """A page does not lead through its task: where, and what was seen there."""


def steps(text: str) -> Iterator[Step]:
    """The files that a page shows and the commands that it prints, in its order. Marked blocks need other machines."""
    for file, language, mark, body in _BLOCK.findall(text):
        if file:
            yield Step(body, file)
        elif language == "sh" and not mark:
            yield from (Step(line) for line in body.splitlines() if line and not line.startswith("#"))


def exit_code(command: str) -> int:
    """What a command ends with, by the page: `# exit code 4`, else 0."""
    found = re.search(r"# exit code (\d+)", command)
    return int(found[1]) if found else 0


def read(page: str, docs: Path) -> str:
    """A page, or what stands below one of its headings (`use.md#export`)."""
    name, _, anchor = page.partition("#")
    text = (docs / name).read_text("utf-8")
    if not anchor:
        return text
    code = [(block.start(), block.end()) for block in _BLOCK.finditer(text)]
    found = [each for each in _HEADING.finditer(text) if not any(a < each.start() < b for a, b in code)]
    for number, heading in enumerate(found):
        if re.sub(r"[^\w -]", "", heading[2].lower()).replace(" ", "-") == anchor:
            below = (each.start() for each in found[number + 1 :] if len(each[1]) <= len(heading[1]))
            return text[heading.start() : next(below, len(text))]
    raise WalkError(f"{name} has no section {anchor}")


def clone(folder: Path) -> Path:
    """Copy exactly the files that a clone of this checkout would have."""
    argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def surroundings(home: Path, *programs: Path) -> dict[str, str]:
    """The environment of a newcomer: a home, folders of programs before the system's, nothing of this project."""
    home.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
    path = os.pathsep.join([*map(str, programs), "/usr/local/bin", "/usr/bin", "/bin"])
    return {**kept, "HOME": str(home), "PATH": path}


def walk(task: Task, checkout: Path, environment: Mapping[str, str]) -> int:
    """Do what the task's pages say in a checkout with its .venv; how many commands ran. What it leaves is removed.

    WalkError for a command that ends or shows something else than its page says, and for a promise without a command.
    """
    before = {*checkout.iterdir()}
    due, count = dict(task.shows), 0
    try:
        for page in task.pages:
            for step in steps(read(page, checkout / "docs")):
                if step.file:
                    (checkout / step.file).write_text(step.text, "utf-8")
                    continue
                count += 1
                code, output = typed(step.text, checkout, environment)
                where = f"docs/{page}: {step.text}"
                if code != exit_code(step.text):
                    raise WalkError(f"{where}\nends with exit code {code}:\n{output}")
                for begin in [each for each in task.shows if step.text.startswith(each)]:
                    due.pop(begin, None)
                    if not re.search(task.shows[begin], output, re.MULTILINE):
                        raise WalkError(f"{where}\ndoes not show {task.shows[begin]!r}:\n{output}")
        if due:
            raise WalkError(f"docs/{' and '.join(task.pages)}: no command begins with {' or '.join(map(repr, due))}")
        if missing := [each for each in task.leaves if not any(checkout.glob(each))]:
            raise WalkError(f"docs/{' and '.join(task.pages)}: afterwards there is no {' and no '.join(missing)}")
    finally:
        for path in {*checkout.iterdir()} - before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return count


def typed(command: str, folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """The exit code of a command line as Bash reads it, and what it has printed."""
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired as error:
        raise WalkError(f"{command}\nhas not ended after {LONGEST} s") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, output


def walk_all(names: list[str]) -> int:
    """Set a clean clone up and walk the tasks of these names, or all; print how each ended. 1 if one has failed."""
    known = {task.name: task for task in TASKS}
    if unknown := [name for name in names if name not in known]:
        print(f"error: there is no task {' or '.join(map(repr, unknown))}")
        print(f"  next: name {' or '.join(map(repr, known))}")
        return 2
    with tempfile.TemporaryDirectory(prefix="trainkit-walk-") as temporary:
        folder = Path(temporary)
        checkout = clone(folder / "trainkit")
        code, output = typed("scripts/quickstart", checkout, surroundings(folder / "home", Path(sys.executable).parent))
        if code:
            print(output, f"error: scripts/quickstart ends with exit code {code}", sep="\n")
            return 1
        shutil.rmtree(checkout / "runs")
        failed = 0
        for task in [known[name] for name in names] or TASKS:
            home = folder / task.name.replace(" ", "-")
            try:
                count = walk(task, checkout, surroundings(home, checkout / ".venv" / "bin"))
                print(f"{task.name:24}{', '.join(task.pages)}: {count} commands, as the pages say", flush=True)
            except WalkError as error:
                failed += 1
                print(f"{task.name:24}FAILED at {error}", flush=True)
    return min(failed, 1)
