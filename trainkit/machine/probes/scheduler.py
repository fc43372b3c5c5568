"""The scheduler's allocation, as the environment describes it. Nothing is asked of the scheduler itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from trainkit.machine.facts import Allocation

# scheduler: the variable that only its jobs have and that names the job, then the others that describe the job
SCHEDULERS: Mapping[Literal["slurm", "pbs", "lsf", "kubernetes"], str] = {
    "slurm": "SLURM_JOB_ID SLURM_JOB_NUM_NODES SLURM_NNODES SLURM_NODEID SLURM_PROCID SLURM_LOCALID SLURM_NTASKS "
    "SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE SLURM_CPUS_PER_TASK SLURM_CPUS_ON_NODE SLURM_JOB_GPUS SLURM_STEP_GPUS "
    "SLURM_GPUS_ON_NODE SLURM_GPUS_PER_NODE SLURM_MEM_PER_NODE SLURM_JOB_NODELIST SLURM_JOB_PARTITION "
    "SLURM_RESTART_COUNT SLURMD_NODENAME",
    "pbs": "PBS_JOBID PBS_NODEFILE PBS_GPUFILE PBS_NODENUM PBS_TASKNUM PBS_NUM_NODES PBS_NUM_PPN PBS_NP PBS_NGPUS "
    "PBS_QUEUE NCPUS",
    "lsf": "LSB_JOBID LSB_HOSTS LSB_MCPU_HOSTS LSB_DJOB_NUMPROC LSB_DJOB_HOSTFILE LSB_GPU_REQ LSB_QUEUE "
    "LSB_MAX_NUM_PROCESSORS",
    "kubernetes": "KUBERNETES_SERVICE_HOST HOSTNAME JOB_COMPLETION_INDEX NVIDIA_VISIBLE_DEVICES",
}


def probe(environ: Mapping[str, str] | None = None) -> Mapping[str, Allocation | None]:
    """The first scheduler whose job this process is part of; a pod that Slurm runs in counts as Slurm's."""
    environ = os.environ if environ is None else environ
    for scheduler, names in SCHEDULERS.items():
        own, *others = names.split()
        if own in environ:
            given = {name: environ[name] for name in sorted([own, *others]) if name in environ}
            return {"allocation": Allocation(scheduler, "" if scheduler == "kubernetes" else environ[own], given)}
    return {"allocation": None}
