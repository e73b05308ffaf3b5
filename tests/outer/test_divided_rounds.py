"""Local steps of replicas whose devices divide weights, in one process: the weights of whole replicas."""

from __future__ import annotations

import functools
import json

from tests.integration.scripts import divided
from tests.outer.test_rounds import ALONE
from tfpar.cluster import detect
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.outer.local import Rounds
from tfpar.parallel.split import copies_of, split_of, whole
from tfpar.parallel.topology import Topology, choose_topology
from tfpar.training.local_steps.check import check_local_steps

import numpy as np
import pytest

ROUNDS = {"local_steps": 5, "outer_optimizer": "sgd"}


@functools.cache
def weights_of_whole_replicas(model: str, **options) -> dict[str, np.ndarray]:
    return divided.weights_of(divided.here(model=model, **options))


@pytest.mark.grappler  # two elements of 768 differ by 5e-4 without it
@pytest.mark.parametrize(
    ("mesh", "devices", "model"),
    [
        ("model:2", 2, "dense"),
        ("pipeline:2", 2, "dense"),
        ("data:2,model:2", 4, "dense"),
        ("pipeline:2,model:2", 4, "dense"),
        ("data:2,pipeline:2", 4, "shared_layer"),
        ("data:2,model:2", 4, "language_model"),  # by SGD, which sees the scale of a clipped gradient
    ],
)
def test_weights_of_whole_replicas(mesh, devices, model):
    """Clipped, with micro-batches."""
    options = {"accumulate_steps": 2, "steps": 14, **ROUNDS}
    if model == "dense":  # by AdamW, which with a smaller epsilon makes steps of gradients that are rounding
        options["optimizer_args"] = "epsilon=1e-5"
    found = divided.here("mirrored", mesh, devices, model=model, **options)
    expected = weights_of_whole_replicas(model, **options)
    for name, value in divided.weights_of(found).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert found.results["rounds"] == 3


@pytest.mark.parametrize(
    ("mesh", "devices", "model"),
    [("data:2,model:2", 4, "dense"), ("data:2,pipeline:2", 4, "shared_layer")],
)
def test_fragments_of_divided_weights(mesh, devices, model):
    """With a delay, an outer optimizer, and a share of the worker's own weights."""
    options = {"local_steps": 4, "outer_fragments": 2, "outer_delay": 1, "outer_own_share": 0.3, "steps": 14}
    found = divided.here("mirrored", mesh, devices, model=model, **options)
    expected = weights_of_whole_replicas(model, **options)
    for name, value in divided.weights_of(found).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert found.results["rounds"] == 4
    assert (found.results["exchange"]["model_axis_bytes_per_step"] > 0) == ("model" in mesh)


def test_a_copy_that_is_not_finite_is_noticed_on_any_device():
    rounds = divided.made_here("mirrored", "model:2", 2, **ROUNDS).program.rounds
    [bias] = [each for each in rounds.model_variables if each.path.endswith("second/bias")]
    assert split_of(bias) is None
    assert np.isfinite(rounds.sets.moved())
    copies_of(bias)[1].assign(np.full(bias.shape, np.nan, np.float32))
    assert not np.isfinite(rounds.sets.moved())


@pytest.mark.parametrize("kind", ["nesterov", "adam"])
def test_outer_weights_are_divided_like_the_model(kind):
    options = {"local_steps": 5, "outer_optimizer": kind, "steps": 14}
    expected = divided.here(**options)
    found = divided.here("mirrored", "model:2", 2, **options)
    for name, value in divided.weights_of(found).items():
        np.testing.assert_allclose(value, divided.weights_of(expected)[name], rtol=1e-4, atol=1e-5, err_msg=name)
    rounds = found.program.rounds
    assert isinstance(rounds, Rounds)
    [kernel] = [each for each in rounds.model_variables if each.path.endswith("first/kernel")]
    place = rounds.model_variables.index(kernel)
    assert split_of(rounds.outer_variables[place]) == split_of(kernel)
    assert split_of(kernel)
    assert any(split_of(slot) for slot in rounds.outer_state)


@pytest.mark.parametrize("mesh", ["data:2,model:2", "data:2,pipeline:2"])
def test_norms_count_every_weight_once(mesh):
    rounds = divided.made_here("mirrored", mesh, 4, **ROUNDS).program.rounds
    weights = rounds.model_variables[: len(rounds.model_variables) - rounds.state_count]
    rounds.start()
    before = [whole(weight) for weight in weights]
    for weight, value in zip(weights, before, strict=True):
        rounds.assign_here(weight, value + 0.5)
    rounds.note(5, np.array([40.0]))
    report = rounds.end(ALONE, 5)
    elements = sum(value.size for value in before)
    assert report.movement == pytest.approx(0.5 * elements**0.5, rel=1e-4)
    assert report.update == pytest.approx(0.5 * elements**0.5, rel=1e-4)
    assert report.drift == pytest.approx(0.0, abs=1e-2)
    for weight, value in zip(weights, before, strict=True):
        np.testing.assert_allclose(whole(weight), value + 0.5, rtol=1e-5, atol=1e-6, err_msg=weight.path)


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_mean_movement_is_applied_to_the_parts(fragments):
    """As after a run of another number of workers."""
    options = {**ROUNDS, "outer_fragments": fragments}
    rounds = divided.made_here("mirrored", "data:2,model:2", 4, **options).program.rounds
    weights = rounds.model_variables[: len(rounds.model_variables) - rounds.state_count]
    generator = np.random.default_rng(0)
    before = [whole(weight) for weight in weights]
    movement = [generator.normal(size=value.shape).astype(np.float32) for value in before]
    rounds.apply(movement, [])
    for weight, old, moved in zip(weights, before, movement, strict=True):
        for replica in range(2 if split_of(weight) else 1):
            np.testing.assert_allclose(whole(weight, replica), old - moved, rtol=1e-6, atol=1e-6, err_msg=weight.path)


def test_fragments_on_a_mesh_of_gpus_are_refused():
    config = ExperimentConfig.from_flat_dict({"mesh": "model:2", "local_steps": 5, "outer_delay": 2})
    topology = Topology(name="mirrored", model_devices=2, device_type="GPU")
    with pytest.raises(ConfigError, match=r"--outer_delay=2 does not work with --mesh=model:2 on GPUs"):
        check_local_steps(config, topology)


def test_workers_with_a_part_of_a_replica_take_steps_together():
    cluster = {"worker": ["127.0.0.1:4001", "127.0.0.1:4002"]}
    info = detect({"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})})
    config = ExperimentConfig.from_flat_dict({"mesh": "model:2", "devices": 1, "round_seconds": 5.0})
    with pytest.raises(ConfigError, match=r"--round_seconds=5 does not work with --mesh=model:2 .* Use --local_steps"):
        check_local_steps(config, choose_topology(config.strategy, info))
