"""The likely cause of a failure, and of a run that is not as planned, is named where log or program tell it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainkit.runner.report.exit_status import Verdict
from trainkit.runner.report.failure import CAUSES, TRACES, by_trace, causes_of, describe_failure, remarks
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.records import RankRecord, write_record

SAID = "strategy {} was planned, and {}"
ALONE = "this rank trains a separate model, which is not synchronised with other ranks"


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    """A run directory in the folder in which trainkit is called."""
    monkeypatch.chdir(tmp_path)
    made = RunLayout(tmp_path / "runs/name/20260101-000000-abc")
    made.attempt(1).ranks.mkdir(parents=True)
    made.attempt(1).shown.mkdir()
    return made


def program(layout: RunLayout, kind: str, source: str, *words: str) -> RunLayout:
    (layout.root.parents[2] / "train.py").write_text(source)
    command = {"argv": ["python", "train.py", *words], "wrapper": {"first": 0, "count": 0}}
    layout.plan.write_text(json.dumps({"program": {"kind": kind}, "commands": [command]}))
    layout.recipe.write_text("version: 1\n")
    return layout


@pytest.mark.parametrize(
    ("log", "hint"),
    [
        ("KeyError: 'LOCAL_RANK'", "the script reads LOCAL_RANK, which a launcher sets"),
        ("rendezvous: environment variable RANK expected, but not set", "the script reads RANK, which a launcher sets"),
        ("RuntimeError: Distributed package doesn't have NCCL built in", "on a CPU it must use gloo"),
        ("AssertionError: Torch not compiled with CUDA enabled", "this run has no GPU"),
        ("t.py: error: the following arguments are required: --out, --local_rank", "program.local_rank: true"),
        ("t.py: error: unrecognized arguments: --local-rank=1", "program.local_rank: false"),
        ("t.py: error: unrecognized arguments: --bogus 3", "no such argument (--bogus 3): `trainkit plan` shows"),
        ("are not used by the HfArgumentParser: ['--bogus', '3']", "no such argument ('--bogus', '3')"),
        (
            "TypeError: Accelerator.__init__() got an unexpected keyword argument 'fp16'",
            "Accelerator no longer takes fp16: leave it out, or write mixed_precision='fp16', and say precision: fp16 ",
        ),
        ("AttributeError: 'BertModel' object has no attribute 'to_bettertransformer'", "scaled_dot_product_attention"),
        ("AttributeError: partially initialized module 'torch' has no", "a file beside the script may shadow a module"),
        ("ModuleNotFoundError: No module named 'flash_attn'", "the package that provides flash_attn"),
        ("[rank0]: ModuleNotFoundError: No module named 'own.part'", "the package that provides own.part"),
        ("Failed to load a kernel: No module named 'kernels'. Please install it", ""),
        (
            "Failed: No module named 'kernels'.\nModuleNotFoundError: No module named 'own'",
            "the package that provides own ",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory.", "lower batch.micro"),
        ("KeyError: 'rank'", ""),
    ],
)
def test_what_a_log_says_is_answered(log: str, hint: str) -> None:
    said = by_trace(f"line\n{log}\nline")
    assert hint in said
    assert bool(said) == bool(hint)
    assert "\\1" not in said


@pytest.mark.parametrize(
    ("kind", "source", "words", "differs", "cause"),
    [
        ("accelerate", "", "--cpu", SAID.format("zero2", "ddp is in force"), "Accelerator(cpu=True) by --cpu disables"),
        ("accelerate", "import x\na = Accelerator(\n    cpu=True)", "", SAID.format("zero3", ALONE), "(train.py:2)"),
        (
            "accelerate",
            "p = DeepSpeedPlugin(zero_stage=3)",
            "",
            SAID.format("zero2", "zero3 is in force"),
            "its own plugin",
        ),
        ("accelerate", "", "", SAID.format("ddp", ALONE), "accelerator.prepare()"),
        ("accelerate", "", "--mixed_precision=no", "dtype bf16 was planned, and it is fp32", "by --mixed_precision=no"),
        (
            "deepspeed",
            "e = initialize(config={})",
            "",
            SAID.format("zero2", "zero3 is in force"),
            "built in the script",
        ),
        (
            "hf",
            "",
            "--no_cuda",
            "device cuda was planned, and it is cpu",
            "the program is kept on the CPU by --no_cuda",
        ),
        ("torch", "", "", f"world size 2 was planned, and it is 1; {SAID.format('ddp', ALONE)}", "init_process_group"),
        ("torch", "", "", SAID.format("ddp", ALONE), "not wrapped in DistributedDataParallel"),
        (
            "torch",
            "from transformers import Trainer; t = Trainer(model)",
            "",
            SAID.format("ddp", ALONE),
            "uses Trainer (train.py:1), which gets the plan only with program.kind",
        ),
        (
            "torch",
            "from accelerate import Accelerator\na = Accelerator()",
            "",
            "world size 2 was planned, and it is 1",
            "program.kind: accelerate",
        ),
    ],
)
def test_what_made_a_program_run_something_else_is_named(
    layout: RunLayout, kind: str, source: str, words: str, differs: str, cause: str
) -> None:
    (found,) = causes_of(differs, program(layout, kind, source, *words.split()))
    assert cause in found


def test_a_cause_that_shows_itself_nowhere_is_not_named(layout: RunLayout) -> None:
    assert causes_of(SAID.format("zero2", "ddp is in force"), program(layout, "accelerate", "Accelerator()")) == []
    assert causes_of("device cuda was planned, and it is cpu", program(layout, "torch", "", "--gpu")) == []
    (layout.root.parents[2] / "train.py").unlink()
    assert causes_of(SAID.format("zero2", "zero3 is in force"), layout) == []
    assert len(CAUSES) > 5
    assert len(TRACES) > 10


def test_a_difference_is_said_once_with_its_cause(layout: RunLayout) -> None:
    differs = SAID.format("zero2", "ddp is in force")
    program(layout, "accelerate", "", "--cpu")
    for rank in (0, 1):
        record = RankRecord(rank, rank, "host", 1, pid=2, ended=1.0, exit_code=1, not_as_planned=differs)
        write_record(str(layout.attempt(1).root), record)
    verdict = Verdict(1, "plan", f"rank 1 does not run what was planned: {differs}", 1)
    first, second, *_ = describe_failure(verdict, layout.attempt(1), 0).splitlines()
    assert first == "the run failed: rank 1 does not run what was planned (see above)"
    assert second.startswith("most likely: Accelerator(cpu=True) by --cpu")
    assert describe_failure(verdict, layout.attempt(1), None).startswith(f"the run failed: {verdict.why}\n")


def test_the_cause_of_what_is_only_warned_of_is_named_too(layout: RunLayout) -> None:
    program(layout, "torch", "")
    shown = layout.attempt(1).shown / "rank-0.json"
    shown.write_text(json.dumps({"differences": [], "warnings": [SAID.format("ddp", ALONE)]}))
    assert remarks(layout.attempt(1), Verdict(0)) == [
        "most likely: the model is not wrapped in DistributedDataParallel"
    ]
    shown.write_text(json.dumps({"differences": []}))
    assert remarks(layout.attempt(1), Verdict(0)) == []


def test_another_librarys_trainer_is_not_taken_for_transformers(layout: RunLayout) -> None:
    source = "import lightning as L\nfrom transformers import AutoTokenizer\nt = L.Trainer(devices=2)"
    found = causes_of(SAID.format("ddp", ALONE), program(layout, "torch", source))
    assert found == ["the model is not wrapped in DistributedDataParallel"]
