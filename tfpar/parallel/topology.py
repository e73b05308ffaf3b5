"""`Topology`: the strategy, the numbers of workers and replicas, and the rank of this process.

`choose_topology(config, cluster)` derives it from the flags, the cluster description and the physical devices. It
starts no server and opens no connection, so that a configuration that cannot work is refused before anything starts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tfpar.cluster import port_filter
from tfpar.cluster.info import ClusterInfo
from tfpar.collectives import gloo_mesh
from tfpar.collectives.tensorflow import count_gpus, has_nccl
from tfpar.config import ConfigError, StrategyConfig
from tfpar.parallel.mesh import AUTO, Mesh, devices_of_worker, parse_mesh

import tensorflow as tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """The workers, replicas and devices of a run. A plain value: it starts nothing.

    Attributes:
      name: `one_device`, `mirrored`, `multi_worker`, `parameter_server` or `tpu`.
      workers: Number of workers, the processes that hold replicas.
      worker: Rank of this process among them, from 0; -1 for a parameter server.
      local_replicas: Number of replicas per worker, or 1 if a worker holds only a part of one.
      pipeline_devices: Size of the mesh's pipeline axis: number of devices, or groups of devices, with the stages of a
        replica.
      model_devices: Size of the mesh's model axis: number of devices over which layers are divided.
      replica_workers: Number of workers that share a replica; 1 if every worker has whole replicas.
      shards_weights: Whether the weights are sharded over the replicas.
      device_type: `CPU`, `GPU` or `TPU`.
      reason: The reason why this strategy was chosen, for the log.
      cluster: The cluster that this process belongs to, if any.
      tpu: Name or address of the TPU.
      hosts: Number of machines of a TPU slice, which one process drives and each of which feeds its own replicas;
        0 for other strategies.
      peer_timeout: Seconds after which an unresponsive worker counts as lost.
      start_timeout: Seconds that workers wait for each other at the start.
      transport: The transport of data between synchronous workers: `tensorflow` or `gloo`; `auto` until the
        workers have chosen.
      transport_reason: With `auto`, the reason why this worker cannot use Gloo, if any; later, the reason for the
      choice.
    """

    name: str
    workers: int = 1
    worker: int = 0
    local_replicas: int = 1
    pipeline_devices: int = 1
    model_devices: int = 1
    replica_workers: int = 1
    shards_weights: bool = False
    device_type: str = "CPU"
    reason: str = ""
    cluster: ClusterInfo | None = None
    tpu: str = ""
    hosts: int = 0
    peer_timeout: float = 30.0
    start_timeout: float = 600.0
    transport: str = "tensorflow"
    transport_reason: str = ""

    @property
    def replicas(self) -> int:
        """Number of replicas, over all workers."""
        return self.data_workers * self.local_replicas

    @property
    def weight_workers(self) -> int:
        """Number of workers that have all weights between them, each its parts; 1 if every worker has all."""
        return self.workers if self.shards_weights else self.replica_workers

    @property
    def parts_on_workers(self) -> bool:
        """Whether no worker has all weights, so that reading whole weights is a call of several workers."""
        return self.weight_workers > 1

    @property
    def workers_here(self) -> int:
        """Number of workers on this machine, as far as their addresses tell; at least 1."""
        addresses, own = (self.cluster.worker_addresses, self.cluster.address) if self.cluster else ((), "")
        return max(1, sum(address.rpartition(":")[0] == own.rpartition(":")[0] for address in addresses))

    @property
    def data_workers(self) -> int:
        """Number of workers, or of groups of workers, that train on different examples."""
        return self.workers // self.replica_workers

    @property
    def data_worker(self) -> int:
        """Index of this worker, or of its group, among the `data_workers`, from 0; 0 for a parameter server."""
        return max(self.worker, 0) // self.replica_workers

    @property
    def replica_part(self) -> int:
        """Index of this worker among the workers that share its replica, from 0."""
        return max(self.worker, 0) % self.replica_workers

    @property
    def workers_alike(self) -> list[int]:
        """Ranks of the workers that hold the same part of a replica as this one, including it."""
        return [*range(self.replica_part, self.workers, self.replica_workers)]

    @property
    def local_devices(self) -> int:
        """Number of devices per worker."""
        return self.local_replicas * self.mesh.devices_of_replica // self.replica_workers

    @property
    def model_workers(self) -> int:
        """Number of workers that together divide the layers of a replica or stage; 1 if one worker's devices do."""
        return max(1, self.model_devices // self.local_devices)

    @property
    def model_part(self) -> int:
        """Index of this worker among the workers that divide the same layers, from 0."""
        return self.replica_part % self.model_workers

    @property
    def pipeline_workers(self) -> int:
        """Number of workers with different stages of a replica; 1 if every worker has all stages, or parts of all."""
        return self.replica_workers // self.model_workers

    @property
    def pipeline_part(self) -> int:
        """Index of this worker among the workers with different stages of its replica, from 0."""
        return self.replica_part // self.model_workers

    @property
    def local_places(self) -> int:
        """Number of places of a pipeline on a worker; 1 without a pipeline."""
        return self.pipeline_devices // self.pipeline_workers if self.pipeline_devices > 1 else 1

    @property
    def pipeline_spans_workers(self) -> bool:
        """Whether stages of a pipeline are on several workers, which send each other tensors in a step."""
        return self.pipeline_devices > 1 and self.pipeline_workers > 1

    @property
    def mesh(self) -> Mesh:
        """The devices by axis."""
        return Mesh(data=self.replicas, pipeline=self.pipeline_devices, model=self.model_devices)

    @property
    def input_pipelines(self) -> int:
        """Number of input pipelines with different examples; each feeds the same number of replicas."""
        return self.hosts or self.data_workers

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the files of the run and logs to the terminal."""
        return self.cluster is None or self.cluster.is_chief

    @property
    def synchronous(self) -> bool:
        """Whether every replica takes part in every step."""
        return self.name != "parameter_server"

    def describe(self) -> str:
        """Returns one line for the log: the choice and its reason."""
        shape = f"{self.workers} worker{'s' * (self.workers != 1)} x {self.local_devices} {self.device_type}"
        devices = self.mesh.devices_of_replica
        each = f" of {devices} devices" if devices > 1 else ""
        replicas = f"{self.replicas} replica{'s' * (self.replicas != 1)}{each}"
        transport = ""
        if self.transport != "tensorflow" or self.transport_reason:
            transport = f", transport {self.transport}"
        if self.transport_reason:
            transport += f" ({self.transport_reason})"
        return f"strategy {self.name}: {shape} = {replicas}{transport} ({self.reason})"


def choose_topology(config: StrategyConfig, cluster: ClusterInfo | None = None) -> Topology:
    """Decides the topology without starting anything.

    Args:
      config: The requested strategy and number of devices.
      cluster: The cluster and this process' task in it, from `tfpar.cluster.detect()`; None outside a cluster.

    Returns:
      The topology. With `--strategy=auto`: a TPU if the environment names one, then the cluster, then all
      GPUs, then one device.

    Raises:
      ConfigError: This environment cannot run the strategy; the message says what to do instead.
    """
    name, reason = config.strategy, f"--strategy={config.strategy}"
    if name == "auto":
        name, reason = _choose(config, cluster)
    if name in ("tpu", "parameter_server"):
        if config.mesh:
            raise ConfigError(f"--mesh={config.mesh} does not work with --strategy={name}. Leave it out.")
        if config.transport == "gloo":
            raise ConfigError(f"--transport=gloo does not work with --strategy={name}. Leave it out.")
    if name == "tpu":
        return _tpu_topology(config, reason, cluster)
    _check_idle(config, name)
    gpus = count_gpus()
    device_type = "GPU" if gpus else "CPU"
    if gpus and config.devices > gpus:
        raise ConfigError(
            f"--devices={config.devices}: this machine has {gpus} GPU(s). Use at most {gpus}, or hide the GPUs with "
            "CUDA_VISIBLE_DEVICES=-1 to split the CPU into logical devices."
        )
    workers = cluster.num_workers if cluster is not None and name == "multi_worker" else 1
    of_one = name in ("one_device", "parameter_server")
    devices = config.devices or (1 if of_one else gpus or devices_of_worker(config.mesh, workers))
    common: dict[str, Any] = {"name": name, "reason": reason, "device_type": device_type}
    if name in ("one_device", "mirrored") and cluster is not None and cluster.num_workers > 1:
        common["reason"] += f"; each of the {cluster.num_workers} workers in {cluster.source} trains independently"
    if name == "one_device":
        if devices > 1:
            raise ConfigError(f"--devices={devices} needs --strategy=mirrored; --strategy=one_device uses one.")
        parse_mesh(config.mesh, workers=1, devices=1)
        return Topology(**common)
    if name == "mirrored":
        return Topology(**_per_worker(config, 1, devices), **common)
    return _cluster_topology(config, cluster, devices, common)


def _check_idle(config: StrategyConfig, name: str) -> None:
    """Refuses options that have no effect with a strategy other than `tpu`."""
    if config.tpu:
        raise ConfigError(
            f"--tpu={config.tpu} has no effect with --strategy={name}. Use --strategy=tpu, or leave it out."
        )
    if config.transport == "gloo" and name in ("one_device", "mirrored"):
        raise ConfigError(
            f"--transport=gloo has no effect with --strategy={name}, which has one worker. Start several workers with "
            "`python -m tfpar.launch --workers=2 -- SCRIPT FLAGS...`, or leave it out."
        )


def without_auto(config: StrategyConfig) -> StrategyConfig:
    """Returns the options without `--mesh=auto`, for devices whose mesh is not chosen yet."""
    return dataclasses.replace(config, mesh="") if config.mesh == AUTO else config


def _per_worker(config: StrategyConfig, workers: int, devices: int) -> dict[str, Any]:
    """Returns the number of replicas of a worker and the numbers of devices of a replica, by attribute."""
    mesh = parse_mesh(config.mesh, workers=workers, devices=devices)
    return {
        "local_replicas": max(1, devices // mesh.devices_of_replica),
        "replica_workers": max(1, mesh.devices_of_replica // devices),
        "pipeline_devices": mesh.pipeline,
        "model_devices": mesh.model,
    }


def _choose(config: StrategyConfig, cluster: ClusterInfo | None) -> tuple[str, str]:
    if config.tpu or tf.config.list_physical_devices("TPU"):
        return "tpu", "auto: a TPU was found"
    if cluster is not None:
        name = "parameter_server" if cluster.num_ps else "multi_worker"
        return name, f"auto: {cluster.source} describes a cluster"
    gpus = count_gpus()
    devices = config.devices or gpus or devices_of_worker(config.mesh, 1)
    if devices > 1:
        return "mirrored", f"auto: {devices} devices on this machine"
    return "one_device", "auto: no TPU, no cluster, " + ("one GPU" if gpus else "no GPU")


def _cluster_topology(
    config: StrategyConfig, cluster: ClusterInfo | None, devices: int, common: dict[str, Any]
) -> Topology:
    """Returns the topology of `multi_worker` or `parameter_server`; `common` has name, reason and device type."""
    name = common["name"]
    port_filter.is_open()  # refuses a wrong value of its variable before a port is open
    if cluster is None:
        tasks = "--workers=2 --ps=1" if name == "parameter_server" else "--workers=2"
        raise ConfigError(
            f"--strategy={name} needs a cluster and found none. Start the script with `python -m tfpar.launch "
            f"{tasks} -- SCRIPT FLAGS...`, or set TF_CONFIG (see docs/cluster.md)."
        )
    if cluster.task_type == "evaluator":
        raise ConfigError(
            f"{cluster.source}: this process is an evaluator, a task that tfpar does not use: workers evaluate between "
            "steps, and with parameter servers the chief evaluates while they train. Take 'evaluator' out of the "
            "cluster."
        )
    common |= {"workers": cluster.num_workers, "worker": cluster.worker_rank, "cluster": cluster}
    common |= {"peer_timeout": config.peer_timeout, "start_timeout": config.start_timeout}
    if name == "multi_worker":
        if cluster.num_ps:
            raise ConfigError(
                f"--strategy=multi_worker: the cluster has {cluster.num_ps} parameter server(s), which would be idle. "
                "Use --strategy=parameter_server, or take 'ps' out of TF_CONFIG."
            )
        if cluster.num_workers > 1:
            common |= _transport(config, cluster, common["device_type"])
        return Topology(**_per_worker(config, cluster.num_workers, devices), **common)
    return _parameter_server_topology(cluster, devices, common)


def _transport(config: StrategyConfig, cluster: ClusterInfo, device_type: str) -> dict[str, str]:
    """Returns the transport between the workers of `multi_worker`, or `auto` with this worker's part of the choice."""
    if config.transport == "auto":
        uses_nccl = device_type == "GPU" and has_nccl()
        reason = "GPUs use NCCL" if uses_nccl else gloo_mesh.obstacle(cluster)
        return {"transport": "auto", "transport_reason": reason}
    if config.transport == "gloo":
        gloo_mesh.check_usable("--transport=gloo")
        gloo_mesh.check_address("--transport=gloo", cluster)
    return {"transport": config.transport}


def _tpu_topology(config: StrategyConfig, reason: str, cluster: ClusterInfo | None) -> Topology:
    if not config.tpu and not tf.config.list_physical_devices("TPU"):
        raise ConfigError(
            "--strategy=tpu: no TPU was found on this machine. Name one with --tpu=NAME or --tpu=grpc://HOST:8470, use "
            "--tpu=local on a TPU VM, or choose --strategy=auto."
        )
    return Topology(name="tpu", reason=reason, device_type="TPU", tpu=config.tpu, cluster=cluster)


def _parameter_server_topology(cluster: ClusterInfo, devices: int, common: dict[str, Any]) -> Topology:
    if devices > 1:
        raise ConfigError(
            f"--devices={devices}: --strategy=parameter_server runs one replica per worker. Leave it out, and start "
            "more workers on a machine with several GPUs."
        )
    jobs = cluster.cluster
    if not jobs.get("chief") or not jobs.get("worker") or not jobs.get("ps"):
        raise ConfigError(
            f"--strategy=parameter_server needs a chief, workers and parameter servers; the cluster has "
            f"{ {job: len(tasks) for job, tasks in jobs.items()} }. Start one with `python -m tfpar.launch --workers=2 "
            "--ps=1 -- SCRIPT ...`."
        )
    return Topology(**{**common, "workers": len(jobs["worker"])})
