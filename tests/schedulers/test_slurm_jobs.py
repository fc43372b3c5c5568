"""Jobs of Slurm: what of the submitter's environment reaches them, and their script."""

from __future__ import annotations

import pytest

from trainkit.schedulers.slurm import surroundings, without_settings

HERE = {"PATH": "/bin", "HOME": "/h", "SLURM_CONF": "/etc/slurm.conf", "SLURM_JWT": "token"}


def test_slurms_commands_do_what_they_are_told_whatever_is_set_where_trainkit_is_called() -> None:
    settings = {
        "SBATCH_TIMELIMIT": "1", "SLURM_TIME_FORMAT": "relative", "SLURM_CLUSTERS": "b", "SLURM_JOB_ID": "7",
        "SRUN_CPUS_PER_TASK": "3", "SCANCEL_INTERACTIVE": "1",
    }  # fmt: skip
    assert without_settings(HERE | settings, "scancel") == HERE
    # Else an array's tasks that wait are cut off.
    assert without_settings(HERE | {"SLURM_BITSTR_LEN": "9"}, "scontrol") == HERE | {"SLURM_BITSTR_LEN": "0"}
    assert without_settings(HERE | settings, "sbatch") == HERE | {"SCANCEL_INTERACTIVE": "1"}  # as the job may use it
    assert without_settings(HERE | settings, "ssh") == HERE | settings


@pytest.mark.parametrize(
    ("environ", "words", "said"),
    [
        ({"SLURM_TIME_FORMAT": "relative", "SQUEUE_FORMAT": "%i"}, (), []),
        (
            {"SBATCH_TIMELIMIT": "1", "SBATCH_QOS": "a", "SLURM_CLUSTERS": "b"},
            (),
            [
                (
                    "warning",
                    "SBATCH_QOS, SBATCH_TIMELIMIT, SLURM_CLUSTERS: not handed on",
                    "cluster.qos, cluster.time, c",
                )
            ],
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "9", "SBATCH_EXPORT": "NONE"},
            (),
            [("note", "from inside job 7", ""), ("warning", "SBATCH_EXPORT: not", "cluster.sbatch=[--export=…]")],
        ),
        (
            {"VIRTUAL_ENV": "/v", "CONDA_PREFIX": "/c"},
            (),
            [("note", "inherits from this shell: CONDA_PREFIX", "unset")],
        ),
        ({"LD_PRELOAD": "/l.so"}, ("--export=ALL",), [("note", "inherits from this shell: LD_PRELOAD", "unset")]),
        ({"LD_PRELOAD": "/l.so"}, ("--export=FOO=1,all",), [("note", "inherits from this shell: LD_PRELOAD", "unset")]),
        ({"LD_PRELOAD": "/l.so"}, ("--export=NONE",), []),
        ({"LD_PRELOAD": "/l.so"}, ("--export=FOO=ALL",), []),
    ],
)
def test_what_a_job_gets_from_where_it_is_submitted_is_named(
    environ: dict[str, str], words: tuple[str, ...], said: list[tuple[str, str, str]]
) -> None:
    found = list(surroundings(HERE | environ, words, "/v/bin/python"))
    assert [each.severity for each in found] == [severity for severity, *_ in said]
    for each, (_, what, hint) in zip(found, said, strict=True):
        assert (what in each.what, hint in each.hint) == (True, True), each


@pytest.mark.parametrize(
    ("environ", "keys"),
    [
        (["SLURM_BITSTR_LEN", "SLURM_EXIT_ERROR", "SRUN_X", "SLURM_CPU_BIND", "SBATCH_X", "SBATCH_NOSUCH"], ""),
        (["SBATCH_ARRAY_INX", "SBATCH_WAIT"], ""),  # no recipe has them
        (["SLURM_HINT", "SLURM_BITSTR_LEN"], "cluster.sbatch=[--hint=…]"),
        (["SBATCH_OVERCOMMIT"], "cluster.sbatch=[--overcommit]"),
        (["SBATCH_REQ_SWITCH", "SBATCH_WAIT4SWITCH"], "cluster.sbatch=[--switches=…]"),
    ],
)
def test_an_option_stands_in_a_hint_where_sbatch_has_it(environ: list[str], keys: str) -> None:
    (found,) = surroundings(HERE | dict.fromkeys(environ, "1"), (), "/v/bin/python")
    assert found.what.startswith(f"{', '.join(sorted(environ))}: not handed on")
    assert found.hint == (f"say it in the recipe, or unset it here: {keys}" if keys else "")
