"""Imports of batch scripts of Slurm: what they ask for becomes `cluster`, and nothing in them is dropped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as limited
from hypothesis import strategies as st

from tests.convert.reading import comments, imported, read, settings
from trainkit.convert.sbatch import time_limit
from trainkit.errors import RecipeError, UsageError
from trainkit.launch_plan.model import Variable
from trainkit.machine.facts import Facts, Gpu
from trainkit.planner.build import build_plan
from trainkit.schedulers.slurm import seconds

TORCHRUN = "torchrun --nproc_per_node 4 train.py"

pytestmark = pytest.mark.cli


def job(lines: str, command: str = TORCHRUN) -> str:
    """The recipe of a batch script; each of the lines has an option."""
    asked = "".join(f"#SBATCH {line}\n" for line in lines.split("\n") if line)
    return imported("job.sh", {"job.sh": f"#!/bin/bash\n{asked}{command}\n"})


@pytest.mark.parametrize(
    ("lines", "key", "value"),
    [
        ("-p gpu,big", "cluster.partition", "gpu,big"),
        ("--account='my acct'", "cluster.account", "my acct"),
        ("-q low", "cluster.qos", "low"),
        ("-C a100&nvlink", "cluster.constraint", "a100&nvlink"),
        ("-w tk[1-2]", "cluster.nodelist", "tk[1-2]"),
        ("-x tk3", "cluster.exclude", "tk3"),
        ("-t 90", "cluster.time", "90:00"),
        ("-t 2-0", "cluster.time", "2-00"),
        ("-t 1:2:3", "cluster.time", "1:02:03"),
        ("--time=UNLIMITED", "cluster.time", "infinite"),
        ("--mem=64000", "cluster.memory_per_node", "64000M"),
        ("--mem=2048G", "cluster.memory_per_node", "2T"),
        ("--mem 0", "cluster.memory_per_node", "0"),
        ("--mem-per-gpu=60G\n--gres=gpu:4", "cluster.memory_per_node", "240G"),
        ("--mem-per-cpu=2G\n-c 6\n-n 2\n-N 1", "cluster.memory_per_node", "24G"),
        ("--cpus-per-gpu=8\n--gpus-per-node=4", "cluster.cpus_per_node", 32),
        ("--gpus-per-node=h100:4", "cluster.gpu_kind", "h100"),
        ("--gres=gpu:a100:4", "cluster.gpus", "gres"),
        ("--exclusive", "cluster.gpus", "none"),
        ("--gpus=8 -N2", "devices.select", 4),
        ("--gpus-per-task=4 --ntasks-per-node=1", "devices.select", 4),
        ("--exclusive", "cluster.exclusive", True),
        ("--no-requeue", "cluster.requeue.after", []),
        ("--signal=B:USR1@300", "cluster.requeue.warn_seconds", 300),
        ("--mail-type=END --switches=1", "cluster.sbatch", ["--mail-type=END", "--switches=1"]),
    ],
)
def test_options_become_settings(lines: str, key: str, value: object) -> None:
    assert settings(job(lines))[key] == value


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("--output=%j.out", "`--output=%j.out` is left out: the job's output is job.out"),
        ("--array=0-3", "`--array=0-3` is left out: `trainkit submit --variant all`"),
        ("--nosuch=1", "Slurm has no such option"),
        ("-p <partition>", "`--partition=<partition>` is to be replaced: set cluster.partition"),
        ("-N 2-4", "the least, 2, is taken"),
        ("-N 2", "The job has 2 nodes, and the command starts the program on one"),
        ("--gres=gpu:2", "The job asks for 2 GPUs on each node, and the command starts 4 ranks there"),
        ("--gres=gpu:4,nvme:1", "only GPUs are taken over"),
        ("--signal=TERM@60", "trainkit has Slurm send USR1 to the job script"),
        ("--exclusive=user", "is taken over as --exclusive"),
        ("--ntasks-per-node=4", "no srun starts the tasks"),
    ],
)
def test_what_is_not_taken_over_is_named(lines: str, said: str) -> None:
    assert said in comments(job(lines))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("--nodes=$NODES", "`--nodes=$NODES` is not a number"),
        ("--gpus=5 -N2", "is not the same number of GPUs on each of 2 nodes"),
        ("--mem-per-gpu=60G", "nothing says how many there are"),
        ("--time=soon", "`--time=soon` is not a time limit that Slurm accepts"),
        ("--mem=lots", "`--mem=lots` is not an amount of memory"),
    ],
)
def test_what_is_wrong_stands_at_its_line(lines: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        job(lines)
    (found,) = caught.value.diagnostics
    assert said in found.what
    assert found.origin is not None
    assert (found.origin.source, found.origin.line) == ("job.sh", 2)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (
            "#!/bin/bash -l",
            "`#!/bin/bash -l` is left out: trainkit's job.sh is started by /bin/bash without options. It is a",
        ),
        ("#!/bin/bash --login", "source them in cluster.setup where the job needs them"),
        ("#!/usr/bin/zsh", "`#!/usr/bin/zsh` is left out: trainkit's job.sh is started by /bin/bash without options."),
        ("#!/usr/bin/env bash", ""),
        ("#! /bin/sh", ""),
    ],
)
def test_the_shell_of_a_script_is_named_where_it_is_another(first: str, said: str) -> None:
    found = comments(imported("job.sh", {"job.sh": f"{first}\n#SBATCH -t 5\n{TORCHRUN}\n"}))
    assert said in found if said else "without options" not in found


def test_tasks_of_an_array_become_variants() -> None:
    table = "LRS=(1e-4 3e-4 1e-3)"
    text = job("--array=0-2%2", f"{table}\n{TORCHRUN} --lr ${{LRS[$SLURM_ARRAY_TASK_ID]}} --seed 1")
    assert [read(text, variant=name).recipe.program.args for name in ("lr-1e-4", "lr-3e-4", "lr-1e-3")] == [
        {"lr": "1e-4", "seed": "1"}, {"lr": "3e-4", "seed": "1"}, {"lr": "1e-3", "seed": "1"},
    ]  # fmt: skip
    for ids, turns in {"1,4": 2, "0-15:4": 4, "3": 0}.items():
        made = job(f"--array={ids}", f"{TORCHRUN} --seed $SLURM_ARRAY_TASK_ID")
        assert made.count("  seed-") == turns
    with pytest.raises(UsageError, match="the tasks of its array start different programs"):
        job("--array=0-1", f"if [ $SLURM_ARRAY_TASK_ID = 0 ]; then {TORCHRUN}; else python other.py; fi")
    with pytest.raises(UsageError, match="the tasks of its array start different programs"):
        job("--array=0-5000", f"{TORCHRUN} --seed $SLURM_ARRAY_TASK_ID")


def test_one_process_of_torchruns_on_each_node_stays_one() -> None:
    made = job("-N 2 --gpus-per-node=8", "srun torchrun --nnodes 2 --nproc_per_node=1 --master_addr h train.py")
    assert read(made).recipe.nodes.processes_per_node == 1


@pytest.mark.parametrize("written", ["$SLURM_ARRAY_TASK_ID", "x-${SLURM_ARRAY_TASK_ID:-0}"])
def test_a_variable_that_only_the_job_knows_is_named(written: str) -> None:
    said = "SLURM_ARRAY_TASK_ID is known only in the job, and a plan is made where it is submitted"
    assert said in comments(job("-t 5", f"{TORCHRUN} --seed {written} --tasks $SLURM_NTASKS"))
    assert said not in comments(job("-t 5", f"{TORCHRUN} --seed $SEED --tasks $SLURM_NTASKS"))


def test_one_task_for_each_card_is_a_run_of_as_many_ranks() -> None:
    made = job("-N 2 --ntasks-per-node=4 --gres=gpu:4 -c 8", "srun --mpi=pmix -K1 python -u train.py --n $SLURM_NTASKS")
    recipe = read(made).recipe
    assert (recipe.nodes.count, recipe.nodes.processes_per_node, recipe.strategy.kind) == (2, 4, "ddp")
    found = settings(made)
    assert (found["cluster.cpus_per_node"], found["cluster.srun"]) == (32, ["--mpi=pmix"])
    assert found["program.args.n"] == "8"
    assert "a script that reads SLURM_PROCID" in comments(made)
    assert "`--kill-on-bad-exit=1` is left out" in comments(made)


def test_tasks_that_only_srun_names_count() -> None:
    found = settings(job("-N 2 --gres=gpu:4", "srun --ntasks-per-node=4 python train.py"))
    assert (found["nodes.count"], found["nodes.processes_per_node"]) == (2, 4)


@pytest.mark.parametrize("launch", ["torchrun", "python -u -m torch.distributed.run"])
def test_a_launcher_on_several_nodes_meets_at_the_jobs_first_one(launch: str) -> None:
    command = (
        "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)\n"
        f"srun bash -c '{launch} --nproc_per_node 4 --nnodes $SLURM_NNODES --node_rank $SLURM_PROCID "
        "--rdzv_endpoint $MASTER_ADDR:29500 train.py'"
    )
    made = job("-N 2 --ntasks-per-node=1 --gres=gpu:4", command)
    recipe = read(made).recipe
    assert (recipe.nodes.count, recipe.nodes.processes_per_node, recipe.nodes.rendezvous) == (2, 4, "auto")
    assert "Where nodes meet is left out" in comments(made)
    assert "MASTER_ADDR is what" not in comments(made)


def test_what_prepares_the_environment_goes_with_the_job() -> None:
    command = (
        "module load cuda/12.1\nsource ~/venv/bin/activate\nexport A=1 PATH=/x:$PATH\nexport NOW=$(date)\n"
        f'eval "$(conda shell.bash hook)"\nrm -rf cache\n{TORCHRUN}'
    )
    made = job("--gres=gpu:4", command)
    found = settings(made)
    assert found["env.A"] == "1"
    setup = read(made).recipe.cluster.setup  # type: ignore[union-attr]
    assert setup == [
        "module load cuda/12.1",
        "source ~/venv/bin/activate",
        'export PATH="/x:${PATH}"',
        "export NOW=$(date)",
        'eval "$(conda shell.bash hook)"',
    ]
    assert "`rm -rf cache` before the command is not taken over" in comments(made)


def test_a_job_name_names_the_recipe() -> None:
    assert read(job("-J 'a b'")).recipe.name == "a-b"
    assert "becomes a-b" in comments(job("-J 'a b'"))


def test_comments_in_an_array_are_no_words() -> None:
    made = job("--gres=gpu:4", 'ARGS=(\n --nproc_per_node=4 # For cards\n)\nsrun torchrun "${ARGS[@]}" train.py')
    assert read(made).recipe.program.script == "train.py"


@given(st.integers(0, 60), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59), st.sampled_from(range(6)))
def test_a_time_limit_keeps_its_length(days: int, hours: int, minutes: int, last: int, form: int) -> None:
    forms = (
        f"{minutes}", f"{minutes}:{last}", f"{hours}:{minutes}:{last}", f"{days}-{hours}", f"{days}-{hours}:{minutes}",
        f"{days}-{hours}:{minutes}:{last}",
    )  # fmt: skip
    made = time_limit(forms[form])
    assert made is not None
    assert seconds(made) == (seconds(forms[form]) or None)


WORD = st.from_regex(r"[a-z0-9][a-z0-9 &|_.-]{0,8}", fullmatch=True).map(str.strip).filter(lambda word: word != "")
SECTION = st.fixed_dictionaries(
    {"gpus": st.sampled_from(["gpus-per-node", "gres", "none"]), "cpus_per_node": st.integers(1, 256)},
    optional={
        **dict.fromkeys(("partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude"), WORD),
        "time": st.sampled_from(["10:00", "1:00:00", "1-12:00:00", "2-00", "infinite"]),
        "memory_per_node": st.sampled_from(["0", "1G", "480G", "1000M", "3T"]),
        "exclusive": st.just(True),
        "gpu_kind": st.from_regex(r"[a-z][a-z0-9]{1,6}", fullmatch=True),
        "sbatch": st.lists(WORD.map(lambda word: f"--comment={word}"), min_size=1, max_size=2),
        "setup": st.just(["module load cuda/12.8", "ulimit -n 4096"]),
    },
)
MACHINE = Facts(
    platform="linux", machine="x86_64", hostname="h", python="3.11", executable="python", cpu_cores=64,
    memory_total=1 << 40, gpus=tuple(
        Gpu(number, f'card-{number}', 'H100', 80 << 30, 80 << 30, compute_capability=(9, 0)) for number in range(4)
    ),
)  # fmt: skip


@limited(max_examples=12)
@given(SECTION, st.integers(1, 9), st.integers(10, 900), st.booleans())
def test_the_job_of_a_plan_imports_as_the_section_that_made_it(
    section: dict[str, object], nodes: int, warn: int, requeue: bool
) -> None:
    section = {**section, "requeue": {"warn_seconds": warn, **({} if requeue else {"after": []})}}
    if section["gpus"] == "none":
        section.pop("gpu_kind", None)
    body = "".join(f"  {key}: {flow(value)}\n" for key, value in section.items())
    recipe = (
        "version: 1\nname: r\nprogram: {kind: torch, script: train.py}\nstrategy: {kind: ddp}\n"
        f"devices: {{select: 4}}\nnodes: {{count: {nodes}, processes_per_node: 4}}\ncluster:\n  kind: slurm\n{body}"
    )
    resolved = read(recipe)
    plan = build_plan(resolved, MACHINE).plan
    assert plan.job is not None
    content = plan.job.content.bind({Variable.RUN_DIR: "/runs/r/1"})
    last = content.rindex("exec ")
    script = f"{content[:last]}srun torchrun --nnodes {nodes} --nproc_per_node 4 train.py\n"
    again = read(imported("job.sh", {"job.sh": script})).recipe
    assert again.cluster == resolved.recipe.cluster
    assert (again.name, again.nodes.count, again.nodes.processes_per_node) == ("r", nodes, 4)


def flow(value: object) -> str:
    """As YAML on one line."""
    import json

    return json.dumps(value)
