"""The sections container and cluster: tagged unions on `kind`, one class for each engine and each scheduler."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from trainkit.recipe.schema.base import Section, section, setting

MOUNT = re.compile(r"/[^:,\n]*:/[^:,\n]*(:(ro|rw))?")
# What NVIDIA's documentation of its PyTorch image gives to `docker run` (docs.nvidia.com/deeplearning/frameworks).
NVIDIA_LIMITS = {"memlock": -1, "stack": 67_108_864}


class NoContainer(Section):
    """The launcher runs directly on the machine."""

    kind: Literal["none"] = setting("none", "No container: the launcher runs directly on the machine.")


class Image(Section):
    """What every engine has."""

    kind: str
    image: str = setting(
        "", "The image, as the engine names it.", pattern=r"^[^\s-]\S*$|^$", expects="the name of an image"
    )
    python: str = setting(
        "python3",
        "The interpreter in the image, by name or path.",
        pattern=r"^[^\s-]\S*$",
        expects="the name or path of an interpreter in the image",
    )
    mounts: list[str] = setting(
        [],
        "Folders of the machine to mount, as `/data:/data:ro`. The working folder, the run directory, the "
        "cache folder and a checkpoint to resume from are always mounted.",
    )
    workdir: str | None = setting(
        None,
        "Folder inside the container in which the program starts; null is the working folder.",
        pattern=r"^/",
        expects="an absolute path inside, or null",
    )
    caches: str | None = setting(
        None,
        "Folder of the machine for the container's HOME and caches of Hugging Face, torch and Triton; null is "
        "trainkit's folder in the user's cache folder.",
        pattern=r"^/[^:,\n]*$",
        expects="an absolute path without colon and comma, or null",
    )
    packages: dict[str, str] = setting(
        {},
        "Versions of libraries in the image, for which the plan is made (`torch: 2.6.0`). A missing one is assumed "
        "to be as on this machine. They are compared with the image before the ranks start.",
    )
    options: list[str] = setting([], "Further options for the engine, before the image; not those that trainkit sets.")

    def _contradictions(self) -> Iterator[str]:
        if not self.image:
            yield "image must name the image"
        for each in self.mounts:
            if not MOUNT.fullmatch(each):
                yield f"mounts has {each}, which is not /FOLDER/HERE:/FOLDER/INSIDE, with :ro behind it or not"


class _Docker(Image):
    """What docker and podman have in common."""

    shared_memory: Annotated[str, Field(pattern=r"^(host|[1-9]\d*[bkmg])$")] = setting(
        "host",
        "`host` is the machine's /dev/shm (`--ipc=host`); with a size such as `16g` the container has its own.",
        expects="`host`, or a size with its unit (16g)",
    )
    ulimits: dict[str, int] = setting({}, "Limits of the processes in the container, by name; -1 is no limit.")
    user: Annotated[str, Field(pattern=r"^(caller|image|\d+(:\d+)?)$")] = setting(
        "caller",
        "User of the processes in the container: `caller`, so that files in the run directory are yours; `image` for "
        "the image's own; or numbers, such as `1000:1000`.",
        expects="`caller`, `image`, or uid:gid in quotes",
    )
    entrypoint: Literal["none", "image"] = setting(
        "none", "`none`: the plan's command is started directly; `image`: through the image's entry point."
    )
    pull: Literal["never", "missing"] = setting(
        "never", "Whether an image that is missing on this machine is pulled at the start."
    )


class Docker(_Docker):
    """A Docker image, by the daemon."""

    kind: Literal["docker"] = setting("docker", "Docker starts the image.")
    ulimits: dict[str, int] = setting(
        NVIDIA_LIMITS,
        "Limits of the processes in the container, by name; -1 is no limit. The defaults follow NVIDIA's "
        "documentation.",
    )


class Podman(_Docker):
    """A Docker or OCI image, without a daemon."""

    kind: Literal["podman"] = setting("podman", "Podman starts the image.")
    ulimits: dict[str, int] = setting(
        {}, "Limits of the processes in the container, by name; -1 is no limit. By default those of this machine."
    )


class Apptainer(Image):
    """A SIF file or another image of Apptainer's."""

    kind: Literal["apptainer"] = setting("apptainer", "Apptainer starts the image: a .sif file or a folder.")


class Pyxis(Image):
    """An image of enroot's, by the Slurm plugin pyxis."""

    kind: Literal["pyxis"] = setting("pyxis", "Slurm's plugin pyxis starts the image, inside an allocation.")


Container = Annotated[NoContainer | Docker | Podman | Apptainer | Pyxis, Field(discriminator="kind")]


Words = list[str]
_MEMORY = r"^(0|[1-9]\d*[KMGT])$"
# As the Kubernetes API has them: names of objects (RFC 1123 labels) and of resources.
_LABEL_WORDS = "a name of Kubernetes: small letters, digits and dashes (at most 63, no dash at either end)"
_LABEL = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
_RESOURCE = r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$"
_HOST = r"^([A-Za-z0-9_][^\s@,]*@)?([A-Za-z0-9_][\w.-]*|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%\w+)?)$"  # user, name or IPv6
_TIME = r"^(\d+-\d{1,2}(:\d{2}){0,2}|\d+:\d{2}(:\d{2})?|infinite)$"


_Cpus = Literal["auto"] | Annotated[int, Field(ge=1, le=4096)]
_CPUS = (
    "Processors per node; `auto` is the share of cluster.machine's that corresponds to the selected GPUs, or all on "
    "a CPU; without a machine, one per process."
)


class Requeue(Section):
    """When a job is requeued, and resumes from its newest checkpoint."""

    after: list[Literal["time_limit", "preemption", "node_failure", "hang", "failure"]] = setting(
        ["time_limit", "preemption", "node_failure", "hang"],
        "Reasons to requeue: the `time_limit` is near, `preemption`, `node_failure` (a node was lost, or "
        "differs from the plan), "
        "`hang`, or `failure` of the program itself.",
    )
    warn_seconds: int = setting(
        180,
        "How long before the time limit the run is asked to save and end: more than launcher.grace_seconds, and "
        "more than two checkpoints take.",
        unit="seconds",
        ge=10,
        le=86_400,
    )
    without_progress: int = setting(
        3, "After how many attempts without a newer checkpoint the job is not requeued.", ge=1, le=1000
    )


class Ran(Section):
    """What a job on several machines has, whoever gives them."""

    machine: str | None = setting(
        None,
        "What a node has: a profile (`trainkit ls machines`), or a file that `trainkit env facts` has written on one. "
        "The submitting machine rarely resembles the nodes.",
    )
    python: str | None = setting(
        None, "The interpreter on the nodes that has trainkit; default: the submitting one, by its path."
    )
    setup: Words = setting(
        [],
        "Lines of Bash that each job runs first, such as `module load cuda/12.8`. A line that fails or ends the shell "
        "ends the job, which names it; `|| true` allows it to fail.",
    )
    start_seconds: int = setting(
        600, "How long nodes wait for one another; missing nodes are then named.", unit="seconds", ge=5, le=86_400
    )


class NoCluster(Section):
    """The run is on this machine, or on machines where you start it yourself."""

    kind: Literal["none"] = setting("none", "`trainkit run` on each machine; nothing is submitted.")


class Slurm(Ran):
    """A job of Slurm."""

    kind: Literal["slurm"] = setting("slurm", "A Slurm job: `trainkit submit` submits it with sbatch.")
    partition: str | None = setting(None, "Partition, or several with commas; default: Slurm's.")
    account: str | None = setting(None, "Account to charge.")
    qos: str | None = setting(None, "Quality of service.")
    constraint: str | None = setting(None, "Features that nodes must have.")
    reservation: str | None = setting(None, "Reservation to use.")
    nodelist: str | None = setting(None, "Nodes that the job must include.")
    exclude: str | None = setting(None, "Nodes that the job must not use.")
    time: str | None = setting(
        None,
        'Time limit in quotes, as Slurm writes it: `"1-12:00:00"` is a day and a half, `"90:00"` 90 minutes.',
        pattern=_TIME,
        expects='a time limit of Slurm\'s in quotes ("90:00" is minutes:seconds, "12:00:00", "1-12:00:00")',
    )
    cpus_per_node: _Cpus = setting("auto", _CPUS)
    memory_per_node: str | None = setting(
        None,
        "Memory per node (`480G`); `0` is all of it; default: Slurm's.",
        pattern=_MEMORY,
        expects='an amount of memory ("480G", or "0" for all)',
    )
    exclusive: bool = setting(False, "Whether no other job may use the nodes.")
    gpus: Literal["gpus-per-node", "gres", "none"] = setting(
        "gpus-per-node",
        "How GPUs are requested: `--gpus-per-node`, `--gres=gpu:`, or not at all, if jobs get whole nodes.",
    )
    gpu_kind: str | None = setting(None, "Type of GPU in that request, as Slurm calls it (`h100`).")
    requeue: Requeue = section(Requeue, "When the job is requeued and resumes.")
    sbatch: Words = setting([], "Further options for sbatch; those that trainkit sets are refused.")
    srun: Words = setting([], "Further options for srun; those that trainkit sets are refused.")


class Pbs(Ran):
    """A job of PBS Professional or OpenPBS."""

    kind: Literal["pbs"] = setting("pbs", "A job of PBS Professional or OpenPBS: `trainkit submit` gives it to qsub.")
    queue: str | None = setting(None, "Queue; default: the server's.")
    account: str | None = setting(None, "Account that is charged.")
    time: str | None = setting(
        None,
        'Time limit in quotes, in hours, minutes and seconds: `"36:00:00"`.',
        pattern=r"^\d+:\d{2}:\d{2}$",
        expects='a time limit in quotes, in hours, minutes and seconds ("36:00:00")',
    )
    cpus_per_node: _Cpus = setting("auto", _CPUS)
    memory_per_node: str | None = setting(
        None,
        "Memory per node (`480gb`); default: the server's.",
        pattern=r"^[1-9]\d*(kb|mb|gb|tb)$",
        expects="an amount of memory in kb, mb, gb or tb (480gb)",
    )
    exclusive: bool = setting(False, "Whether no other job may use the nodes.")
    gpus: Literal["ngpus", "none"] = setting(
        "ngpus", "How GPUs are requested: `ngpus` per node, or not at all, if jobs get whole nodes."
    )
    resources: dict[str, str | int] = setting(
        {}, "Further resources per node, as the site calls them: `gpu_model: h100`."
    )
    requeue: Requeue = section(Requeue, "When the job is requeued and resumes.")
    qsub: Words = setting([], "Further options for qsub; those that trainkit sets are refused.")


class Kubernetes(Section):
    """Pods of Kubernetes."""

    kind: Literal["kubernetes"] = setting("kubernetes", "Kubernetes pods: `trainkit submit` creates them with kubectl.")
    workload: Literal["jobset", "indexed-job"] = setting(
        "jobset",
        "`jobset`, which restarts all pods when one fails, and must be installed in the cluster; or an "
        "`indexed-job`, which works in every cluster, and never restarts.",
    )
    machine: str | None = setting(
        None,
        "What a node has: a profile (`trainkit ls machines`), or a file that `trainkit env facts` wrote in a pod.",
    )
    namespace: str = setting("default", "Namespace of all objects.", pattern=_LABEL, expects=_LABEL_WORDS)
    image: str | None = setting(
        None, "Image of the pods; it must contain trainkit and everything that the recipe names."
    )
    python: str = setting("python", "The interpreter in the image that has trainkit.")
    queue: str | None = setting(
        None, "Local queue of Kueue that admits the workload.", pattern=_LABEL, expects=_LABEL_WORDS
    )
    volumes: Words = setting(
        [],
        "Volume claims and their mount points, as `claim:/data`; output.root must lie on one that all pods may write "
        "to (ReadWriteMany if nodes.count is more than 1).",
    )
    secret: str | None = setting(
        None,
        "Secret of the namespace with the variables of env_from, each under its name.",
        pattern=_LABEL,
        expects=_LABEL_WORDS,
    )
    gpu_resource: str = setting(
        "nvidia.com/gpu",
        "Resource name of the GPUs.",
        pattern=_RESOURCE,
        expects="the name of a resource as nvidia.com/gpu",
    )
    pod: dict[str, Any] = setting(
        {},
        "Additions to the pods' template, in Kubernetes' format: `metadata` (labels, annotations) and "
        "`spec`, whose one container is trainkit's. Mappings are merged, lists are appended.",
    )
    cpus_per_node: Annotated[int, Field(ge=1, le=4096)] | None = setting(
        None, "Processors per pod; default: the namespace's."
    )
    memory_per_node: str | None = setting(
        None,
        "Memory per pod in Kubernetes' units (`480Gi`), including /dev/shm; default: the namespace's.",
        pattern=r"^[1-9]\d*(Mi|Gi|Ti|M|G|T)$",
        expects="an amount of memory (480Gi)",
    )
    max_restarts: Annotated[int, Field(ge=0, le=1000)] | None = setting(
        None,
        "How often a jobset restarts all pods, from the run's newest checkpoint; default: 3 times. An "
        "indexed-job never restarts.",
    )
    start_seconds: int = setting(
        600, "How long pods wait for one another; missing pods are then named.", unit="seconds", ge=5, le=86_400
    )

    @property
    def restarts(self) -> int:
        """How often all pods are started again."""
        if self.workload == "indexed-job":
            return 0
        return 3 if self.max_restarts is None else self.max_restarts


class Ssh(Ran):
    """Machines without a scheduler, reached by ssh."""

    kind: Literal["ssh"] = setting("ssh", "Machines without a scheduler: `trainkit submit` starts the run by ssh.")
    hosts: list[Annotated[str, Field(pattern=_HOST)]] = setting(
        [],
        "The machines' names for ssh (`gpu1`, `me@10.0.0.5`), node 0 first; their number is nodes.count, which "
        "may be left out. They must share the file system of the run directory.",
        expects="a machine as ssh knows it (`gpu1`, `me@10.0.0.5`)",
    )
    workdir: str | None = setting(
        None,
        "The folder on them in which the run starts; default: the one where you submit.",
        pattern=r"^/",
        expects="a folder by its whole path (`/data/project`)",
    )
    options: Words = setting([], "Further options for ssh, such as `-p2222`; those that trainkit sets are refused.")


Cluster = Annotated[NoCluster | Slurm | Pbs | Ssh | Kubernetes, Field(discriminator="kind")]
