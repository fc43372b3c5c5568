"""A batch script that was imported is a job that this Slurm takes."""

from __future__ import annotations

from tests.cluster.slurm_jobs import Cluster

SCRIPT = """#!/bin/bash
#SBATCH -J imported
#SBATCH -N 2 --ntasks-per-node=2 --gres=gpu:2
#SBATCH -t 5 -p main
#SBATCH --cpus-per-task=1
#SBATCH --comment="two words" --hint=nomultithread
#SBATCH --signal=B:USR1@60
export NCCL_DEBUG=INFO
srun --cpu-bind=none python -u program.py --nodes $SLURM_NNODES
"""


def test_an_imported_script_is_taken_by_slurm_with_all_its_options(cluster: Cluster) -> None:
    (cluster.folder / "job.sh").write_text(SCRIPT)
    (cluster.folder / "program.py").touch()
    imported = cluster.trainkit("import", "--output", "r.yaml", "job.sh")
    assert imported.returncode == 0, imported.stderr
    shown = cluster.trainkit("submit", "r.yaml", "cluster.machine=8xh100", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    for line in ("--gres=gpu:2", "--cpus-per-task=2", "--time=5:00", "'--comment=two words'", "--signal=B:USR1@60"):
        assert f"#SBATCH {line}\n" in shown.stdout
    assert "Slurm would start it" in shown.stderr
    wrong = cluster.trainkit("submit", "r.yaml", "cluster.machine=8xh100", "cluster.partition=nosuch", "--dry-run")
    assert wrong.returncode == 2
    assert "partition" in wrong.stderr
