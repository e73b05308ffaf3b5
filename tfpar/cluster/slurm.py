"""The processes of a Slurm job step, from its environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tfpar.cluster.members import Members, expand_hostlist, integer_variable
from tfpar.config import ConfigError

DEFAULT_PORT = 8888  # port_base of SlurmClusterResolver


def from_slurm(environ: Mapping[str, str]) -> Members | None:
    """The tasks of the Slurm step that this process belongs to; None outside a step or in one of a single task.

    Raises:
      ConfigError: The SLURM_* variables contradict each other.
    """
    # Parsed here and not by SlurmClusterResolver, which in TensorFlow 2.21 needs nvidia-smi (FileNotFoundError on a
    # CPU node), fails on zero GPUs per task, and sorts hosts as text (n1, n10, n2) where SLURM_PROCID counts n1, n2.
    if not {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= environ.keys():
        return None
    tasks, rank = integer_variable(environ, "SLURM_STEP_NUM_TASKS"), integer_variable(environ, "SLURM_PROCID")
    if tasks <= 1:
        return None
    node_list, tasks_per_node = (environ.get(f"SLURM_STEP_{name}", "") for name in ("NODELIST", "TASKS_PER_NODE"))
    if not node_list or not tasks_per_node:
        raise ConfigError(
            f"slurm: a step of {tasks} tasks, but SLURM_STEP_NODELIST={node_list!r} and SLURM_STEP_TASKS_PER_NODE="
            f"{tasks_per_node!r}. Start the script with srun, or set TF_CONFIG."
        )
    hosts, counts = expand_hostlist(node_list), _expand_counts(tasks_per_node)
    if len(hosts) != len(counts) or sum(counts) != tasks:
        raise ConfigError(
            f"slurm: SLURM_STEP_NODELIST={node_list} ({len(hosts)} nodes) and "
            f"SLURM_STEP_TASKS_PER_NODE={tasks_per_node} ({sum(counts)} tasks) do not add up to "
            f"SLURM_STEP_NUM_TASKS={tasks}. Start the script with srun, or set TF_CONFIG."
        )
    places = [(node, task) for node, count in enumerate(counts) for task in range(count)]
    if environ.get("SLURM_DISTRIBUTION", "").startswith("cyclic"):
        places.sort(key=lambda place: (place[1], place[0]))
    if 0 <= rank < tasks:
        _check_place(environ, rank, hosts[places[rank][0]], places[rank][1])
    base = integer_variable(environ, "TFPAR_PORT", DEFAULT_PORT)
    return Members("slurm", tuple(f"{hosts[node]}:{base + task}" for node, task in places), rank)


def _expand_counts(text: str) -> list[int]:
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={text!r}: {part!r} is not a count such as '2' or '2(x3)'.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _check_place(environ: Mapping[str, str], rank: int, node: str, task: int) -> None:
    """Compares the computed place with what Slurm says of this process: other distributions would cross the wires."""
    here = (environ.get("SLURMD_NODENAME", node), environ.get("SLURM_LOCALID", str(task)))
    if here != (node, str(task)):
        raise ConfigError(
            f"slurm: task {rank} runs as task {here[1]} of {here[0]}, but by the node list it would be task {task} of "
            f"{node}. Run srun with --distribution=block, or set TF_CONFIG."
        )
