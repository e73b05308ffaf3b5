"""What Slurm and Kubernetes set in the environment of a process."""

from __future__ import annotations

HOSTS = {"TFPAR_WORKER_HOSTS": "train-[0-2].train:2222"}


def slurm(rank: int, nodes: str, tasks: str, total: int, **more: str) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(total),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        **more,
    }
