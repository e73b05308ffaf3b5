"""This process's task and its peers, from TF_CONFIG, Slurm or Kubernetes.

`detect()` reads the environment and validates it completely before anything starts, without importing
TensorFlow, so that a typing error in TF_CONFIG gives an error within milliseconds instead of a hanging cluster.
`export_tf_config()` then writes what was found to TF_CONFIG, so that all TensorFlow code sees the same cluster.

The environments, in the order in which they are tried:

1. **TF_CONFIG**, as TensorFlow defines it.
2. **Slurm**, inside a job step (`srun`) of more than one task: SLURM_PROCID, SLURM_STEP_NUM_TASKS,
   SLURM_STEP_NODELIST, SLURM_STEP_TASKS_PER_NODE, the variables that
   `tf.distribute.cluster_resolver.SlurmClusterResolver` reads, and its ports: TFPAR_PORT (8888 by default) plus
   the task's number on its node.
3. **Kubernetes**, either of
   - TFPAR_WORKER_HOSTS: every member, in order, e.g. `job-[0-3].service:2222` or `a:2222,b:2222`. Which of them
     this pod is comes from JOB_COMPLETION_INDEX (an Indexed Job) or else from the number at the end of its host
     name (a StatefulSet). deploy/kubernetes.yaml is written this way.
   - TFPAR_KUBERNETES_SELECTOR: a label selector that TensorFlow's `KubernetesClusterResolver` asks the API server for.

TFPAR_PS=K turns the last K processes of a Slurm step or a Kubernetes job into parameter servers; the first process
is then the chief, which only coordinates, and those between are the workers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from tfpar.cluster.kubernetes import from_kubernetes
from tfpar.cluster.members import integer_variable
from tfpar.cluster.slurm import from_slurm
from tfpar.config import ConfigError, unknown_name

JOBS = ("chief", "worker", "ps", "evaluator")
EXAMPLE = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9][A-Za-z0-9_.-]*):(?P<port>\d+)")
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|\[::1\]")


@dataclasses.dataclass(frozen=True)
class ClusterInfo:
    """A cluster and the place of this process in it. Building one validates it.

    Attributes:
      source: Where it came from: `TF_CONFIG`, `slurm`, `kubernetes` or `local`.
      cluster: Job name to the addresses (`host:port`) of its tasks; empty for `local`.
      task_type: The job of this process: `chief`, `worker`, `ps` or `evaluator`.
      task_index: Its number within that job, from 0.

    Raises:
      ConfigError: A job, task or address that cannot be right.
    """

    source: str
    cluster: Mapping[str, tuple[str, ...]] = dataclasses.field(hash=False)
    task_type: str
    task_index: int

    def __post_init__(self) -> None:
        if self.cluster or self.source != "local":
            _check_jobs(self)
            _check_addresses(self)

    @property
    def num_workers(self) -> int:
        """Chief and workers together; 1 for `local`."""
        return max(1, len(self.worker_addresses))

    @property
    def num_ps(self) -> int:
        """Parameter servers."""
        return len(self.cluster.get("ps", ()))

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files and talks: the chief or, without one, worker 0."""
        return self.worker_rank == 0

    @property
    def worker_rank(self) -> int:
        """Place among chief and workers, from 0, the chief first; -1 for a parameter server or an evaluator."""
        return rank_of_task(self.cluster, self.task_type, self.task_index)

    @property
    def address(self) -> str:
        """`host:port` of this process; empty for `local` and for an evaluator outside the cluster."""
        tasks = self.cluster.get(self.task_type, ())
        return tasks[self.task_index] if tasks else ""

    @property
    def worker_addresses(self) -> tuple[str, ...]:
        """`host:port` of chief and workers, in the order of their ranks."""
        return (*self.cluster.get("chief", ()), *self.cluster.get("worker", ()))

    @property
    def worker_tasks(self) -> tuple[tuple[str, int], ...]:
        """Job and index of chief and workers, in the order of their ranks."""
        return tuple((job, index) for job in ("chief", "worker") for index in range(len(self.cluster.get(job, ()))))

    @property
    def server_tasks(self) -> tuple[tuple[str, int], ...]:
        """Job and index of all that run a server of TensorFlow: chief and workers by rank, then parameter servers."""
        return (*self.worker_tasks, *(("ps", index) for index in range(self.num_ps)))

    @property
    def server_addresses(self) -> tuple[str, ...]:
        """`host:port` of each of `server_tasks`."""
        return (*self.worker_addresses, *self.cluster.get("ps", ()))

    def server_name(self, place: int) -> str:
        """What to call one of `server_tasks`: `worker 1`, by rank or, beside parameter servers, by job, as `ps 0`."""
        job, index = self.server_tasks[place]
        return f"{job} {index}" if self.num_ps else f"worker {place}"

    def describe(self) -> str:
        """One line for people: `worker 0 of 1 chief, 2 worker, 1 ps (TF_CONFIG)`."""
        members = ", ".join(f"{len(tasks)} {job}" for job, tasks in self.cluster.items()) or "one process"
        return f"{self.task_type} {self.task_index} of {members} ({self.source})"


LOCAL = ClusterInfo("local", {}, "worker", 0)


def rank_of_task(cluster: Mapping[str, Any], task_type: str, task_index: int) -> int:
    """The place of a task among chief and workers, from 0, the chief first; -1 for other jobs.

    Args:
      cluster: Job name to its tasks.
      task_type: The job of the task.
      task_index: Its number within that job, from 0.
    """
    if task_type == "worker":
        return len(cluster.get("chief", ())) + task_index
    return 0 if task_type == "chief" else -1


def detect(environ: Mapping[str, str] | None = None) -> ClusterInfo | None:
    """The cluster that the environment describes.

    Args:
      environ: The environment variables; `os.environ` by default.

    Returns:
      The validated cluster, or None if the environment describes none, as with an empty TF_CONFIG, a Slurm step of one
      task or a pod without TFPAR_* variables.

    Raises:
      ConfigError: The environment describes a cluster that cannot work. The message shows what was
        found and a right example.
    """
    environ = os.environ if environ is None else environ
    return _from_tf_config(environ) or _from_scheduler(environ)


def current(environ: Mapping[str, str] | None = None) -> ClusterInfo:
    """`detect()`, or `LOCAL` - one worker, the chief, without peers - where there is no cluster."""
    return detect(environ) or LOCAL


def export_tf_config(info: ClusterInfo, environ: MutableMapping[str, str] | None = None) -> None:
    """Writes the cluster to TF_CONFIG, so that all TensorFlow code after this call sees the same one.

    Args:
      info: The cluster. `LOCAL` removes TF_CONFIG.
      environ: Where to set it; `os.environ` by default.
    """
    environ = os.environ if environ is None else environ
    if not info.cluster:
        environ.pop("TF_CONFIG", None)
        return
    environ["TF_CONFIG"] = tf_config_json(info)


def tf_config_json(info: ClusterInfo) -> str:
    """The value of TF_CONFIG that describes this process."""
    cluster = {job: list(tasks) for job, tasks in info.cluster.items()}
    return json.dumps({"cluster": cluster, "task": {"type": info.task_type, "index": info.task_index}})


# Validation, the same for every source.


def _error(source: str, found: str) -> ConfigError:
    example = f" Example: TF_CONFIG='{EXAMPLE}'." if source == "TF_CONFIG" else ""
    return ConfigError(f"{source}: {found}{example}")


def _check_jobs(info: ClusterInfo) -> None:
    cluster, source = info.cluster, info.source
    for job in cluster:
        if job not in JOBS:
            renamed = " TensorFlow 1's 'master' is called 'chief'." if job == "master" else ""
            raise _error(source, f"{unknown_name('job', job, JOBS)}{renamed}")
        if not cluster[job]:
            raise _error(source, f"job {job!r} has no task; give it addresses or leave it out.")
    for job in ("chief", "evaluator"):
        if len(cluster.get(job, ())) > 1:
            raise _error(source, f"{len(cluster[job])} tasks in job {job!r}, but a cluster has at most one.")
    if not info.worker_addresses:
        raise _error(source, f"no worker in the cluster, only {', '.join(cluster) or 'an empty cluster'}.")
    if info.num_ps and "chief" not in cluster:
        raise _error(
            source, "parameter servers ('ps') need a 'chief' that coordinates them, besides the workers; add one."
        )
    if info.task_type not in JOBS:
        raise _error(source, str(unknown_name("task.type", info.task_type, JOBS)))
    if info.task_type not in cluster and info.task_type != "evaluator":  # TensorFlow lets an evaluator stay outside
        raise _error(source, f"task type {info.task_type!r} is not in the cluster, which has {', '.join(cluster)}.")
    tasks = max(1, len(cluster.get(info.task_type, ())))
    if not 0 <= info.task_index < tasks:
        raise _error(
            source, f"task index {info.task_index} is out of range: job {info.task_type!r} has index 0 to {tasks - 1}."
        )


def _check_addresses(info: ClusterInfo) -> None:
    owners: dict[str, str] = {}
    local: dict[bool, str] = {}
    for task, address in tasks_and_addresses(info):
        match = _ADDRESS.fullmatch(address)
        if not match:
            raise _error(info.source, f"address {address!r} of {task} {_what_is_wrong(address)}")
        host, port = match["host"].lower(), int(match["port"])
        if not 1 <= port <= 65535:
            raise _error(info.source, f"port {port} of {task} ({address!r}) is out of range: 1 to 65535.")
        is_loopback = bool(_LOOPBACK.fullmatch(host))
        key = f"{'localhost' if is_loopback else host}:{port}"
        if key in owners:
            raise _error(
                info.source, f"{owners[key]} and {task} have the same address {address!r}; each needs its own."
            )
        owners[key] = task
        local[is_loopback] = f"{task} ({address!r})"
    if len(local) > 1:
        raise _error(
            info.source,
            f"{local[True]} is a loopback address but {local[False]} is not: on every machine the first would be that "
            "machine itself. Use names that all machines resolve.",
        )


def tasks_and_addresses(info: ClusterInfo) -> Iterator[tuple[str, str]]:
    """Each task of a cluster, such as `worker 1`, and its `host:port`."""
    for job, tasks in info.cluster.items():
        for index, address in enumerate(tasks):
            yield f"{job} {index}", address


def _what_is_wrong(address: str) -> str:
    if "://" in address:
        return f"has a scheme; write {address.split('://', 1)[1]!r}."
    if ":" not in address:
        return f"has no port; write e.g. '{address.strip() or 'host'}:2222'."
    if address.count(":") > 1 and "[" not in address:
        return "has more than one colon; write an IPv6 address in brackets, e.g. '[::1]:2222'."
    return "is not host:port, e.g. 'host0:2222'."


# TF_CONFIG.


def _from_tf_config(environ: Mapping[str, str]) -> ClusterInfo | None:
    text = environ.get("TF_CONFIG", "").strip()
    config = _parse_json(text) if text else {}
    if not isinstance(config, dict):
        raise _error("TF_CONFIG", f"a JSON object is needed, found {_kind(config)}.")
    if not config.get("cluster") and not config.get("task"):
        return None  # `{}`, or the bare TF_CONFIG of a managed service's single machine
    for key in ("cluster", "task"):
        if key not in config:
            raise _error("TF_CONFIG", f"{key!r} is missing; found {', '.join(map(repr, config))}.")
        if not isinstance(config[key], dict):
            raise _error("TF_CONFIG", f"{key!r} must be a JSON object, found {_kind(config[key])}.")
    cluster: dict[str, tuple[str, ...]] = {}
    for job, tasks in config["cluster"].items():
        if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
            raise _error("TF_CONFIG", f"job {job!r} needs a list of 'host:port' strings, found {json.dumps(tasks)}.")
        cluster[job] = tuple(tasks)
    task = config["task"]
    for key in ("type", "index"):
        if key not in task:
            raise _error("TF_CONFIG", f"'task' has no {key!r}; found {json.dumps(task)}.")
    index = task["index"]
    if isinstance(index, str) and re.fullmatch(r"\s*-?\d+\s*", index):
        index = int(index)  # shells and manifests quote numbers; TensorFlow takes int() of it too
    if not isinstance(index, int) or isinstance(index, bool):
        raise _error("TF_CONFIG", f"task index {json.dumps(task['index'])} is not a whole number.")
    if not isinstance(task["type"], str):
        raise _error("TF_CONFIG", f"task type must be a string, found {json.dumps(task['type'])}.")
    return ClusterInfo("TF_CONFIG", cluster, task["type"], index)


def _parse_json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:  # json.loads would keep the last one silently
                raise _error("TF_CONFIG", f"the key {key!r} is given twice.")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        before, after = text[max(0, error.pos - 30) : error.pos], text[error.pos : error.pos + 20]
        hint = " JSON strings take double quotes, not single ones." if "'" in text else ""
        raise _error(
            "TF_CONFIG",
            f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}, at <here> in "
            f"{before + '<here>' + after!r}.{hint}",
        ) from None


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean"}
    return f"{names.get(type(value), 'null')} ({json.dumps(value)[:60]})"


# Slurm and Kubernetes.


def _from_scheduler(environ: Mapping[str, str]) -> ClusterInfo | None:
    """Gives every process of a scheduler's list its job, see TFPAR_PS in the module's docstring."""
    members = from_slurm(environ) or from_kubernetes(environ)
    if members is None:
        return None
    addresses, rank, source = members.addresses, members.rank, members.source
    if not 0 <= rank < len(addresses):
        raise ConfigError(
            f"{source}: this is process {rank}, but the cluster has 0 to {len(addresses) - 1}: {', '.join(addresses)}."
        )
    servers = integer_variable(environ, "TFPAR_PS", 0)
    if not servers:
        return ClusterInfo(source, {"worker": addresses}, "worker", rank)
    workers = len(addresses) - servers - 1
    if servers < 0 or workers < 1:
        raise ConfigError(
            f"TFPAR_PS={servers} with {len(addresses)} processes: a chief and at least one worker are needed besides "
            f"the parameter servers, so at most {max(0, len(addresses) - 2)}."
        )
    cluster = {"chief": addresses[:1], "worker": addresses[1 : 1 + workers], "ps": addresses[1 + workers :]}
    tasks = [(job, index) for job, hosts in cluster.items() for index in range(len(hosts))]
    return ClusterInfo(source, cluster, *tasks[rank])
