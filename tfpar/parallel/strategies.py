"""The `tf.distribute` strategy for a configuration.

Two moves, so that everything that can be refused is refused before anything starts:

1. `plan(config, cluster)` decides the layout - which strategy, how many workers, how many replicas - from
   the flags, the cluster description and the physical devices. It starts no server and opens no connection.
2. `build(plan)` configures devices and creates the strategy. It must run before TensorFlow's first op.
"""

from __future__ import annotations

import dataclasses
import re
import socket
from typing import Any

from tfpar.cluster import failure, port_filter
from tfpar.cluster.info import ClusterInfo
from tfpar.config import ConfigError, StrategyConfig
from tfpar.process import exit_codes

import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy, collective_util

# What TensorFlow 2.21 says of devices and collectives that are configured when its runtime is up already.
_TOO_LATE = re.compile("after being initialized|at program startup|already configured|after initialization")

_TPU_CONNECT_S = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout that has been decided and not yet started.

    Attributes:
      name: `one_device`, `mirrored`, `multi_worker`, `parameter_server` or `tpu`.
      workers: Processes that hold replicas.
      worker: Rank of this process among them, from 0; -1 for a parameter server.
      local_replicas: Replicas (devices) in each of them.
      device_type: `CPU`, `GPU` or `TPU`.
      reason: Why this strategy, in words for the log.
      cluster: The cluster this process belongs to, if any.
      tpu: Name or address of the TPU.
      hosts: Hosts of a TPU slice, all driven by one process, each of which feeds its own replicas; else 0.
      peer_timeout: Seconds after which a worker that does not answer is lost.
      start_timeout: Seconds that workers wait for each other at the start.
    """

    name: str
    workers: int = 1
    worker: int = 0
    local_replicas: int = 1
    device_type: str = "CPU"
    reason: str = ""
    cluster: ClusterInfo | None = None
    tpu: str = ""
    hosts: int = 0
    peer_timeout: float = 30.0
    start_timeout: float = 600.0

    @property
    def replicas(self) -> int:
        """Replicas over all workers."""
        return self.workers * self.local_replicas

    @property
    def input_pipelines(self) -> int:
        """Pipelines that feed the replicas, as many each: one a host."""
        return self.hosts or self.workers

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files and talks on the terminal."""
        return self.cluster is None or self.cluster.is_chief

    @property
    def synchronous(self) -> bool:
        """Whether every replica takes part in every update."""
        return self.name != "parameter_server"

    def describe(self) -> str:
        """One line for the log: what was chosen and why."""
        layout = f"{self.workers} worker{'s' * (self.workers != 1)} x {self.local_replicas} {self.device_type}"
        return f"strategy {self.name}: {layout} = {self.replicas} replica{'s' * (self.replicas != 1)} ({self.reason})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A plan and the running strategy that carries it out."""

    plan: Plan
    strategy: tf.distribute.Strategy


def plan(config: StrategyConfig, cluster: ClusterInfo | None = None) -> Plan:
    """Decides the layout without starting anything.

    Args:
      config: The strategy and the number of devices asked for.
      cluster: Who this process is, from `tfpar.cluster.detect()`; None outside a cluster.

    Returns:
      The plan. With `--strategy=auto`: a TPU if the environment names one, then the cluster, then all
      GPUs, then one device.

    Raises:
      ConfigError: A strategy that this environment cannot carry out, with the way out.
    """
    name, reason = config.strategy, f"--strategy={config.strategy}"
    if name == "auto":
        name, reason = _choose(config, cluster)
    if name == "tpu":
        return _plan_tpu(config, reason, cluster)
    gpus = len(tf.config.list_physical_devices("GPU"))
    device_type = "GPU" if gpus else "CPU"
    if gpus and config.devices > gpus:
        raise ConfigError(
            f"--devices={config.devices}: this machine has {gpus} GPU(s). Use at most {gpus}, or hide the GPUs with "
            "CUDA_VISIBLE_DEVICES=-1 to split the CPU into logical devices."
        )
    devices = config.devices or (gpus if name != "one_device" and gpus else 1)
    common: dict[str, Any] = {"name": name, "reason": reason, "device_type": device_type}
    if name in ("one_device", "mirrored") and cluster is not None and cluster.num_workers > 1:
        common["reason"] += f"; each of the {cluster.num_workers} workers in {cluster.source} has a run of its own"
    if name == "one_device":
        if devices > 1:
            raise ConfigError(f"--devices={devices} needs --strategy=mirrored; --strategy=one_device uses one.")
        return Plan(**common)
    if name == "mirrored":
        return Plan(local_replicas=devices, **common)
    if cluster is None:
        tasks = "--workers=2 --ps=1" if name == "parameter_server" else "--workers=2"
        raise ConfigError(
            f"--strategy={name} needs a cluster and found none. Start the script with `python -m tfpar.launch "
            f"{tasks} -- SCRIPT FLAGS...`, or set TF_CONFIG (see the README, 'On a cluster')."
        )
    if cluster.task_type == "evaluator":
        raise ConfigError(
            f"{cluster.source}: this process is an evaluator, which tfpar has no part for: workers evaluate between "
            "updates, the chief of parameter servers beside them. Take 'evaluator' out of the cluster."
        )
    common |= {"workers": cluster.num_workers, "worker": cluster.worker_rank, "cluster": cluster}
    common |= {"peer_timeout": config.peer_timeout, "start_timeout": config.start_timeout}
    if name == "multi_worker":
        if cluster.num_ps:
            raise ConfigError(
                f"--strategy=multi_worker: the cluster has {cluster.num_ps} parameter server(s), which it would leave "
                "idle. Use --strategy=parameter_server, or take 'ps' out of TF_CONFIG."
            )
        return Plan(local_replicas=devices, **common)
    return _plan_parameter_server(cluster, devices, common)


def _choose(config: StrategyConfig, cluster: ClusterInfo | None) -> tuple[str, str]:
    if config.tpu or tf.config.list_physical_devices("TPU"):
        return "tpu", "auto: a TPU was found"
    if cluster is not None:
        name = "parameter_server" if cluster.num_ps else "multi_worker"
        return name, f"auto: {cluster.source} describes a cluster"
    gpus = len(tf.config.list_physical_devices("GPU"))
    if config.devices > 1 or (config.devices == 0 and gpus > 1):
        return "mirrored", f"auto: {config.devices or gpus} devices on this machine"
    return "one_device", "auto: no TPU, no cluster, " + ("one GPU" if gpus else "no GPU")


def _plan_tpu(config: StrategyConfig, reason: str, cluster: ClusterInfo | None) -> Plan:
    if not config.tpu and not tf.config.list_physical_devices("TPU"):
        raise ConfigError(
            "--strategy=tpu: no TPU was found on this machine. Name one with --tpu=NAME or --tpu=grpc://HOST:8470, use "
            "--tpu=local on a TPU VM, or choose --strategy=auto."
        )
    return Plan(name="tpu", reason=reason, device_type="TPU", tpu=config.tpu, cluster=cluster)


def _plan_parameter_server(cluster: ClusterInfo, devices: int, common: dict[str, Any]) -> Plan:
    if devices > 1:
        raise ConfigError(f"--devices={devices}: parameter_server runs one replica per worker; leave --devices at 0.")
    jobs = cluster.cluster
    if not jobs.get("chief") or not jobs.get("worker") or not jobs.get("ps"):
        raise ConfigError(
            f"--strategy=parameter_server needs a chief, workers and parameter servers; the cluster has "
            f"{ {job: len(tasks) for job, tasks in jobs.items()} }. Start one with `python -m tfpar.launch --workers=2 "
            "--ps=1 -- SCRIPT ...`."
        )
    return Plan(**{**common, "workers": len(jobs["worker"])})


def build(plan: Plan) -> Layout:
    """Configures the devices and creates the strategy.

    Args:
      plan: What to build.

    Returns:
      The running layout. For a parameter server or a worker of `parameter_server` this starts the
      TensorFlow server and never returns: those processes serve until they are ended.

    Raises:
      ConfigError: The TPU cannot be reached, or TensorFlow was initialised too early for the devices.
    """
    if plan.name == "tpu":
        return _build_tpu(plan)
    builders = {
        "one_device": _build_one_device,
        "mirrored": _build_mirrored,
        "multi_worker": _build_multi_worker,
        "parameter_server": _build_parameter_server,
    }
    try:
        layout = Layout(plan=plan, strategy=builders[plan.name](plan))
        _restrict_port(plan)
        return layout
    except (RuntimeError, ValueError) as error:
        if not _TOO_LATE.search(str(error)):
            raise
        raise ConfigError(
            f"--strategy={plan.name} must be set up before TensorFlow runs its first op, and an op has run ({error}). "
            "Making a Keras model, optimizer or metric is enough. Give the Trainer names (optimizer='adamw', "
            "metrics=['accuracy']) and a function that builds the model, or call layout = tfpar.start(config) first "
            "thing in the program and pass config=config, layout=layout."
        ) from error


def _restrict_port(plan: Plan) -> None:
    """Lets the server that TensorFlow has started for this process answer on its own address only."""
    if plan.name not in ("multi_worker", "parameter_server") or plan.cluster is None or not plan.cluster.address:
        return
    try:
        port_filter.restrict(plan.cluster.address)
    except port_filter.StillOpenError as reason:
        if plan.is_chief:
            print(
                f"note: TensorFlow's port {plan.cluster.address.rpartition(':')[2]} is open on all addresses of this "
                f"machine ({reason}); keep strangers off by a firewall",
                flush=True,
            )


def _local_devices(plan: Plan) -> list[str]:
    """Makes `plan.local_replicas` devices of its type visible and returns their names."""
    count, kind = plan.local_replicas, plan.device_type
    physical = tf.config.list_physical_devices(kind)
    if kind == "GPU":
        tf.config.set_visible_devices(physical[:count], "GPU")
    elif count > 1 and len(tf.config.get_logical_device_configuration(physical[0]) or ()) < count:
        tf.config.set_logical_device_configuration(
            physical[0], [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
        )
    return [f"/device:{kind}:{index}" for index in range(count)]


def _build_one_device(plan: Plan) -> tf.distribute.Strategy:
    return tf.distribute.OneDeviceStrategy(_local_devices(plan)[0])


def _build_mirrored(plan: Plan) -> tf.distribute.Strategy:
    devices = _local_devices(plan)
    # The default cross-device ops need NCCL on GPUs; on logical CPU devices they would fall back with a warning.
    reduction = tf.distribute.ReductionToOneDevice() if plan.device_type == "CPU" else None
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction)


class _LocalDevicesExtended(collective_all_reduce_strategy.CollectiveAllReduceExtended):
    """Multi-worker strategy with several logical CPU devices per worker.

    TensorFlow 2.21 takes every GPU of a worker but always exactly one CPU device
    (`CollectiveAllReduceExtended._initialize_local_devices`), so a CPU worker could never hold two replicas.
    """

    def __init__(self, *arguments: Any, local_replicas: int, **keywords: Any) -> None:
        self._local_replicas = local_replicas
        super().__init__(*arguments, **keywords)

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        del cluster_resolver
        return tuple(f"{worker_device}/device:CPU:{index}" for index in range(self._local_replicas)), "CPU"


class _MultiWorkerLogicalDevices(tf.distribute.MultiWorkerMirroredStrategy):
    """`MultiWorkerMirroredStrategy` over `_LocalDevicesExtended`."""

    def __init__(self, resolver: tf.distribute.cluster_resolver.ClusterResolver, local_replicas: int) -> None:
        extended = _LocalDevicesExtended(
            self,
            cluster_resolver=resolver,
            communication_options=collective_util.Options(),
            local_replicas=local_replicas,
        )
        tf.distribute.Strategy.__init__(self, extended)


def _build_multi_worker(plan: Plan) -> tf.distribute.Strategy:
    resolver = _resolver(plan)
    _local_devices(plan)
    assert plan.cluster is not None
    failure.configure(plan.cluster, peer_timeout=plan.peer_timeout, start_timeout=plan.start_timeout)
    with failure.arriving(plan.cluster, plan.start_timeout):
        if plan.device_type == "CPU" and plan.local_replicas > 1:
            return _MultiWorkerLogicalDevices(resolver, plan.local_replicas)
        # TensorFlow 2.21 takes NCCL only where it is asked for, and else sums what GPUs have through gRPC.
        gpus = plan.device_type == "GPU"
        implementation = tf.distribute.experimental.CommunicationImplementation.NCCL if gpus else None
        options = tf.distribute.experimental.CommunicationOptions(implementation=implementation) if gpus else None
        return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver, communication_options=options)


def _resolver(plan: Plan) -> tf.distribute.cluster_resolver.SimpleClusterResolver:
    cluster = plan.cluster
    assert cluster is not None
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({job: list(tasks) for job, tasks in cluster.cluster.items() if job != "evaluator"}),
        task_type=cluster.task_type,
        task_id=cluster.task_index,
        num_accelerators={"GPU": plan.local_replicas} if plan.device_type == "GPU" else {},
        rpc_layer="grpc",
    )


def _build_parameter_server(plan: Plan) -> tf.distribute.Strategy:
    resolver = _resolver(plan)
    assert plan.cluster is not None
    failure.report_losses(plan.cluster)
    with failure.arriving(plan.cluster, plan.start_timeout):
        if plan.is_chief:
            failure.watch_servers(plan.cluster, peer_timeout=plan.peer_timeout, start_timeout=plan.start_timeout)
            return tf.distribute.ParameterServerStrategy(resolver)
        server = tf.distribute.Server(
            resolver.cluster_spec(),
            job_name=resolver.task_type,
            task_index=resolver.task_id,
            protocol="grpc",
            start=True,
        )
    _restrict_port(plan)
    exit_codes.leave_sigterm()  # it ends servers when a run is done, and no handler would get its turn in `join`
    server.join()
    raise AssertionError("a server of TensorFlow serves until its process is ended")


def _check_listens(address: str) -> None:
    """Refuses the address of a TPU where nothing listens: TensorFlow 2.21 would try it for several minutes."""
    given = re.fullmatch(r"grpc://(?:\[([^\]]+)\]|([^:\[\]]+)):(\d+)", address)
    if given is None:
        return
    try:
        socket.create_connection((given[1] or given[2], int(given[3])), timeout=_TPU_CONNECT_S).close()
    except (OSError, OverflowError) as error:  # OverflowError: no port
        raise ConfigError(
            f"--tpu={address!r}: nothing listens at this address ({error}). Check the TPU's address and that this "
            "machine's network reaches it."
        ) from error


def _build_tpu(plan: Plan) -> Layout:
    _check_listens(plan.tpu)
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=plan.tpu or "local")
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, OSError, tf.errors.OpError) as error:  # OSError: the cloud's API does not answer
        raise ConfigError(
            f"--tpu={plan.tpu!r}: the TPU cannot be reached ({error}). Check the name, or use --tpu=local on a TPU VM."
        ) from error
    strategy = tf.distribute.TPUStrategy(resolver)
    hosts, replicas = max(1, strategy.extended.num_hosts), strategy.num_replicas_in_sync
    return Layout(plan=dataclasses.replace(plan, hosts=hosts, local_replicas=replicas), strategy=strategy)
