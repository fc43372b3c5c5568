"""Runs that name a model of the Hub, from an empty cache: fetched once, pinned, and every obstacle said in time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.conftest import Trainkit, call_trainkit
from tests.hub_server.server import READER, Hub
from tests.trainer.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.e2e

RECIPE = """
name: named
model: {kind: hf, path: owner/small}
data: {kind: text, path: text.txt, tokenizer: bytes, sequence_length: 16}
train: {steps: 3}
batch: {micro: 2, accumulation: 1}
eval: {every_steps: 0}
"""
ROWS = """
name: named
model: {layers: 1, vocab_size: 512}
data: {kind: dataset, sequence_length: 16, tokenizer: words}
train: {steps: 3}
batch: {micro: 2, accumulation: 1}
eval: {every_steps: 0}
"""
SUBSETS = """---
configs:
- config_name: default
  data_files: data/*.parquet
- config_name: beer
  data_files:
  - {split: train, path: data/train-*}
  - {split: test, path: data/test-*}
---
"""
RUN = [sys.executable, "-m", "trainkit", "run", "recipe.yaml"]
FETCH = [sys.executable, "-m", "trainkit.hub.fetch", "model.path", "model", "owner/small"]
WEIGHTS, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a llama of 26 MB in two files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "small"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=50_000, max_position_embeddings=64, **sizes)).save_pretrained(
        folder, max_shard_size="14MB"
    )
    return folder


@pytest.fixture
def named(tmp_path: Path, hub: Hub, model: Path, clean_environment: dict[str, str]) -> Iterator[Trainkit]:
    """`trainkit` in a folder with a recipe that names the model, with the tests' Hub and an empty cache."""
    hub.add("owner/small", model)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("It was a bright cold day in April. " * 90)
    yield call_trainkit(tmp_path, {**clean_environment, **hub.environment, "OMP_NUM_THREADS": "1"})


def call(named: Trainkit, *words: str, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    """`trainkit` with its words, which ends with the code."""
    done = named(*words, environ=environ)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def losses(folder: Path) -> list[list[float]]:
    """Those of each run, in the order of their start."""
    files = sorted(folder.glob("runs/named/*/metrics.jsonl"))
    records = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [[each["loss"] for each in run if "loss" in each] for run in records]


def test_a_model_is_fetched_once_for_all_ranks_pinned_and_not_asked_for_again(
    named: Trainkit, hub: Hub, model: Path, tmp_path: Path
) -> None:
    planned = named("plan", "recipe.yaml").stdout
    commit = hub.repository("owner/small").branches["main"].oid
    assert f"owner/small on the Hub (main, {commit[:7]})" in " ".join(planned.split())
    assert hub.downloads("owner/small", WEIGHTS) == 0
    first = call(named, "run", "recipe.yaml", "--with", "strategy/ddp", "nodes.processes_per_node=2")
    assert hub.downloads("owner/small", WEIGHTS) == 1
    (written,) = tmp_path.glob("runs/named/*/recipe.yaml")
    assert f"revision: {commit}" in written.read_text()
    seen = len(hub.requests)
    hub.repository("owner/small").change({"config.json": b"{}"})  # main is another commit now
    again = call(named, "run", "recipe.yaml")
    assert "fetch the model owner/small from the Hub" in first.stderr
    assert "from the Hub" not in again.stderr
    assert len(hub.requests) == seen
    call(named, "run", "recipe.yaml", f"model.path={model}")
    _, by_name, by_path = losses(tmp_path)
    assert by_name == by_path


def test_a_data_set_and_a_tokenizer_by_name_train_as_from_folders(named: Trainkit, hub: Hub, tmp_path: Path) -> None:
    import datasets

    rows = [{"text": f"{number} bottles of beer on the wall"} for number in range(99)]
    for file in ("train-00000-of-00001", "test-00000-of-00001", "other"):
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows" / "data" / f"{file}.parquet")
    (tmp_path / "rows" / "README.md").write_text(SUBSETS)
    save_tokenizer(tmp_path / "words")
    hub.add("owner/rows", tmp_path / "rows", kind="dataset")
    hub.add("owner/words", tmp_path / "words")
    (tmp_path / "rows.yaml").write_text(ROWS)
    stream = ("data.streaming=true", "data.validation_rows=9", "data.mix=[{path: owner/rows, subset: beer}]")
    for way in (
        ("data.path=owner/rows", "data.subset=beer", "data.tokenizer=owner/words"),
        ("data.path=rows", "data.subset=beer", "data.tokenizer=words"),
        (*stream, "data.tokenizer=owner/words"),
    ):
        call(named, "run", "rows.yaml", *way)
    runs = losses(tmp_path)
    assert runs[0] == runs[1]
    assert len(runs[2]) == len(runs[0])
    assert hub.downloads("owner/rows", "data/train-00000-of-00001.parquet") == 1
    assert not hub.downloads("owner/rows", "data/test-00000-of-00001.parquet")
    assert not hub.downloads("owner/rows", "data/other.parquet")
    for words, told in (
        (["data.path=owner/rows", "data.split=tset"], "data.split: owner/rows on the Hub has no split 'tset'"),
        (["data.path=owner/rows", "data.subset=bear"], "data.subset: owner/rows on the Hub has no subset 'bear'"),
        (["data.mix=[{path: owner/none}]", "data.streaming=true"], "owner/none is not a folder here"),
        (["data.mix=[{path: owner/rows, split: b}]", "data.streaming=true"], "data.mix.0.split: owner/rows on the Hub"),
    ):
        assert told in call(named, "plan", "rows.yaml", *words, code=2).stderr


def test_the_recipe_says_where_the_hub_and_its_cache_are(named: Trainkit, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(f"{RECIPE}env: {{HF_ENDPOINT: '{hub.url}', HF_HOME: '{tmp_path}/mine'}}\n")
    call(named, "run", "recipe.yaml", HF_ENDPOINT="http://127.0.0.1:9")
    assert list((tmp_path / "mine").rglob(WEIGHTS))
    assert not list(hub.home.rglob(WEIGHTS))


def test_what_was_fetched_needs_no_network_and_no_library(
    named: Trainkit, hub: Hub, model: Path, tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    (named_model,) = json.loads(named("plan", "recipe.yaml", "--json").stdout)["repositories"]
    environ = {**clean_environment, **hub.environment}
    subprocess.run([*FETCH, named_model["commit"]], env=environ, timeout=60, check=True, stdout=subprocess.PIPE)
    hub.close()
    call(named, "run", "recipe.yaml", HF_HUB_OFFLINE="1")
    assert "is in the cache" in " ".join(named("plan", "recipe.yaml").stdout.split())
    code = "import atexit, sys, runpy; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
    code += "sys.argv[:] = ['trainkit', 'plan', 'recipe.yaml', *sys.argv[1:]]; "
    code += "runpy.run_module('trainkit', run_name='__main__')"

    def imported(*words: str) -> set[str]:
        command = [sys.executable, "-c", code, *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=True
        )
        return set(done.stderr.split())

    by_name = imported()
    assert not {each.partition(".")[0] for each in by_name} & {"huggingface_hub", "transformers", "torch"}
    more = by_name - imported(f"model.path={model}")  # or it would take longer than on a folder
    assert more <= {"trainkit.hub.lookup"}


REFUSED = (
    (["model.path=owner/none"], 2, "the Hub has no model of that name"),
    (["model.path=owner/gated"], 4, "owner/gated is gated"),
    (["model.revision=v9"], 2, "has no revision 'v9'"),
    (["model.path=owner/odd"], 2, "has nothing that the trainer reads there"),
    (["model.path=recipe.yaml", "model.revision=v1"], 2, "and recipe.yaml is none"),
    (["peft.kind=lora", "peft.path=owner/small"], 2, "peft.path: owner/small on the Hub has nothing that"),
    (["data.tokenizer=owner/none"], 2, "data.tokenizer: owner/none is not a folder here"),
)


def test_what_the_hub_does_not_give_is_said_before_anything_starts(
    named: Trainkit, hub: Hub, model: Path, tmp_path: Path
) -> None:
    hub.add("owner/gated", model, gated=True)
    hub.add("owner/odd", {"config.json": "{}", "weights.gguf": "x"})
    for words, code, told in REFUSED:
        assert told in call(named, "run", "recipe.yaml", *words, code=code).stderr
    assert not (tmp_path / "runs").exists()


def test_a_model_that_its_task_cannot_train_is_refused_by_its_name(named: Trainkit, hub: Hub) -> None:
    hub.add("owner/t5", {"config.json": '{"model_type": "t5"}', "model.safetensors": "x"})
    done = call(named, "plan", "recipe.yaml", "model.path=owner/t5", code=2)
    assert "t5 is an encoder-decoder" in done.stderr
    assert "set model.task: seq2seq_lm" in done.stderr
    assert not hub.downloads("owner/t5", "model.safetensors")


def test_chats_for_a_tokenizer_without_a_template_are_refused_by_its_name(
    named: Trainkit, hub: Hub, tmp_path: Path
) -> None:
    hub.add("owner/base", {"tokenizer_config.json": "{}", "tokenizer.json": "{}"})
    hub.add("owner/chat", {"tokenizer_config.json": "{}", "tokenizer.json": "{}", "chat_template.jinja": "x"})
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    data = ["data.kind=dataset", "data.path=chats.jsonl", "data.tokenizer=owner/base"]
    done = call(named, "plan", "recipe.yaml", *data, code=2)
    assert "and the tokenizer owner/base has no chat template" in done.stderr
    assert "set data.chat_template: " in done.stderr
    assert not hub.downloads("owner/base", "tokenizer.json")
    call(named, "plan", "recipe.yaml", *data, "data.tokenizer=owner/chat")
    assert not hub.downloads("owner/chat", "chat_template.jinja")


def test_a_gated_model_opens_to_a_token(named: Trainkit, hub: Hub, model: Path) -> None:
    hub.add("owner/gated", model, gated=True, readers=("rob",))
    done = call(named, "run", "recipe.yaml", "model.path=owner/gated", HF_TOKEN=READER)
    assert READER not in done.stdout + done.stderr


def test_without_a_network_and_with_nothing_in_the_cache_nothing_starts(named: Trainkit, hub: Hub) -> None:
    offline = call(named, "run", "recipe.yaml", code=4, HF_HUB_OFFLINE="1")
    hub.close()
    for done in (offline, call(named, "run", "recipe.yaml", code=4)):
        assert "owner/small is not whole in the Hub's cache, and the Hub cannot be asked" in done.stderr


def test_a_hub_that_fails_in_the_middle_ends_the_run_before_its_ranks(named: Trainkit, hub: Hub) -> None:
    call(named, "plan", "recipe.yaml")
    hub.fail("/*/resolve/*", status=403, times=None)
    assert "owner/small cannot be fetched from the Hub: " in call(named, "run", "recipe.yaml", code=4).stderr


FULL = """
mount -t tmpfs -o size=60m tmpfs "$HF_HOME" || exit 77
"$@" &
until find "$HF_HOME" -path "*/trainkit/*" -size +1M | grep -q .; do sleep 0.05; done 2>/dev/null
cat /dev/zero > "$HF_HOME/fill" 2>/dev/null
wait $!
code=$?
find "$HF_HOME" -path "*/trainkit/*"
exit $code
"""


def test_a_disk_that_fills_up_meanwhile_ends_the_run_and_keeps_no_parts(
    named: Trainkit, hub: Hub, tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    hub.home.mkdir(exist_ok=True)
    hub.fail(f"*/{SECOND}", bytes_per_second=4 << 20, times=None)
    words = ["unshare", "--map-root-user", "--mount", "sh", "-c", FULL, "sh", *RUN]
    done = subprocess.run(
        words, cwd=tmp_path, env={**clean_environment, **hub.environment},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if done.returncode == 77 or done.stderr.startswith("unshare: "):
        pytest.skip(f"this machine grants no mount namespaces: {done.stderr}")
    assert done.returncode == 4, done.stderr
    assert f"owner/small: the disk of the Hub's cache {hub.home}/hub is full" in done.stderr
    assert not done.stdout


def test_a_fetch_that_was_killed_goes_on_where_it_was(
    named: Trainkit, hub: Hub, tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    hub.fail(f"*/{SECOND}", bytes_per_second=4 << 20, times=None)
    environment = {**clean_environment, **hub.environment, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(RUN, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        files = hub.repository("owner/small").branches["main"].files
        until(lambda: bool(list(hub.home.rglob(f"blobs/{files[WEIGHTS].sha256}"))))
        until(lambda: any(part.stat().st_size > 1 << 20 for part in hub.home.rglob(files[SECOND].sha256)))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    until(lambda: not fetching(hub.environment))
    (size,) = (part.stat().st_size for part in hub.home.rglob(files[SECOND].sha256))
    hub.faults.clear()
    call(named, "run", "recipe.yaml")
    assert hub.downloads("owner/small", WEIGHTS) == 1
    assert [each.range for each in hub.contents("owner/small", SECOND)] == ["bytes=0-", f"bytes={size}-"]
    assert not list(hub.home.glob("hub/*/trainkit"))


def test_a_fetch_that_is_ended_leaves_no_part_that_none_goes_on_with(
    hub: Hub, tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    commit = hub.add("owner/small", {"config.json": "{}", "model.safetensors": bytes(5_000_000)}).branches["main"].oid
    hub.fail("*/model.safetensors", bytes_per_second=1 << 20, times=None)
    blobs = hub.home / "hub/models--owner--small/blobs"
    with subprocess.Popen([*FETCH, commit], env={**clean_environment, **hub.environment}) as process:
        until(lambda: bool(hub.contents("owner/small", "model.safetensors")))
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    assert [len(path.name) for path in blobs.iterdir()] == [40], "config.json alone"


def test_two_runs_at_once_fetch_once(
    named: Trainkit, hub: Hub, model: Path, tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    size = (model / WEIGHTS).stat().st_size
    hub.fail("*", bytes_per_second=size // 2, times=None)
    environment = {**clean_environment, **hub.environment, "OMP_NUM_THREADS": "1"}
    both = [subprocess.Popen(RUN, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert hub.sent("owner/small", WEIGHTS) == size
    assert any("another run is doing this" in each for each in told)
    assert any(" of 24" in each and "MiB" in each for each in told)  # how far it is


def until(seen: Callable[[], bool], seconds: float = 60) -> None:
    give_up = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def fetching(environment: Mapping[str, str]) -> list[int]:
    """Processes with this Hub's address that still fetch."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
            mine = f"HF_ENDPOINT={environment['HF_ENDPOINT']}".encode() in (folder / "environ").read_bytes()
        except OSError:  # it has ended, or is another user's
            continue
        if mine and b"trainkit" in words and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found
