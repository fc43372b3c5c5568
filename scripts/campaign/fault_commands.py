"""Faults of commands that write files, and runs of one name that start at one moment, for the campaign `faults`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from fault_kinds import Case, Fault, void
from fault_places import Place, disk, failing, fill, shell
from fault_promises import NEVER
from tiny_runs import EVERY, GRACE, NAME, PATIENCE, STEPS, Run, losses, wait_for, whole_checkpoints

Reference = Callable[[str], Mapping[int, float]]  # the losses that a strategy is to have
OLD = "what was there before\n"
REFUSED = frozenset({1, 2, 4})  # 1 is the exporter's, a program of its own
TORCHRUN = ("torchrun", "--nproc_per_node", "2", "train.py", "--bf16", "--learning_rate", "5e-5", "--output_dir", "out")
# Name of the case -> the command; %D is the folder that fails, %C a checkpoint.
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "plan": ("plan", "quickstart", "--with", "strategy/zero2", "--export", "accelerate", "--output", "%D/plan"),
    "import": ("import", "--output", "%D/kept.yaml", "--force", *TORCHRUN),
    "config": ("config", "--defaults", "--output", "%D/kept.yaml", "--force"),
    "cp": ("cp", "quickstart", "%D/kept.yaml", "--force"),
    "export": ("export", "%C", "%D/weights"),
    "standard output": ("plan", "quickstart", "--json"),
}
CAUSES = {0: "No space left", 1: "No space left", 2: "Read-only file system", 3: "Input/output error", 4: "Disk quota"}


@contextmanager
def broken_folder(case: Case, folder: Path) -> Iterator[Place]:
    """A folder with one file in it, which cannot be written any more."""
    (folder / "target").mkdir()
    kind = {0: "tmpfs", 1: "ext4", 2: "tmpfs"}.get(case.amount, "folder")
    with disk(folder / "target", kind) as target:
        (target / "kept.yaml").write_text(OLD)
        environ: dict[str, str] = {}
        if case.amount < 2:
            fill(target, 0)
        elif case.amount == 2:
            void(shell("mount", "-o", "remount,ro", str(target)))
        else:
            rule = "calls=write+fsync errno=5" if case.amount == 3 else "calls=rename+open+mkdir errno=122"
            environ = failing(f"path={target} {rule}")
        yield Place(target, environ=environ)


def of_command(case: Case, folder: Path, _: Reference) -> list[str]:
    """What is not as promised of a command whose file cannot be written."""
    checkpoint = ""
    if case.where == "export":
        made = Run(folder / "runs", folder, "single", words=(f"train.steps={EVERY}",))
        made.process.wait(PATIENCE)
        checkpoint = next((str(path) for path in whole_checkpoints(made.directory())), "")
    with broken_folder(case, folder) as place:
        before = {path.name for path in place.root.iterdir()}
        words = [each.replace("%D", str(place.root)).replace("%C", checkpoint) for each in COMMANDS[case.where]]
        to_full = ("sh", "-c", 'exec "$@" >/dev/full', "sh") if case.where == "standard output" else ()
        run = Run(
            place.root, folder, "single", environ=place.environ, before=to_full,
            command=(sys.executable, "-m", "trainkit", *words),
        )  # fmt: skip
        code, text = run.process.wait(PATIENCE), run.text()
        wrong = [f"exit code {code}, and not {sorted(REFUSED)}"] if code not in REFUSED else []
        wrong += [f"it says {each!r}" for each in NEVER if each in text]
        cause = CAUSES[0] if to_full else CAUSES[case.amount]
        wrong += [] if cause in text else [f"no word of {cause}"]
        wrong += [] if to_full or str(place.root) in text else ["it names no path"]
        wrong += [] if wait_for(lambda: not run.living(), GRACE) else [f"still there: {run.living()}"]
        left = {path.name for path in place.root.iterdir()} - before - {"plan"}
        wrong += [f"left behind: {left}"] if left else []
        wrong += [] if (place.root / "kept.yaml").read_text() == OLD else ["the file was damaged"]
    return wrong


def of_one_name(case: Case, folder: Path, references: Reference) -> list[str]:
    """What is not as promised of runs of one name that start at once: each is a run of its own."""
    root, count, reference = folder / "runs", (2, 3, 4, 2, 3)[case.amount], references(case.strategy)
    if case.where == "in a folder that is there":
        (root / NAME).mkdir(parents=True)
    runs = [Run(root, folder, case.strategy) for _ in range(count)]
    try:
        codes = [run.process.wait(PATIENCE * 2) for run in runs]
    finally:
        for run in runs:
            run.end()
    wrong = [f"exit codes {codes}"] if any(codes) else []
    found = sorted((root / NAME).glob("2*-*"))
    wrong += [f"{len(found)} run directories"] if len(found) != count else []
    for each in found:
        # One that started later may go on from what another had saved by then.
        known = losses(each)
        wrong += [f"{each.name}: step {step}" for step, loss in known.items() if loss != reference[step]]
        wrong += [f"{each.name} ends at {max(known)}"] if known and max(known) != STEPS else []
    for run in runs:
        with suppress(OSError):
            wrong += [f"it says {text!r}" for text in NEVER if text in run.text()]
    return wrong


ALONE: dict[str, Fault] = {
    "commands": Fault(
        broken_folder, tuple(COMMANDS), REFUSED, (), ("mounts", "gcc", "loop"), ("before",), strategies=("single",),
        alone=of_command,
    ),
    "one name": Fault(
        broken_folder, ("in a new folder", "in a folder that is there"), frozenset({0}), (), (), ("before",),
        strategies=("single", "ddp"), alone=of_one_name,
    ),
}  # fmt: skip
