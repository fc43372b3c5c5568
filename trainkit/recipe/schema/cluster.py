"""The container section: a tagged union on `kind`, one class for each engine that starts an image."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from trainkit.recipe.schema.base import Section, section, setting

MOUNT = re.compile(r"/[^:,\n]*:/[^:,\n]*(:(ro|rw))?")
# What NVIDIA's documentation of its PyTorch image gives to `docker run` (docs.nvidia.com/deeplearning/frameworks).
NVIDIA_LIMITS = {"memlock": -1, "stack": 67_108_864}


class NoContainer(Section):
    """The launcher starts on the machine itself."""

    kind: Literal["none"] = setting("none", "No container: the launcher starts on the machine itself.")


class Image(Section):
    """What every engine has."""

    kind: str
    image: str = setting("", "The image, as the engine names it.", pattern=r"^[^\s-]\S*$|^$")
    python: str = setting("python3", "The interpreter in the image, by name or path.", pattern=r"^[^\s-]\S*$")
    mounts: list[str] = setting(
        [],
        "Folders of the machine that are seen inside, as `/data:/data:ro`. The working folder, the run directory, the "
        "cache folder and a checkpoint to go on from are there without being named.",
    )
    workdir: str | None = setting(
        None, "Folder inside in which the program starts; null is the working folder.", pattern=r"^/"
    )
    caches: str | None = setting(
        None,
        "Folder of the machine for HOME and the caches of Hugging Face, torch and Triton inside; null is trainkit's "
        "own in the user's cache folder.",
        pattern=r"^/[^:,\n]*$",
    )
    packages: dict[str, str] = setting(
        {},
        "Versions of libraries in the image, by which the plan is made (`torch: 2.6.0`); one that is left out is taken "
        "to be as on this machine. What the image has is compared before the ranks start.",
    )
    options: list[str] = setting(
        [], "Further words for the engine, in front of the image; not those that trainkit sets."
    )

    def _contradictions(self) -> Iterator[str]:
        if not self.image:
            yield "image must name the image"
        for each in self.mounts:
            if not MOUNT.fullmatch(each):
                yield f"mounts has {each}, which is not /FOLDER/HERE:/FOLDER/INSIDE, with :ro behind it or not"


class _Docker(Image):
    """What docker and podman have in common."""

    shared_memory: Annotated[str, Field(pattern=r"^(host|[1-9]\d*[bkmg])$")] = setting(
        "host", "`host` is the machine's /dev/shm (`--ipc=host`); a size as `16g` is one of the container's own."
    )
    ulimits: dict[str, int] = setting({}, "Limits of the processes inside, by name; -1 is none.")
    user: Annotated[str, Field(pattern=r"^(caller|image|\d+(:\d+)?)$")] = setting(
        "caller",
        "Who the processes inside are: `caller`, so that files in the run directory are yours; `image` as the image "
        "says; or numbers, as `1000:1000`.",
    )
    entrypoint: Literal["none", "image"] = setting(
        "none", "`none`: the plan's command alone is started; `image`: the image's entry point starts it."
    )
    pull: Literal["never", "missing"] = setting(
        "never", "Whether an image that is not on this machine is downloaded at the start."
    )


class Docker(_Docker):
    """A Docker image, by the daemon."""

    kind: Literal["docker"] = setting("docker", "Docker starts the image.")
    ulimits: dict[str, int] = setting(
        NVIDIA_LIMITS,
        "Limits of the processes inside, by name; -1 is none. The defaults are those of NVIDIA's documentation.",
    )


class Podman(_Docker):
    """A Docker or OCI image, without a daemon."""

    kind: Literal["podman"] = setting("podman", "Podman starts the image.")
    ulimits: dict[str, int] = setting(
        {}, "Limits of the processes inside, by name; -1 is none. Without any they are those of this machine."
    )


class Apptainer(Image):
    """A SIF file or another image of Apptainer's."""

    kind: Literal["apptainer"] = setting("apptainer", "Apptainer starts the image: a .sif file or a folder.")


class Pyxis(Image):
    """An image of enroot's, by the Slurm plugin pyxis."""

    kind: Literal["pyxis"] = setting("pyxis", "Slurm's plugin pyxis starts the image, inside of an allocation.")


Container = Annotated[NoContainer | Docker | Podman | Apptainer | Pyxis, Field(discriminator="kind")]


Words = list[str]
_MEMORY = r"^(0|[1-9]\d*[KMGT])$"
# As the Kubernetes API has them: names of objects (RFC 1123 labels) and of resources.
_LABEL = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
_RESOURCE = r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$"
_HOST = r"^([A-Za-z0-9_][^\s@,]*@)?([A-Za-z0-9_][\w.-]*|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%\w+)?)$"  # user, name or IPv6
_TIME = r"^(\d+-\d{1,2}(:\d{2}){0,2}|\d+:\d{2}(:\d{2})?|infinite)$"


class Requeue(Section):
    """When a job is queued again, and goes on from its newest checkpoint."""

    after: list[Literal["time_limit", "preemption", "node_failure", "hang", "failure"]] = setting(
        ["time_limit", "preemption", "node_failure", "hang"],
        "After what: the `time_limit` is near, `preemption`, `node_failure` (a node was lost, or is not as planned), "
        "`hang`, or `failure` of the program itself.",
    )
    warn_seconds: int = setting(
        180,
        "How long before the time limit the run is asked to save and to end: longer than launcher.grace_seconds, and "
        "than two checkpoints take.",
        unit="seconds",
        ge=10,
        le=86_400,
    )
    without_progress: int = setting(
        3, "After how many attempts without a newer checkpoint it is not queued again.", ge=1, le=1000
    )


class Ran(Section):
    """What a job on several machines has, whoever gives them."""

    machine: str | None = setting(
        None,
        "What a node has: a profile (`trainkit ls machines`), or the facts that `trainkit facts` has written on one. "
        "The machine where you submit is seldom like those that run.",
    )
    python: str | None = setting(
        None, "The interpreter on the nodes that has trainkit; left out, the one that submits, by its path."
    )
    setup: Words = setting(
        [],
        "Lines of Bash that each job runs first, as `module load cuda/12.8`. One that fails or ends the shell "
        "ends the job, by name; `|| true` lets it fail.",
    )
    start_seconds: int = setting(
        600, "How long nodes wait for one another; who is missing then is named.", unit="seconds", ge=5, le=86_400
    )


class NoCluster(Section):
    """The run is on this machine, or on machines where you start it yourself."""

    kind: Literal["none"] = setting("none", "`trainkit run` on each machine; nothing is submitted.")


class Slurm(Ran):
    """A job of Slurm."""

    kind: Literal["slurm"] = setting("slurm", "A job of Slurm: `trainkit submit` gives it to sbatch.")
    partition: str | None = setting(None, "Partition, or several with commas; left out, Slurm's default.")
    account: str | None = setting(None, "Account that is charged.")
    qos: str | None = setting(None, "Quality of service.")
    constraint: str | None = setting(None, "Features that nodes must have.")
    reservation: str | None = setting(None, "Reservation to use.")
    nodelist: str | None = setting(None, "Nodes that must be among those given.")
    exclude: str | None = setting(None, "Nodes that must not.")
    time: str | None = setting(
        None,
        'Time limit in quotes, as Slurm writes it: `"1-12:00:00"` is a day and a half, `"90:00"` 90 minutes.',
        pattern=_TIME,
    )
    cpus_per_node: Literal["auto"] | Annotated[int, Field(ge=1, le=4096)] = setting(
        "auto",
        "Processors of each node; `auto` is the share of cluster.machine's that its chosen GPUs are of all, or all on "
        "a CPU; without a machine, one for each process.",
    )
    memory_per_node: str | None = setting(
        None, "Memory of each node (`480G`); `0` is all of it; left out, Slurm's default.", pattern=_MEMORY
    )
    exclusive: bool = setting(False, "Whether the nodes are shared with no other job.")
    gpus: Literal["gpus-per-node", "gres", "none"] = setting(
        "gpus-per-node",
        "How GPUs are requested: `--gpus-per-node`, `--gres=gpu:`, or not at all, where whole nodes are given.",
    )
    gpu_kind: str | None = setting(None, "Kind of GPU in that request, as Slurm calls it (`h100`).")
    requeue: Requeue = section(Requeue, "When the job is queued again, and goes on.")
    sbatch: Words = setting([], "Further words for sbatch; those that trainkit sets are refused.")
    srun: Words = setting([], "Further words for srun; those that trainkit sets are refused.")


class Kubernetes(Section):
    """Pods of Kubernetes."""

    kind: Literal["kubernetes"] = setting("kubernetes", "Pods: `trainkit submit` gives a manifest to kubectl.")
    workload: Literal["jobset", "indexed-job"] = setting(
        "jobset",
        "`jobset`, which starts all pods again when one has failed, and must be installed in the cluster; or an "
        "`indexed-job`, which any cluster knows, and which never does.",
    )
    machine: str | None = setting(
        None,
        "What a node has: a profile (`trainkit ls machines`), or the facts that `trainkit facts` has written in a pod.",
    )
    namespace: str = setting("default", "Namespace of all that is made.", pattern=_LABEL)
    image: str | None = setting(None, "Image of the pods, with trainkit and all that the recipe names in it.")
    python: str = setting("python", "The interpreter in the image that has trainkit.")
    queue: str | None = setting(None, "Local queue of Kueue that admits the workload.", pattern=_LABEL)
    volumes: Words = setting(
        [],
        "Claims and where the pods see them, as `claim:/data`; output.root must lie on one, which all pods may write "
        "to (ReadWriteMany where nodes.count is more than 1).",
    )
    secret: str | None = setting(
        None, "Secret of the namespace that has the variables of env_from, each by its name.", pattern=_LABEL
    )
    gpu_resource: str = setting("nvidia.com/gpu", "Name of the resource that GPUs are.", pattern=_RESOURCE)
    pod: dict[str, Any] = setting(
        {},
        "What the template of the pods has besides, as Kubernetes writes it: `metadata` (labels, annotations) and "
        "`spec`, whose one container is trainkit's. Mappings are merged, lists are appended.",
    )
    cpus_per_node: Annotated[int, Field(ge=1, le=4096)] | None = setting(
        None, "Processors of each pod; left out, what the namespace gives by default."
    )
    memory_per_node: str | None = setting(
        None,
        "Memory of each pod in Kubernetes's units (`480Gi`), with what is in /dev/shm; left out, the namespace's.",
        pattern=r"^[1-9]\d*(Mi|Gi|Ti|M|G|T)$",
    )
    max_restarts: Annotated[int, Field(ge=0, le=1000)] | None = setting(
        None,
        "How often a jobset starts all pods again, from the run's own newest checkpoint; left out, 3 times. An "
        "indexed-job never does.",
    )
    start_seconds: int = setting(
        600, "How long pods wait for one another; who is missing then is named.", unit="seconds", ge=5, le=86_400
    )

    @property
    def restarts(self) -> int:
        """How often all pods are started again."""
        if self.workload == "indexed-job":
            return 0
        return 3 if self.max_restarts is None else self.max_restarts


class Ssh(Ran):
    """Machines without a scheduler, which are reached by ssh."""

    kind: Literal["ssh"] = setting("ssh", "Machines without a scheduler: `trainkit submit` starts the run by ssh.")
    hosts: list[Annotated[str, Field(pattern=_HOST)]] = setting(
        [],
        "The machines as ssh knows them (`gpu1`, `me@10.0.0.5`), node 0 first; they are as many as nodes.count, which "
        "may be left out. They share the file system that the run directory is on.",
    )
    workdir: str | None = setting(
        None, "The folder on them that the run is started in; left out, the one where you submit.", pattern=r"^/"
    )
    options: Words = setting([], "Further words for ssh, as `-p2222`; those that trainkit sets are refused.")


Cluster = Annotated[NoCluster | Slurm | Ssh | Kubernetes, Field(discriminator="kind")]
