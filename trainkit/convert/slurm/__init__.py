"""A batch script of Slurm: what its `#SBATCH` lines and its srun ask for, as a recipe's `cluster` and `nodes`."""
