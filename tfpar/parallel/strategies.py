"""`build(topology)` configures the devices and creates the `tf.distribute` strategy.

It must run before TensorFlow's first op.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import socket
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from tfpar.cluster import failure, port_filter
from tfpar.collectives import gloo_mesh
from tfpar.collectives.tensorflow import has_nccl
from tfpar.config import ConfigError, StrategyConfig
from tfpar.parallel import graph_passes
from tfpar.parallel.topology import Topology
from tfpar.process import exit_codes
from tfpar.process.cores import cores
from tfpar.process.logs import NOTE

import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy, collective_util

_log = logging.getLogger(__name__)

# TensorFlow 2.21's messages about devices and collectives that are configured after its runtime was initialised.
_TOO_LATE = re.compile("after being initialized|at program startup|already configured|after initialization")

_OF_CLUSTERS = ("multi_worker", "parameter_server")
_TPU_CONNECT_S = 20.0
_MESSAGE_THREADS = 16
_FEW_THREADS = 2


class TooLateError(ConfigError):
    """TensorFlow was initialised before its devices and collectives were configured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime:
    """A topology and the strategy that runs it.

    Attributes:
      topology: The topology of the run. For a TPU, this one has the actual `hosts` and `local_replicas`.
      strategy: The running strategy.
      options: The options that `--mesh=auto` has chosen, by flag name; empty without it.
    """

    topology: Topology
    strategy: tf.distribute.Strategy
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def plan(self) -> Topology:
        """Deprecated name of `topology`."""
        warnings.warn("Runtime.plan is deprecated; use Runtime.topology", DeprecationWarning, stacklevel=2)
        return self.topology


# The strategy of this process that connects a cluster, if there is one. It is reused: TensorFlow 2.21 starts its server
# and its coordination service once a process, and a second MultiWorkerMirroredStrategy would restart its count of
# collectives (`CollectiveKeys`), which the runtime then confuses with those of the first, which had other shapes.
_running: list[Runtime] = []


def build(topology: Topology) -> Runtime:
    """Configures the devices and creates the strategy; on a cluster, one for all trainers of this process.

    Args:
      topology: The topology to build.

    Returns:
      The running strategy with its topology. For a parameter server or a worker of `parameter_server` this starts the
      TensorFlow server and never returns: those processes serve until they are ended.

    Raises:
      TooLateError: TensorFlow was initialised too early for the devices.
      ConfigError: The TPU cannot be reached, the workers' transport cannot be used, or this process is connected to its
        cluster with other options.
    """
    graph_passes.leave_sums_whole()
    if topology.name == "tpu":
        return _build_tpu(topology)
    if topology.name in _OF_CLUSTERS and _running:
        return _reused(_running[0], topology)
    builders = {
        "one_device": _build_one_device,
        "mirrored": _build_mirrored,
        "multi_worker": _build_multi_worker,
        "parameter_server": _build_parameter_server,
    }
    try:
        strategy = builders[topology.name](topology)
        _restrict_port(topology)
        runtime = Runtime(topology=_with_transport(topology), strategy=strategy)
        if topology.name in _OF_CLUSTERS:
            _running.append(runtime)
        return runtime
    except (RuntimeError, ValueError) as error:
        if not _TOO_LATE.search(str(error)):
            raise
        raise TooLateError(
            f"--strategy={topology.name} must be set up before TensorFlow runs its first op, and an op has run "
            f"({error}). Creating a Keras model, optimizer or metric is enough. Give the Trainer names "
            "(optimizer='adamw', metrics=['accuracy']) and a function that builds the model, or call "
            "runtime = tfpar.initialize(config) first thing in the program and pass config=config, runtime=runtime."
        ) from error


def has_cluster() -> bool:
    """Whether a strategy of this process connects a cluster already."""
    return bool(_running)


def _reused(running: Runtime, topology: Topology) -> Runtime:
    """The running strategy of a cluster, for a topology that it can serve.

    Raises:
      ConfigError: It cannot. The message names the option.
    """
    ours = running.topology
    asked = {name: getattr(topology, name) for name in ("peer_timeout", "start_timeout", "transport")}
    # The running strategy decides about what has its default.
    asked = {name: value for name, value in asked.items() if value != getattr(StrategyConfig(), name)}
    asked |= {"strategy": topology.name, "devices": topology.local_devices}
    if max(topology.mesh.devices_of_replica, ours.mesh.devices_of_replica) > 1:
        asked = {"mesh": topology.mesh.text, **asked}
    runs = {"strategy": ours.name, "devices": ours.local_devices, "mesh": ours.mesh.text}
    for name, value in asked.items():
        if value != (has := runs.get(name, getattr(ours, name, None))):
            raise ConfigError(
                f"--{name}={value} does not agree with the strategy that connects this process to its cluster, which "
                f"runs with --{name}={has} and can be started once. Give all trainers of a process the same --{name}, "
                "or start another process."
            )
    if _members(topology) != _members(ours):
        raise ConfigError(
            "the description of the cluster has changed since this process connected to it, which it can do once. "
            f"Leave {ours.cluster.source if ours.cluster else 'it'} unchanged, or start another process."
        )
    return dataclasses.replace(running, topology=dataclasses.replace(ours, reason=topology.reason))


def _members(topology: Topology) -> tuple[Any, ...]:
    """The members of a cluster and this process's place among them, wherever the description came from."""
    assert topology.cluster is not None
    return topology.cluster.cluster, topology.cluster.task_type, topology.cluster.task_index


def _restrict_port(topology: Topology) -> None:
    """Restricts the server that TensorFlow started for this process to the process's own address."""
    if topology.name not in _OF_CLUSTERS or not (topology.cluster and topology.cluster.address):
        return
    try:
        port_filter.restrict(topology.cluster.address)
    except port_filter.StillOpenError as reason:
        if topology.is_chief:
            _log.log(
                NOTE,
                f"TensorFlow's port {topology.cluster.address.rpartition(':')[2]} is open on all addresses of "
                f"this machine ({reason}); restrict access with a firewall",
            )


def _local_devices(topology: Topology) -> list[str]:
    """Makes `topology.local_devices` devices of the topology's type visible; returns their names."""
    count, kind = topology.local_devices, topology.device_type
    physical = tf.config.list_physical_devices(kind)
    if kind == "GPU":
        tf.config.set_visible_devices(physical[:count], "GPU")
    elif count > 1 and len(tf.config.get_logical_device_configuration(physical[0]) or ()) < count:
        tf.config.set_logical_device_configuration(
            physical[0], [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
        )
    return [f"/device:{kind}:{index}" for index in range(count)]


def _build_one_device(topology: Topology) -> tf.distribute.Strategy:
    return tf.distribute.OneDeviceStrategy(_local_devices(topology)[0])


def _replica_devices(topology: Topology) -> list[str]:
    """Returns the names of the devices on which the strategy runs replicas; in a pipeline, those of the first stage."""
    devices = _local_devices(topology)
    places, size = topology.local_places, topology.model_devices
    return [name for place, name in enumerate(devices) if place // size % places == 0]


def _build_mirrored(topology: Topology) -> tf.distribute.Strategy:
    devices = _replica_devices(topology)
    # The default cross-device ops need NCCL on GPUs; on logical CPU devices they would fall back with a warning.
    reduction = tf.distribute.ReductionToOneDevice() if topology.device_type == "CPU" else None
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction)


class _LocalDevicesExtended(collective_all_reduce_strategy.CollectiveAllReduceExtended):
    """Multi-worker strategy that runs replicas on given devices of a worker.

    TensorFlow 2.21 uses every GPU of a worker, but always exactly one CPU device
    (`CollectiveAllReduceExtended._initialize_local_devices`), so a CPU worker could never hold two replicas.
    """

    def __init__(self, *arguments: Any, devices: Sequence[str], **keywords: Any) -> None:
        self._own_devices = list(devices)
        super().__init__(*arguments, **keywords)

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        del cluster_resolver
        kind = tf.DeviceSpec.from_string(self._own_devices[0]).device_type
        return tuple(f"{worker_device}{device}" for device in self._own_devices), kind


class _MultiWorkerOnDevices(tf.distribute.MultiWorkerMirroredStrategy):
    """`MultiWorkerMirroredStrategy` over `_LocalDevicesExtended`."""

    def __init__(
        self,
        resolver: tf.distribute.cluster_resolver.ClusterResolver,
        devices: Sequence[str],
        options: collective_util.Options | None,
    ) -> None:
        extended = _LocalDevicesExtended(
            self,
            cluster_resolver=resolver,
            communication_options=options or collective_util.Options(),
            devices=devices,
        )
        tf.distribute.Strategy.__init__(self, extended)


def _build_multi_worker(topology: Topology) -> tf.distribute.Strategy:
    resolver = _resolver(topology)
    devices = _replica_devices(topology)
    assert topology.cluster is not None
    if topology.replica_workers > 1:
        # By default there is one thread per core (TensorFlow 2.21). A message over TensorFlow's transport occupies one
        # until it is received. Over Gloo it does not, but a single thread may begin the next pass before it sends, and
        # with a model axis it takes a seventh more time. More threads are slower: 16 on one core take 14 % more of it
        # than one does.
        programs = min(topology.model_devices, topology.local_devices)
        holds = topology.pipeline_spans_workers and not _expects_gloo(topology)
        least = _MESSAGE_THREADS * programs if holds else _FEW_THREADS
        threads = tf.config.threading.get_inter_op_parallelism_threads() or cores()
        tf.config.threading.set_inter_op_parallelism_threads(max(least, threads))
    failure.configure(topology.cluster, peer_timeout=topology.peer_timeout, start_timeout=topology.start_timeout)
    with failure.connecting(topology.cluster, topology.start_timeout):
        # TensorFlow 2.21 uses NCCL only if it is named; otherwise it reduces the gradients of GPUs through gRPC. So do
        # the strategy's few own collectives with the native transport, where NCCL may not work.
        gpus = topology.device_type == "GPU"
        options = None
        if gpus and has_nccl() and not _expects_gloo(topology):
            nccl = tf.distribute.experimental.CommunicationImplementation.NCCL
            options = tf.distribute.experimental.CommunicationOptions(implementation=nccl)
        if topology.pipeline_devices > 1 or (not gpus and topology.local_devices > 1):
            strategy = _MultiWorkerOnDevices(resolver, devices, options)
        else:
            strategy = tf.distribute.MultiWorkerMirroredStrategy(
                cluster_resolver=resolver, communication_options=options
            )
    return strategy


def _expects_gloo(topology: Topology) -> bool:
    return topology.transport == "gloo" or (topology.transport == "auto" and not topology.transport_reason)


def _with_transport(topology: Topology) -> Topology:
    """Starts the transport of data between the workers, in addition to the collectives of the strategy."""
    if topology.name != "multi_worker" or topology.workers == 1 or topology.cluster is None:
        return topology
    choice = gloo_mesh.start(
        topology.cluster,
        topology.transport,
        topology.transport_reason,
        peer_timeout=topology.peer_timeout,
        start_timeout=topology.start_timeout,
        for_gpus=topology.device_type == "GPU",
    )
    if topology.pipeline_spans_workers and choice.transport == "tensorflow" and _expects_gloo(topology):
        raise ConfigError(
            f"--transport=auto: not all workers can use the native transport ({choice.reason}), which a pipeline over "
            "workers must know before it starts. Pass --transport=tensorflow."
        )
    return dataclasses.replace(topology, transport=choice.transport, transport_reason=choice.reason)


def _resolver(topology: Topology) -> tf.distribute.cluster_resolver.SimpleClusterResolver:
    cluster = topology.cluster
    assert cluster is not None
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({job: list(tasks) for job, tasks in cluster.cluster.items() if job != "evaluator"}),
        task_type=cluster.task_type,
        task_id=cluster.task_index,
        num_accelerators={"GPU": topology.local_devices} if topology.device_type == "GPU" else {},
        rpc_layer="grpc",
    )


def _build_parameter_server(topology: Topology) -> tf.distribute.Strategy:
    resolver = _resolver(topology)
    assert topology.cluster is not None
    _local_devices(topology)
    failure.install_peer_loss_hook(topology.cluster)
    with failure.connecting(topology.cluster, topology.start_timeout):
        if topology.is_chief:
            failure.watch_servers(
                topology.cluster, peer_timeout=topology.peer_timeout, start_timeout=topology.start_timeout
            )
            return tf.distribute.ParameterServerStrategy(resolver)
        server = tf.distribute.Server(
            resolver.cluster_spec(),
            job_name=resolver.task_type,
            task_index=resolver.task_id,
            protocol="grpc",
            config=_server_options(topology),
            start=True,
        )
    _restrict_port(topology)
    # The launcher ends servers with SIGTERM when a run is done; a Python handler would never run during `join`.
    exit_codes.restore_default_signals()
    server.join()
    raise AssertionError("a TensorFlow server runs until its process is ended")


def _server_options(topology: Topology) -> tf.compat.v1.ConfigProto:
    """Options of the TensorFlow server of a worker or parameter server, with its first GPU alone.

    `ParameterServerStrategy` (2.21) runs a replica on each GPU of a worker, and `tf.config.set_visible_devices` has no
    effect on servers.
    """
    options = tf.compat.v1.ConfigProto()
    if topology.device_type == "GPU":
        options.gpu_options.visible_device_list = "0"
    return options


def _check_listens(address: str) -> None:
    """Refuses a TPU address at which nothing listens: TensorFlow 2.21 would retry for several minutes."""
    match = re.fullmatch(r"grpc://(?:\[([^\]]+)\]|([^:\[\]]+)):(\d+)", address)
    if match is None:
        return
    try:
        socket.create_connection((match[1] or match[2], int(match[3])), timeout=_TPU_CONNECT_S).close()
    except (OSError, OverflowError) as error:  # OverflowError: no port
        raise ConfigError(
            f"--tpu={address!r}: nothing listens at this address ({error}). Check the TPU's address and that this "
            "machine's network reaches it."
        ) from error


def _build_tpu(topology: Topology) -> Runtime:
    _check_listens(topology.tpu)
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=topology.tpu or "local")
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, OSError, tf.errors.OpError) as error:  # OSError: the cloud's API does not answer
        raise ConfigError(
            f"--tpu={topology.tpu!r}: the TPU cannot be reached ({error}). Check the name, or use --tpu=local on a TPU "
            "VM."
        ) from error
    strategy = tf.distribute.TPUStrategy(resolver)
    hosts, replicas = max(1, strategy.extended.num_hosts), strategy.num_replicas_in_sync
    return Runtime(topology=dataclasses.replace(topology, hosts=hosts, local_replicas=replicas), strategy=strategy)
