"""Which strategy a configuration gets, and what is refused before anything starts."""

from __future__ import annotations

import json
import socket

from tfpar import cluster
from tfpar.collectives import gloo_mesh
from tfpar.config import ConfigError, StrategyConfig
from tfpar.parallel import strategies
from tfpar.parallel import topology as topologies
from tfpar.parallel.topology import Topology, choose_topology

import pytest
import tensorflow as tf


def of_cluster(**jobs):
    task_type = "chief" if "chief" in jobs else "worker"
    environ = {"TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": task_type, "index": 0}})}
    return cluster.detect(environ)


WORKERS = {"worker": ["127.0.0.1:4001", "127.0.0.1:4002"]}
SERVERS = {"chief": ["127.0.0.1:4000"], **WORKERS, "ps": ["127.0.0.1:4003"]}


@pytest.mark.parametrize(
    ("options", "jobs", "name", "replicas"),
    [
        ({}, None, "one_device", 1),
        ({"devices": 3}, None, "mirrored", 3),
        ({"mesh": "data:3"}, None, "mirrored", 3),
        ({}, WORKERS, "multi_worker", 2),
        ({"devices": 2}, WORKERS, "multi_worker", 4),
        ({}, SERVERS, "parameter_server", 2),
        ({"strategy": "one_device"}, WORKERS, "one_device", 1),
        ({"strategy": "mirrored", "devices": 2}, None, "mirrored", 2),
    ],
)
def test_chosen_topology(options, jobs, name, replicas):
    topology = choose_topology(StrategyConfig(**options), of_cluster(**jobs) if jobs else None)
    assert (topology.name, topology.replicas) == (name, replicas)
    assert topology.reason in topology.describe()
    assert ("trains independently" in topology.reason) == (name == "one_device" and jobs is not None)


@pytest.mark.parametrize(
    ("options", "jobs", "message"),
    [
        ({"strategy": "multi_worker"}, None, "tfpar.launch"),
        ({"strategy": "parameter_server"}, WORKERS, "--ps=1"),
        ({"strategy": "multi_worker"}, SERVERS, "parameter_server"),
        ({"strategy": "one_device", "devices": 2}, None, "mirrored"),
        ({"strategy": "tpu"}, None, "no TPU was found"),
        ({"strategy": "parameter_server", "devices": 2}, SERVERS, "--devices"),
        ({"transport": "gloo"}, None, "=gloo has no effect with --strategy=one_device, which has one worker"),
        ({"transport": "gloo", "devices": 2}, None, "--transport=gloo has no effect with --strategy=mirrored"),
        ({"tpu": "x", "strategy": "mirrored"}, None, "--tpu=x has no effect with --strategy=mirrored. Use"),
    ],
)
def test_refusals_say_what_to_do(options, jobs, message):
    with pytest.raises(ConfigError, match=message):
        choose_topology(StrategyConfig(**options), of_cluster(**jobs) if jobs else None)


@pytest.mark.parametrize(
    ("options", "jobs", "name", "replicas"),
    [
        ({}, None, "mirrored", 2),
        ({"strategy": "one_device"}, None, "one_device", 1),
        ({}, WORKERS, "multi_worker", 4),
        ({}, SERVERS, "parameter_server", 2),
        ({"devices": 1}, SERVERS, "parameter_server", 2),
    ],
)
def test_chosen_topology_with_two_gpus(monkeypatch, options, jobs, name, replicas):
    monkeypatch.setattr(topologies, "count_gpus", lambda: 2)
    topology = choose_topology(StrategyConfig(**options), of_cluster(**jobs) if jobs else None)
    assert (topology.name, topology.replicas, topology.device_type) == (name, replicas, "GPU")


def test_a_worker_of_parameter_servers_uses_one_of_two_gpus(monkeypatch):
    monkeypatch.setattr(topologies, "count_gpus", lambda: 2)
    topology = choose_topology(StrategyConfig(), of_cluster(**SERVERS))
    assert strategies._server_options(topology).gpu_options.visible_device_list == "0"
    with pytest.raises(ConfigError, match=r"--devices=2: --strategy=parameter_server runs one replica per worker"):
        choose_topology(StrategyConfig(devices=2), of_cluster(**SERVERS))


def test_a_tpu_slice_is_one_process_fed_by_its_hosts():
    slice_of_four = Topology(name="tpu", local_replicas=16, device_type="TPU", hosts=4)
    assert (slice_of_four.workers, slice_of_four.replicas, slice_of_four.input_pipelines) == (1, 16, 4)
    assert Topology(name="multi_worker", workers=3, local_replicas=2).input_pipelines == 3


def test_an_evaluator_is_refused():
    jobs = {"cluster": {**SERVERS, "evaluator": ["127.0.0.1:4009"]}, "task": {"type": "evaluator", "index": 0}}
    with pytest.raises(ConfigError, match=r"this process is an evaluator.*Take 'evaluator' out"):
        choose_topology(StrategyConfig(), cluster.detect({"TF_CONFIG": json.dumps(jobs)}))


def test_an_unknown_strategy_gets_suggestions():
    with pytest.raises(ConfigError, match="Did you mean 'mirrored'"):
        StrategyConfig(strategy="miror")


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_mirrored_on_logical_devices(devices):
    runtime = strategies.build(choose_topology(StrategyConfig(strategy="mirrored", devices=devices)))
    assert runtime.strategy.num_replicas_in_sync == devices


def test_plan_is_the_old_name_of_topology():
    runtime = strategies.Runtime(topology=Topology(name="one_device"), strategy=tf.distribute.get_strategy())
    with pytest.warns(DeprecationWarning, match="use Runtime.topology"):
        assert runtime.plan is runtime.topology


def test_more_devices_after_start_up_are_refused():
    tf.zeros([]).numpy()
    with pytest.raises(ConfigError, match="before TensorFlow"):
        strategies.build(choose_topology(StrategyConfig(strategy="mirrored", devices=9)))


def test_an_unreachable_tpu_is_a_plain_error():
    with pytest.raises(ConfigError, match="--tpu='local'"):
        strategies.build(choose_topology(StrategyConfig(strategy="tpu", tpu="local")))


def test_a_tpu_address_where_nothing_listens_is_refused_at_once():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        address = f"grpc://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ConfigError, match="nothing listens"):
            strategies.build(choose_topology(StrategyConfig(strategy="tpu", tpu=address)))


@pytest.mark.parametrize(
    ("transport", "parts", "reason"),
    [
        ("auto", 1, "GPUs use NCCL"),
        ("gloo", 1, None),
        ("tensorflow", 1, None),
        ("auto", 2, ""),  # NCCL takes a GPU once
    ],
)
def test_transport_of_gpus(monkeypatch, transport, parts, reason):
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [gpu] if kind == "GPU" else [])
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda _: [None] * parts if parts > 1 else None)
    monkeypatch.setattr(gloo_mesh, "obstacle", lambda _: "")
    monkeypatch.setattr(gloo_mesh, "check_usable", lambda _: None)
    topology = choose_topology(StrategyConfig(transport=transport), of_cluster(**WORKERS))
    assert (topology.device_type, topology.local_replicas, topology.transport) == ("GPU", parts, transport)
    assert topology.transport_reason == (reason or "")
    monkeypatch.setenv("TFPAR_SHARED_GPUS", "1")
    shared = choose_topology(StrategyConfig(transport=transport), of_cluster(**WORKERS))
    assert shared.transport_reason == ""


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, None),
        ({"strategy": "multi_worker", "transport": "gloo", "peer_timeout": 20.0}, None),
        ({"transport": "tensorflow"}, "--transport=tensorflow does not .* with --transport=gloo"),
        ({"peer_timeout": 40.0}, "--peer_timeout=40.0 does not .* with --peer_timeout=20.0"),
        ({"start_timeout": 60.0}, "--start_timeout=60.0 does not .* with --start_timeout=600.0"),
        ({"devices": 2}, "--devices=2 does not .* with --devices=1"),
        ({"mesh": "model:2"}, "--mesh=data:2,model:2 does not .* with --mesh=data:2"),
    ],
)
def test_a_process_connects_to_its_cluster_once(monkeypatch, options, named):
    """Real workers: tests/integration/test_own_errors.py."""
    running = choose_topology(StrategyConfig(transport="gloo", peer_timeout=20.0), of_cluster(**WORKERS))
    first = strategies.Runtime(topology=running, strategy=tf.distribute.get_strategy())
    monkeypatch.setattr(strategies, "_running", [first])
    asked = choose_topology(StrategyConfig(**options), of_cluster(**WORKERS))
    if named:
        with pytest.raises(ConfigError, match=f"{named} and can be started once"):
            strategies.build(asked)
        return
    again = strategies.build(asked)
    assert again.strategy is first.strategy
    assert (again.topology.peer_timeout, again.topology.transport) == (20.0, "gloo")
    assert again.topology.reason == asked.reason
