"""Which questions are asked, what they offer and propose, and what answers make of the rest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from tests.wizard.conftest import Machine, Start, answered, taken, usual
from trainkit.errors import Diagnostic
from trainkit.machine.facts import GpuProcess
from trainkit.recipe.schema import StrategyKind
from trainkit.recipe.schema.fields import schema
from trainkit.recipe.validate import choices
from trainkit.tools.builtin.memory import format_parameters, largest
from trainkit.wizard.question import Question
from trainkit.wizard.session import Session

WRITE = 1  # the last question, whether to write the file
WISHES = ("try", "pretrain")
PROGRAMS = choices(schema().settings["program.kind"][0].annotation)


def to(session: Session, topic: str, **typed: str) -> tuple[Session, Question]:
    """The session when it comes to a topic, and its question."""
    while (question := session.question) is not None:
        if question.topic == topic:
            return session, question
        session = taken(session, typed.get(question.topic, usual(session, question.topic)))
    raise AssertionError(f"{topic} is never asked")


def refused(session: Session, typed: str) -> str:
    """Why an answer is not taken."""
    outcome = session.answer(typed)
    assert isinstance(outcome, Diagnostic), outcome
    return outcome.what


def back(session: Session, times: int) -> Session:
    for _ in range(times):
        earlier = session.back()
        assert earlier is not None
        session = earlier
    return session


def words(question: Question) -> dict[str, bool]:
    """The choices, and whether each can be taken."""
    return {choice.word: not choice.refused for choice in question.choices}


@pytest.mark.parametrize(
    ("where", "ranks", "oldest"), [("1,2", 2, "A100"), ("2,0", 2, "V100"), ("all", 3, "V100"), ("free 2", 2, "V100")]
)
def test_room_and_number_format_are_those_of_the_cards_that_were_chosen(
    machine: Machine, start: Start, where: str, ranks: int, oldest: str
) -> None:
    old, new = machine(1, "V100"), machine(3, "A100")
    session = start(replace(new, gpus=(*old.gpus, *new.gpus[1:])))
    session, question = to(session, "strategy", where=where)
    memory = 80 if oldest == "A100" else 16
    (zero3,) = (choice for choice in question.choices if choice.word == "zero3")
    assert f"up to {format_parameters(largest('zero3', ranks, memory * 1024**3))} parameters" in zero3.note
    assert to(session, "precision")[1].default == ("bf16" if oldest == "A100" else "fp16")


@pytest.mark.parametrize("program", [*WISHES, "script", *PROGRAMS[1:]])
@pytest.mark.parametrize("where", ["one", "cpu"])
def test_one_process_takes_at_most_eight_questions(machine: Machine, start: Start, program: str, where: str) -> None:
    command = {} if program in WISHES else {"command": "train.py"}
    _, topics = answered(start(machine(1)), program=program, where=where, **command)
    assert len(topics) + WRITE <= 8, topics


@pytest.mark.parametrize(
    ("program", "where", "strategy"),
    [
        *(("builtin", where, strategy) for where in ("all", "nodes") for strategy in get_args(StrategyKind)[1:]),
        *((program, where, "fsdp") for program in PROGRAMS[1:] for where in ("all", "nodes", "cpu-2")),
        *((program, "all", "zero3") for program in PROGRAMS[1:]),
    ],
)
def test_any_other_kind_takes_at_most_twelve(
    machine: Machine, start: Start, program: str, where: str, strategy: str
) -> None:
    typed = {"program": program, "where": where, "strategy": strategy}
    typed |= {} if program == "builtin" else {"command": "train.py"}
    session = start(machine(2))
    topics = []
    while (question := session.question) is not None:
        topics.append(question.topic)
        most = question.choices[-1].word if question.topic == "offload" else typed.get(question.topic, "")
        outcome = session.answer(most or ("/nvme" if question.topic == "nvme" else ""))
        # A program that cannot have this strategy takes the one that is proposed.
        session = outcome if isinstance(outcome, Session) else taken(session, "")
    assert len(topics) + WRITE <= 12, topics


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_proposed_on_a_mac_is_always_taken(machine: Machine, start: Start, program: str) -> None:
    command = {} if program == "builtin" else {"command": "train.py"}
    mac = replace(machine(), platform="darwin", machine="arm64", mps=True)
    session, topics = answered(start(mac), program=program, **command)
    place = "cpu" if program == "deepspeed" else "mps"  # DeepSpeed wants a process group
    assert session.view.get("devices.type") == place
    assert "where" in topics
    assert "strategy" not in topics or program == "deepspeed"


def test_what_the_machine_settles_is_not_asked(machine: Machine, start: Start) -> None:
    _, alone = answered(start(machine(1)))
    assert not {"machines", "strategy", "launcher", "command", "nvme"} & set(alone)
    _, several = answered(start(machine(2)), strategy="fsdp")
    assert {"strategy", "sharding", "wrapping", "launcher"} <= set(several)
    _, zero = answered(start(machine(2)), strategy="zero2")
    assert {"offload"} <= set(zero)
    assert not {"sharding", "wrapping"} & set(zero)


def test_a_script_that_reads_no_recipe_is_not_asked_about_what_it_never_sees(machine: Machine, start: Start) -> None:
    _, topics = answered(start(machine(2)), program="torch", command="train.py", strategy="fsdp")
    assert topics == ["program", "command", "where", "strategy", "launcher"]


def test_a_script_on_trainer_keeps_its_own_batch_unless_it_is_told_one(machine: Machine, start: Start) -> None:
    session, question = to(start(machine(2)), "batch", program="hf", command="train.py", strategy="ddp")
    assert (question.default, words(question)) == ("own", {"own": True})
    assert taken(session, "own").view.get("batch.global") in (None, "auto")
    assert taken(session, "64/8").view.get("batch.global") == 64


@pytest.mark.parametrize(
    ("count", "kind", "where", "precision"),
    [(1, "A100", "one", "bf16"), (2, "A100", "all", "bf16"), (2, "V100", "all", "fp16"), (0, "A100", "cpu", "fp32")],
)
def test_what_was_found_is_proposed(
    machine: Machine, start: Start, count: int, kind: str, where: str, precision: str
) -> None:
    session, question = to(start(machine(count, kind)), "where")
    assert question.default == where
    assert question.source == "found here"
    _, question = to(session, "precision")
    assert question.default == precision


@pytest.mark.parametrize("kind", ["A100", "V100", "T4", "1660", "P100"])
def test_the_format_that_is_proposed_is_what_auto_would_be(machine: Machine, start: Start, kind: str) -> None:
    _, question = to(start(machine(1, kind)), "precision")
    found = start(machine(1, kind), {"precision.dtype": "auto", "devices.type": "cuda"}).view.outcome.plan
    assert found is not None
    (settings,) = [file.content for file in found.files if file.path == "trainer.json"]
    assert json.loads(settings)["dtype"] == question.default


def test_cards_that_the_caller_hides_are_not_offered(machine: Machine, start: Start) -> None:
    _, question = to(start(machine(2, visible_devices="1")), "where")
    assert "all" not in words(question)
    assert "CUDA_VISIBLE_DEVICES=1 hides 1" in question.why[0]


def test_the_strategies_are_those_of_the_schema_with_the_size_that_fits(machine: Machine, start: Start) -> None:
    _, question = to(start(machine(2, "4090")), "strategy")
    assert set(words(question)) == {"auto", *get_args(StrategyKind)} - {"single"}
    notes = {choice.word: choice.note for choice in question.choices}
    # 22 GB over 18 bytes for each parameter on one card, half of that where all is divided by two
    assert notes["ddp"].startswith("up to 1.3 B")
    assert notes["fsdp"].startswith("up to 2.6 B")
    assert notes["zero2"].startswith("up to 1.9 B")


def test_the_size_that_fits_grows_with_what_is_divided() -> None:
    card = 24 * 1024**3
    assert largest("ddp", 8, card) < largest("zero1", 8, card) < largest("zero2", 8, card) < largest("zero3", 8, card)
    assert largest("zero3", 8, card) == 8 * largest("ddp", 1, card)
    assert largest("ddp", 1, 1024**3) == 0
    assert format_parameters(999e6) == "999 M"


def test_a_model_that_is_known_not_to_fit_gets_a_strategy_that_divides_it(machine: Machine, start: Start) -> None:
    large = {"model.hidden_size": 4096, "model.layers": 10, "model.heads": 32}
    _, question = to(start(machine(2, "4090"), large), "strategy")
    assert question.default == "fsdp"
    assert "2 B parameters" in question.source
    _, question = to(start(machine(2, "4090")), "strategy")
    assert question.default == "ddp"


def test_an_unsound_choice_is_shown_with_its_reason_and_not_taken(machine: Machine, start: Start) -> None:
    session, question = to(start(machine(2, "V100")), "precision")
    last = question.choices[-1]
    assert last.word == "bf16" and "compute capability 8.0" in last.refused
    assert "compute capability 8.0" in refused(session, "bf16")
    _, question = to(start(machine(2)), "launcher", where="1,0")
    assert words(question)["torchrun"]
    assert not words(question)["deepspeed"]
    assert not words(question)["python"]


def test_what_only_needs_a_package_is_offered_with_its_name(machine: Machine, start: Start) -> None:
    bare = {"torch": "2.13.0", "numpy": "2.4.0", "safetensors": "0.8.0"}
    session, question = to(start(machine(2, packages=bare)), "strategy")
    remark = next(choice.remark for choice in question.choices if choice.word == "zero2")
    assert "deepspeed >= 0.19.4" in remark
    taken(session, "zero2")


@pytest.mark.parametrize(
    ("topic", "typed", "says"),
    [
        ("where", "3", "3 GPUs are requested, 2 available"),
        ("where", "0,5", "there is no GPU `5` here"),
        ("where", "0,0", "twice"),
        ("where", "moon", "is not a device"),
        ("where", "0", "cannot be started"),
        ("batch", "33/8", "cannot be divided"),
        ("batch", "many", "is not a batch"),
        ("batch", "0", "batch.global must be"),
        ("length", "long", "is not a length"),
        ("length", "1.5", "not a whole number"),
        ("precision", "f", "short for"),
        ("precision", "int8", "none of the choices"),
        ("strategy", "single", "none of the choices"),
        ("data", "/", "is a folder"),
    ],
)
def test_a_wrong_answer_is_not_taken_and_told_why(
    machine: Machine, start: Start, topic: str, typed: str, says: str
) -> None:
    session, _ = to(start(machine(2)), topic)
    assert says in refused(session, typed)


@pytest.mark.parametrize(
    ("typed", "says"), [("gone.py", "no file gone.py"), ("'train.py", "quotes"), ("-m", "no module is named")]
)
def test_a_command_that_cannot_be_started_is_not_taken(machine: Machine, start: Start, typed: str, says: str) -> None:
    session, _ = to(start(machine(1)), "command", program="torch")
    assert says in refused(session, typed)


def test_words_may_be_cut_short(machine: Machine, start: Start) -> None:
    session, _ = to(start(machine(2)), "strategy")
    assert taken(session, "F").view.get("strategy.kind") == "fsdp"


def test_one_goes_back_to_the_first_question_and_finds_the_last_answers_proposed(
    machine: Machine, start: Start
) -> None:
    session, _ = to(start(machine(2)), "batch", strategy="zero3", offload="cpu")
    session = back(session, session.asked)
    assert session.back() is None
    assert session.view.answers == ()
    session, question = to(session, "strategy")
    assert (question.default, question.source) == ("zero3", "your last answer")
    session, _ = to(session, "batch")
    assert session.view.get("strategy.offload_optimizer") == "cpu"


def test_an_answer_that_is_changed_takes_what_depended_on_it_with_it(machine: Machine, start: Start) -> None:
    session, _ = to(start(machine(2)), "launcher", strategy="fsdp", wrapping="BertLayer")
    session, topics = answered(back(session, 3), strategy="zero2")
    assert "strategy.wrap_classes" not in session.view.chosen
    assert "offload" in topics


def test_a_last_answer_that_is_no_choice_any_more_is_not_proposed(machine: Machine, start: Start) -> None:
    session, _ = to(start(machine(2)), "launcher", strategy="zero3", offload="cpu-all")
    _, question = to(back(session, 2), "offload", strategy="zero2")
    assert question.default == "none"


def test_what_is_given_is_not_asked(machine: Machine, start: Start) -> None:
    given = {"strategy.kind": "zero2", "batch.global": 64, "precision.dtype": "bf16", "train.steps": 3}
    session, topics = answered(start(machine(2), given))
    assert not {"strategy", "batch", "precision", "length"} & set(topics)
    assert session.view.chosen.items() >= given.items()


def test_a_base_proposes_its_values_and_settles_nothing(machine: Machine, start: Start) -> None:
    session, topics = answered(start(machine(0), base="recipes/fsdp"))
    assert {"where", "strategy", "sharding", "batch", "length"} <= set(topics)
    assert session.view.chosen == {}
    _, question = to(start(machine(0), base="recipes/fsdp"), "length")
    assert (question.default, question.source) == ("50/50", "recipes/fsdp")


def test_every_question_says_why_in_the_words_of_the_schema(machine: Machine, start: Start) -> None:
    session = start(machine(2))
    while (question := session.question) is not None:
        topic = session.topic
        assert topic is not None
        described = [each.description.rstrip(".") for key in topic.keys for each in schema().settings.get(key, ())]
        shown = [line.lower() for line in (*question.why, *(choice.note for choice in question.choices))]
        assert any(each.lower() in line for each in described for line in shown), question.topic
        session = taken(session, "fsdp" if question.topic == "strategy" else "")


def test_a_card_that_is_in_use_now_can_be_chosen_for_later(machine: Machine, start: Start) -> None:
    facts = machine(2)
    worker = GpuProcess(77, "ann", "python", 40 * 1024**3)
    busy = replace(facts.gpus[0], memory_free=facts.gpus[0].memory_free // 2, processes=(worker,))
    session, question = to(start(replace(facts, gpus=(busy, facts.gpus[1]))), "where")
    assert words(question)["all"]
    assert any("Just now GPU 0 is busy" in line and "ann" in line for line in question.why)
    taken(session, "all")


def test_a_machine_without_probes_still_asks(machine: Machine, start: Start) -> None:
    _, question = to(start(machine(0, notes={"gpus": "the driver is not loaded"})), "where")
    assert any("the driver is not loaded" in line for line in question.why)


@pytest.mark.parametrize(
    ("typed", "sets"),
    [
        ("notes.txt", {"data.kind": "text", "data.path": "notes.txt"}),
        ("corpus/**/*.md", {"data.kind": "text", "data.path": "corpus", "data.include": "**/*.md"}),
        ("*.md", {"data.kind": "text", "data.path": ".", "data.include": "*.md"}),
        ("rows.jsonl", {"data.kind": "dataset", "data.path": "rows.jsonl"}),
        ("ids.npy", {"data.kind": "tokens", "data.path": "ids.npy"}),
        ("tables/*.parquet", {"data.kind": "dataset", "data.path": "tables"}),
        ("saved", {"data.kind": "dataset", "data.path": "saved"}),
    ],
)
def test_the_kind_of_data_follows_from_its_name(
    machine: Machine, start: Start, tmp_path: Path, typed: str, sets: dict[str, str]
) -> None:
    for name in ("notes.txt", "a.md", "rows.jsonl", "ids.npy", "corpus/a.md", "tables/a.parquet", "saved/data.arrow"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "saved/state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    session, _ = to(start(machine(1)), "data")
    assert taken(session, typed).view.answers[-1].sets == sets
