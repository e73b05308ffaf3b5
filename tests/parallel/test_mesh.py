"""What `--mesh` means, and what it is refused for."""

from __future__ import annotations

from tfpar.cluster.info import ClusterInfo
from tfpar.config import ConfigError, ExperimentConfig, StrategyConfig
from tfpar.parallel.mesh import Mesh, check_beside_mesh, parse_mesh
from tfpar.parallel.topology import choose_topology

import pytest


@pytest.mark.parametrize(
    ("text", "workers", "devices", "mesh"),
    [
        ("", 2, 3, Mesh(data=6)),
        ("data:6", 2, 3, Mesh(data=6)),
        ("model:3", 2, 3, Mesh(data=2, model=3)),
        ("data:2,model:3", 2, 3, Mesh(data=2, model=3)),
        ("model:3, data:2", 2, 3, Mesh(data=2, model=3)),
        ("data:1", 1, 4, Mesh(data=1, model=4)),
        ("model:2", 1, 4, Mesh(data=2, model=2)),
        ("pipeline:2", 1, 2, Mesh(pipeline=2)),
        ("pipeline:2", 2, 4, Mesh(data=4, pipeline=2)),
        ("data:2,pipeline:2", 1, 4, Mesh(data=2, pipeline=2)),
        ("pipeline:2,model:2", 1, 8, Mesh(data=2, pipeline=2, model=2)),
        ("model:4", 2, 2, Mesh(model=4)),
        ("data:2,model:2", 4, 1, Mesh(data=2, model=2)),
        ("pipeline:4", 2, 2, Mesh(pipeline=4)),
    ],
)
def test_sizes(text, workers, devices, mesh):
    assert parse_mesh(text, workers=workers, devices=devices) == mesh


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "data:4,model:2",
            r"a mesh of 8 devices, and there are 2 workers x 2 devices = 4. The product of the sizes must be 4",
        ),
        ("data:2,model:4", "sizes must be 4"),
        ("model:3", "a mesh of 3 devices"),
        ("pipeline:1,model:3", "a mesh of 3 devices"),
        ("data:2,pipeline:1", "a mesh of 2 devices"),
        ("sequence:2", "there is no 'sequence' axis yet. The axes are data, pipeline, model"),
        ("model", "'model' is not AXIS:SIZE"),
        ("model:0", "a size of at least 1"),
        ("rows:2", "'rows:2' is not AXIS:SIZE with one of the axes data, pipeline, model"),
        ("data:2,data:2", "once each"),
    ],
)
def test_what_does_not_fit_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_mesh(text, workers=2, devices=2)


def test_a_replica_has_whole_workers():
    with pytest.raises(ConfigError, match=r"must consist of whole workers .* --mesh=data:3,model:4, or start 2 wor"):
        parse_mesh("data:2,model:6", workers=3, devices=4)


def test_the_devices_of_a_stage_are_whole_workers_or_in_one():
    for workers, devices in ((2, 2), (4, 1)):
        assert parse_mesh("pipeline:2,model:2", workers=workers, devices=devices) == Mesh(pipeline=2, model=2)
    message = (
        r"the 2 devices that divide a stage must be those of whole workers or fit in one, .* 2 workers x 3 devices"
    )
    with pytest.raises(ConfigError, match=message):
        parse_mesh("pipeline:3,model:2", workers=2, devices=3)


def test_workers_share_a_replica():
    """Four workers, of which two pairs have a replica each; whatever follows for the third of them."""
    addresses = [f"localhost:{1000 + number}" for number in range(4)]
    cluster = ClusterInfo("TF_CONFIG", {"worker": tuple(addresses)}, "worker", 2)
    topology = choose_topology(StrategyConfig(mesh="data:2,model:2"), cluster)
    assert (topology.replicas, topology.local_devices, topology.replica_workers) == (2, 1, 2)
    assert (topology.data_workers, topology.data_worker, topology.replica_part) == (2, 1, 0)
    assert topology.workers_alike == [0, 2]
    assert topology.input_pipelines == 2
    assert "4 workers x 1 CPU = 2 replicas of 2 devices" in topology.describe()
    config = ExperimentConfig.from_flat_dict({"stages_per_device": 2, "mesh": "data:1,pipeline:4"})
    check_beside_mesh(config, Mesh(pipeline=4))


@pytest.mark.parametrize(
    ("mesh", "workers", "devices", "places", "stages", "layers"),
    [
        ("pipeline:2,model:2", 4, 1, 1, (1, 2), (0, 2)),
        ("data:2,pipeline:2,model:2", 8, 1, 1, (1, 2), (0, 2)),
        ("pipeline:2,model:4", 4, 2, 1, (1, 2), (0, 2)),
        ("pipeline:4,model:2", 4, 2, 1, (2, 4), (0, 1)),
        ("pipeline:8,model:1", 4, 2, 2, (2, 4), (0, 1)),
        ("data:1,model:4", 4, 1, 1, (0, 1), (2, 4)),
        ("data:4,model:2", 4, 2, 1, (0, 1), (0, 1)),
    ],
)
def test_workers_share_stages_and_the_layers_of_a_stage(mesh, workers, devices, places, stages, layers):
    """The place of the third worker."""
    addresses = tuple(f"localhost:{1000 + number}" for number in range(workers))
    cluster = ClusterInfo("TF_CONFIG", {"worker": addresses}, "worker", 2)
    topology = choose_topology(StrategyConfig(mesh=mesh, devices=devices), cluster)
    assert topology.local_places == places
    assert (topology.pipeline_part, topology.pipeline_workers) == stages
    assert (topology.model_part, topology.model_workers) == layers


def test_a_model_axis_is_reason_enough_for_several_devices():
    topology = choose_topology(StrategyConfig(mesh="model:2"))
    assert (topology.name, topology.replicas, topology.local_devices, topology.model_devices) == ("mirrored", 1, 2, 2)
    assert "1 worker x 2 CPU = 1 replica of 2 devices" in topology.describe()
    plain = choose_topology(StrategyConfig(strategy="mirrored", devices=2))
    assert (plain.replicas, plain.local_devices, plain.model_devices) == (2, 2, 1)
    with pytest.raises(ConfigError, match="1 worker x 1 device = 1"):
        choose_topology(StrategyConfig(strategy="one_device", mesh="model:2"))


def test_options_that_replicas_of_several_devices_do_not_go_with():
    config = ExperimentConfig.from_flat_dict({"mesh": "model:2", "exchange_retune_every": 5})
    check_beside_mesh(config, Mesh(data=2))
    for mesh in (Mesh(model=2), Mesh(pipeline=2)):
        with pytest.raises(ConfigError, match="--exchange_retune_every=5 does not work yet with --mesh=model:2"):
            check_beside_mesh(config, mesh)


def test_which_state_is_sharded_beside_which_axis():
    for shard in ("optimizer", "gradients", "weights"):
        config = ExperimentConfig.from_flat_dict({"shard": shard})
        check_beside_mesh(config, Mesh(data=2, model=2))
        for mesh in (Mesh(data=2, pipeline=2), Mesh(data=2, pipeline=2, model=2)):
            if shard != "weights":
                check_beside_mesh(config, mesh)
                continue
            with pytest.raises(ConfigError, match=r"--shard=weights does not work with .* Use --shard=gradients"):
                check_beside_mesh(config, mesh)


def test_pipelines_have_options_of_their_own():
    for option in ({"stages": "block2"}, {"stages_per_device": 2}):
        config = ExperimentConfig.from_flat_dict(option)
        check_beside_mesh(config, Mesh(pipeline=2))
        with pytest.raises(ConfigError, match=f"--{next(iter(option))}=.* is for pipelines"):
            check_beside_mesh(config, Mesh(model=2))
