"""Submit a plan: ask the scheduler whether it would take the job, make the run directory, give the job in."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainkit.errors import Diagnostic, MachineError, RecipeError
from trainkit.files import publish, write_json
from trainkit.launch_plan.model import Job as PlannedJob
from trainkit.launch_plan.model import Plan, Variable, bind_words
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import Kubernetes, Slurm
from trainkit.recipe.yaml_writer import resolved_yaml
from trainkit.runner.rundir.code_state import Looked
from trainkit.runner.rundir.create import create_run_dir, write_plan
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.supervisor.processes import STOP
from trainkit.schedulers import kubectl, kubernetes, slurm
from trainkit.schedulers.base import Job, NoAnswerError, RefusedError
from trainkit.schedulers.client import answer_or, ask
from trainkit.schedulers.jobs import pods
from trainkit.schedulers.jobs.records import Submission, write_submission
from trainkit.schedulers.kubernetes import REHEARSED_RUN
from trainkit.schedulers.slurm_answers import amount, seconds
from trainkit.text import listed

# What Slurm says of a job that it refuses -> the recipe key that asks for it.
BLAMED = {
    "partition": "cluster.partition",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "time limit": "cluster.time",
    "node count": "nodes.count",
    "memory": "cluster.memory_per_node",
    "gres": "cluster.gpus",
    "tres": "cluster.gpus",
    "feature": "cluster.constraint",
    "reservation": "cluster.reservation",
    "node name": "cluster.nodelist",
}
NO_SUCH_NODES = "node configuration is not available"  # Slurm's words, whatever of it is not
# Option of the job script that asks for something of the nodes -> the recipe keys that it may be due to.
OF_NODES = {
    "nodelist": ("cluster.nodelist",),
    "exclude": ("cluster.exclude",),
    "constraint": ("cluster.constraint",),
    "mem": ("cluster.memory_per_node",),
    "gres": ("cluster.gpu_kind", "devices.select", "nodes.processes_per_node", "cluster.machine", "cluster.gpus"),
    "gpus-per-node": ("cluster.gpu_kind", "devices.select", "nodes.processes_per_node", "cluster.machine"),
    "cpus-per-task": ("cluster.cpus_per_node", "nodes.processes_per_node", "cluster.machine"),
    "nodes": ("nodes.count",),
}


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What the scheduler says of a job before it is given in. remarks: to be shown; refused: why it would not run."""

    said: str
    remarks: tuple[Diagnostic, ...] = ()
    refused: tuple[Diagnostic, ...] = ()


def rehearse(
    plan: Plan, resolved: Resolved, environ: Mapping[str, str], folder: str, content: str | None = None
) -> Rehearsal:
    """Ask the scheduler. folder: where files may lie meanwhile. MachineError where it cannot be asked.

    content: of the job script, where it is not the plan's own.
    """
    job, section = plan.job, resolved.recipe.cluster
    assert job is not None
    if isinstance(section, Kubernetes):
        return _rehearse_pods(plan, resolved, environ, folder)
    assert isinstance(section, Slurm)
    cluster = slurm.named_cluster(section.sbatch)
    try:
        settings = {} if cluster is None else ask(slurm.configuration(cluster), environ)
    except RefusedError as error:
        raise MachineError(f"Slurm does not answer: {error}", hint="submit where `sinfo` answers") from error
    python = str(plan.commands[0].wrapper[0])
    found = [*slurm.surroundings(environ, section.sbatch, python)]
    found += [*_limits(section, resolved, plan, environ), *_times(section, plan, settings)]
    found += _not_taken(plan, resolved, environ)
    if why := _unreadable(os.path.abspath(plan.output_root)):  # noqa: PTH100 - as it is written, links and all
        found.append(resolved.error("output.root", why, OTHER_FOLDER))
    said, script = "", bound_content(job, folder) if content is None else content
    try:
        said = _tried(script, folder, environ)
    except RefusedError as error:
        if all(each.severity != "error" for each in found):  # else the same is said twice
            found.append(_refusal(str(error), resolved, script, folder, environ))
    errors = tuple(each for each in found if each.severity == "error")
    return Rehearsal(said, tuple(each for each in found if each.severity != "error"), errors)


def _tried(script: str, folder: str, environ: Mapping[str, str]) -> str:
    """What Slurm says of a job script. Raises RefusedError."""
    path = os.path.join(folder, slurm.SCRIPT)  # noqa: PTH118 - a path for sbatch
    publish(path, script, mode=0o700)
    return ask(slurm.rehearsal(("sbatch", path)), environ)


def _refusal(said: str, resolved: Resolved, script: str, folder: str, environ: Mapping[str, str]) -> Diagnostic:
    """Slurm's refusal, at the key that asks for what there is not."""
    hint = "`sinfo` and `scontrol show partition` say what there is"
    option = _too_much(script, folder, environ) if NO_SUCH_NODES in said else ""
    if not option:
        key = next((key for word, key in BLAMED.items() if word in said.lower()), "cluster")
        return resolved.error(key, f"Slurm refuses the job: {said}", hint)
    keys = OF_NODES[option[2:].partition("=")[0]]
    key = next((each for each in keys if resolved.given(each)), keys[0])
    return resolved.error(key, f"Slurm refuses the job for its {option}: {said}", hint)


def _too_much(script: str, folder: str, environ: Mapping[str, str]) -> str:
    """The option of a job script without which Slurm would take it; empty where it is not one alone."""
    lines = script.splitlines(keepends=True)
    for name in OF_NODES:
        for place, line in enumerate(lines):
            if line.startswith(f"#SBATCH --{name}="):
                with contextlib.suppress(RefusedError):
                    _tried("".join(lines[:place] + lines[place + 1 :]), folder, environ)
                    return line.removeprefix("#SBATCH ").strip()
    return ""


def _limits(section: Slurm, resolved: Resolved, plan: Plan, environ: Mapping[str, str]) -> Iterator[Diagnostic]:
    """What --test-only says nothing of: limits that would keep the job waiting for ever, times that are too short."""
    cluster = slurm.named_cluster(section.sbatch)
    if cluster is None:  # its limits are those of the cluster that Slurm will choose
        return
    asked = seconds(section.time) if section.time else None
    too_short, others = list[str](), list[str]()
    for name in (section.partition or "").split(","):
        try:
            limits = ask(slurm.partition(name, cluster), environ)
        except RefusedError:  # --test-only says it in its words
            continue
        most, of = seconds(limits.get("MaxTime", "UNLIMITED")), limits.get("PartitionName", name)
        if most is not None and section.time and (asked is None or asked > most):
            too_short.append(f"partition {of} has MaxTime={limits['MaxTime']}")
        else:
            others.append(of)
        grace = amount(limits.get("GraceTime", "")) or 0.0
        if 0 < grace < plan.grace_seconds and "preemption" in section.requeue.after:
            what = f"partition {of} gives a preempted job {grace:.0f} s, and launcher.grace_seconds is "
            hint = f"set launcher.grace_seconds to less than {grace:.0f}"
            yield Diagnostic("warning", f"{what}{plan.grace_seconds:g}", key="launcher.grace_seconds", hint=hint)
    what = f"cluster.time is {section.time}, and {listed(too_short)}"
    if too_short and others:  # of several Slurm takes any that will do (EnforcePartLimits=ALL: --test-only refuses it)
        where = f"the job starts in {listed(others)} alone"
        yield Diagnostic("note", f"{what}: {where}", "cluster.partition", resolved.origin("cluster.partition"))
    elif too_short:
        why = "Slurm takes such a job, and never starts it"
        yield resolved.error("cluster.time", what, "write at most what the partition allows", why=why)


def _times(section: Slurm, plan: Plan, settings: Mapping[str, str]) -> Iterator[Diagnostic]:
    """Times that leave too little to save in. settings: Slurm's."""
    if section.requeue.warn_seconds <= plan.grace_seconds:
        what = f"cluster.requeue.warn_seconds is {section.requeue.warn_seconds}, and launcher.grace_seconds is "
        hint = "the run must save and end in between: set warn_seconds higher"
        yield Diagnostic("warning", f"{what}{plan.grace_seconds:g}", key="cluster.requeue.warn_seconds", hint=hint)
    wait = amount(settings.get("KillWait", ""))
    if wait is not None and wait < plan.grace_seconds and not section.requeue.after:
        what = f"Slurm kills {wait:.0f} s after it has told a job to end (KillWait), and launcher.grace_seconds is "
        hint = f"set launcher.grace_seconds to less than {wait:.0f}, or have it asked earlier: cluster.requeue.after"
        yield Diagnostic("warning", f"{what}{plan.grace_seconds:g}", key="launcher.grace_seconds", hint=hint)


def _not_taken(plan: Plan, resolved: Resolved, environ: Mapping[str, str]) -> Iterator[Diagnostic]:
    """Variables that the job is to take from here, and that are not there; its set-up may yet have them."""
    for name in plan.environment.take:
        if name not in environ:
            what = f"{name} is not set in the environment, and env_from passes it on"
            hint = "export it before you submit, unless cluster.setup does: without it no rank is started"
            yield Diagnostic("warning", what, "env_from", resolved.origin("env_from"), hint=hint)


def _rehearse_pods(plan: Plan, resolved: Resolved, environ: Mapping[str, str], folder: str) -> Rehearsal:
    """Ask the API server: it knows the schemas, the namespace, its quotas and webhooks; no claim, secret or image."""
    assert plan.job is not None
    files = pods.files(plan, resolved_yaml(resolved), REHEARSED_RUN)
    for name, content in files.items():
        publish(os.path.join(folder, name), content)  # noqa: PTH118 - a path for kubectl
    argv = bind_words(plan.job.submit, {Variable.RUN_DIR: folder})
    try:
        return Rehearsal(ask(kubectl.rehearsal(argv), environ))
    except RefusedError as error:
        hint = "`kubectl auth can-i create` and `kubectl explain` say what the cluster takes"
        what = f"Kubernetes refuses the job: {error}"
        return Rehearsal("", refused=(resolved.error(kubernetes.blamed(str(error)), what, hint),))


OTHER_FOLDER = "set output.root to a folder without it"


def _unreadable(path: str) -> str:
    """Why Slurm would not take a path for what it is; empty where it would."""
    found = next((name for mark, name in (("%", "a %"), ("\n", "a line end")) if mark in path), "")
    return f"Slurm reads the name of its output in its own way, and {path!r} has {found}" if found else ""


def check_folder(run_dir: str) -> None:
    """MachineError for a path that Slurm would not take for what it is."""
    if why := _unreadable(run_dir):
        raise MachineError(why, hint=OTHER_FOLDER)


def write_record(
    layout: RunLayout, plan: Plan, recipe_yaml: str, command_shell: str, looked: Looked | None = None
) -> None:
    """What a run directory has of any submitted run. Raises OSError."""
    write_plan(layout, plan, recipe_yaml, command_shell, looked)
    write_json(layout.status, {"state": "queued", "run_id": layout.id, "attempt": 0})


def write_script(layout: RunLayout, job: PlannedJob, script: str) -> None:
    """The job script, and the file of its output. Raises OSError."""
    publish(layout.root / job.file, script, mode=0o777)
    (layout.root / "job.out").touch()


def bound_content(job: PlannedJob, run_dir: str) -> str:
    """The job script of a run directory, whose path a shell and sbatch read."""
    check_folder(run_dir)
    return job.content.bind({Variable.RUN_DIR: shlex.quote(run_dir)})


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and the like wait meanwhile: a job that is given in is also written down, and told of."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def give_in(argv: Sequence[str], layout: RunLayout, script: str, environ: Mapping[str, str]) -> Submission:
    """Give a job script to Slurm. Where sbatch does not say the job's number, or has failed, the queue is asked.

    Raises RefusedError and MachineError where Slurm has no such job, NoAnswerError where nobody knows.
    """
    controller = answer_or(slurm.controller(), "", environ)

    def given(job: Job) -> Submission:
        return Submission("slurm", job.id, tuple(argv), cluster=job.cluster, controller=controller)

    try:
        return given(ask(slurm.submission(argv), environ, SUBMIT_SECONDS))
    except (RefusedError, NoAnswerError) as error:
        refused = isinstance(error, RefusedError)
        late = time.monotonic() + (0 if refused else LATE_SECONDS)
        try:
            while not (found := ask(slurm.in_queue(layout.name, argv[-1], script), environ)):
                if time.monotonic() >= late:
                    break
                time.sleep(LOOK_SECONDS)
        except (RefusedError, MachineError) as silent:
            if refused:
                raise error from silent
            what = f"{error}, and the queue does not answer ({silent}): Slurm may have the job, and {layout.root} stays"
            hint = f"`squeue --name={layout.name}` tells whether it has; if not, remove that folder"
            raise NoAnswerError(what, hint=hint) from error
        if found:
            return given(found)
        if refused:
            raise
        raise MachineError(f"{error}, and Slurm has no such job", hint="submit again") from error


SUBMIT_SECONDS = 60.0  # sbatch itself tries again where the controller is too busy to take a job
LATE_SECONDS, LOOK_SECONDS = 10.0, 1.0  # for a job to come into the queue, once sbatch was given up


def submit(
    plan: Plan, recipe_yaml: str, command_shell: str, environ: Mapping[str, str]
) -> tuple[RunLayout, Submission]:
    """Make the run directory and give the job in. Leaves nothing where it is refused: RecipeError, or MachineError."""
    job = plan.job
    assert job is not None
    in_pods = job.scheduler == "kubernetes"
    # The output folder is one of the pods: what this machine keeps of the run is in the working folder.
    layout = create_run_dir(pods.RECORDS if in_pods else plan.output_root, plan.name)
    submission: Submission | None = None

    def undo() -> None:
        if submission and in_pods:  # given in, and could not be written down
            answer_or(kubectl.cancel(submission.job, now=True), (), environ)
        elif submission:
            answer_or(slurm.cancel(submission.job, cluster=submission.cluster), None, environ)
        shutil.rmtree(layout.root, ignore_errors=True)

    try:
        write_record(layout, plan, recipe_yaml, command_shell)
        argv = bind_words(job.submit, {Variable.RUN_DIR: str(layout.root)})
        if in_pods:
            for name, content in pods.files(plan, recipe_yaml, layout.id).items():
                publish(layout.root / name, content)
            submission = Submission(job.scheduler, pods.submit(plan, layout, argv, environ), argv)
        else:
            script = bound_content(job, str(layout.root))
            write_script(layout, job, script)
            submission = give_in(argv, layout, script, environ)
        write_submission(layout, submission)
    except RefusedError as error:
        undo()
        key = kubernetes.blamed(str(error)) if in_pods else "cluster"
        what = f"{'Kubernetes' if in_pods else 'Slurm'} refuses the job: {error}"
        raise RecipeError(Diagnostic("error", what, key=key)) from error
    except NoAnswerError:  # there may be a job, which needs the directory, and writes down its number when it starts
        if in_pods:
            write_submission(layout, Submission(job.scheduler, pods.job_id(plan, layout), argv))
        raise
    except BaseException:
        undo()
        raise
    return layout, submission
