"""Pipelines on real workers, each of which holds a replica: the weights of one device, the bytes, resumed."""

from __future__ import annotations

import pathlib
from typing import Any

from tests.integration.scripts import divided
from tests.integration.test_tensor_parallel import (
    assert_close,
    assert_goes_on_to_the_same_bits,
    assert_near,
    on_workers,
)
from tests.training.test_tensor_parallel import alone
from tfpar.checkpoint.run_state import params_sha256

import keras
import numpy as np
import pytest

pytestmark = pytest.mark.cluster
MESH = {"mesh": "data:2,pipeline:2", "devices": 2, "accumulate_steps": 2}
PIPELINED = ("stages_per_device", "pipeline_schedule")


def test_two_workers_of_two_stages(tmp_path):
    """They equal one device; with int4, each stage's gradients travel from its own device, and the run stays near one
    device. Sharded gradients travel after every micro-batch."""
    cases = {"exchange": "int4:min_elements=64"}, {"shard": "gradients"}
    dense, encoded, sharded = on_workers(2, tmp_path / "out", MESH, *({**MESH, **case} for case in cases))
    expected = alone("dense", accumulate_steps=2)[0]
    assert_close(dense, expected)
    assert_near(encoded, expected)
    assert int(encoded["sent"]) < int(dense["sent"]) / 2
    assert_close(sharded, expected)
    assert int(sharded["sent"]) == pytest.approx(1.5 * int(dense["sent"]), rel=0.01)  # (A + 1) / 2
    assert_has_shares_of_sums(sharded, expected)


def assert_has_shares_of_sums(found: dict[str, np.ndarray], weights: dict[str, np.ndarray]) -> None:
    """All workers together have the sum of a weight's gradients once."""
    assert int(found["sums"]) == pytest.approx(4 * sum(value.size for value in weights.values()), rel=0.01)


@pytest.mark.proof
@pytest.mark.parametrize("shard", ["none", "gradients"])
def test_two_workers_of_two_stages_go_on_to_the_same_bits(tmp_path, shard):
    assert_goes_on_to_the_same_bits(tmp_path, {**MESH, "shard": shard})


@pytest.mark.proof
def test_three_axes(tmp_path):
    """Two workers, each with a pipeline of two stages whose layers are divided over two devices."""
    mesh = {"mesh": "data:2,pipeline:2,model:2", "devices": 4, "accumulate_steps": 2}
    dense, encoded = on_workers(2, tmp_path / "out", mesh, {**mesh, "exchange": "int4:min_elements=64"})
    expected = alone("dense", accumulate_steps=2)[0]
    assert_close(dense, expected)
    assert_near(encoded, expected)
    assert int(encoded["sent"]) < int(dense["sent"]) / 2


def assert_goes_on_alone(workdir: pathlib.Path, found: dict[str, np.ndarray], options: dict[str, Any]) -> None:
    """What workers have saved is the whole model, and continues on one device."""
    loaded = keras.saving.load_model(workdir / "model.keras")
    assert params_sha256(loaded.trainable_variables) == str(found["params_sha256"])
    further = divided.here("one_device", workdir=str(workdir), steps=divided.STEPS + 1, **options)
    assert further.results["steps"] == divided.STEPS + 1


def test_two_workers_hold_a_pipeline_between_them(tmp_path):
    """Each has the weights of its stages; both agree on the whole: in digests, checkpoints, predictions. A run that was
    stopped goes on to the end of one that was not, and further on one device."""
    saved = {"mesh": "data:1,pipeline:2", "accumulate_steps": 2, "workdir": str(tmp_path / "run")}
    _, found = on_workers(2, tmp_path / "out", {**saved, "stop_after": 11}, {**saved, "predicts": True})
    weights, _, (predictions,) = alone("dense", accumulate_steps=2)
    assert_close(found, {**weights, "predictions": predictions})
    saved_files = {path.name for path in (tmp_path / "run").glob("checkpoints/*/state-*")}
    assert saved_files == {f"state-0000{part}-of-00002.safetensors" for part in (1, 2)}
    assert_goes_on_alone(tmp_path / "run", found, {"accumulate_steps": 2})


@pytest.mark.proof
def test_a_pipeline_between_two_workers_goes_on_to_the_same_bits(tmp_path):
    assert_goes_on_to_the_same_bits(tmp_path, {"mesh": "data:1,pipeline:2", "accumulate_steps": 2})


@pytest.mark.proof
def test_weights_of_both_stages_masks_and_shortcuts_cross_workers(tmp_path):
    """Over TensorFlow's transport; the other tests take the native one, where it is built."""
    mesh = {"mesh": "data:1,pipeline:2", "steps": 6, "transport": "tensorflow"}
    tied = {"model": "language_model", "accumulate_steps": 2}
    recurrent = {"model": "recurrent", "accumulate_steps": 1}
    compiled = {**tied, "jit_compile": "auto", "optimizer": "adamw", "steps": 30}  # each worker a program of its own
    first, second, third = on_workers(
        2, tmp_path / "out", {**mesh, **tied, "pipeline_schedule": "gpipe"}, {**mesh, **recurrent}, {**mesh, **compiled}
    )
    assert_close(first, alone(**tied, steps=6)[0])
    assert all(any(name.startswith("own ") for name in found) for found in (first, third))
    assert third["compiles_update"]
    assert_close(second, alone(**recurrent, steps=6)[0])


def test_layers_of_both_stages_are_as_on_one_device(tmp_path):
    """Penalties of their weights count once, and of a weight that a worker does not have, nothing. A dropout goes on to
    draw where its calls on the other worker have ended. Weights that the loss does not reach do not decay."""
    models = {"penalized": {}, "dropouts": {}, "unread": {"optimizer": "adamw"}}
    cases = [{"model": model, "steps": 6, "accumulate_steps": 2, **options} for model, options in models.items()]
    results = on_workers(2, tmp_path / "out", *({"mesh": "data:1,pipeline:2", **case} for case in cases))
    for found, case in zip(results, cases, strict=True):
        weights, evaluation, _ = alone(**case)
        assert_close(found, {**weights, "eval loss": np.array(evaluation["loss"])})


def test_stages_leave_out_the_same_steps(tmp_path):
    """The last worker alone has the loss, which overflows in one of the steps."""
    options = {"model": "overflowing", "accumulate_steps": 2, "steps": 6}
    (found,) = on_workers(2, tmp_path / "out", {"mesh": "data:1,pipeline:2", **options})
    expected = divided.here(**options)
    assert 0 < expected.results["skipped_steps"] < 6
    assert_close(found, divided.weights_of(expected))


def test_four_workers_hold_a_pipeline(tmp_path):
    """State in every stage, shortcuts past stages, losses of layers, a layer on two workers, several outputs whose
    losses are divided by different numbers."""
    mesh = {"mesh": "data:1,pipeline:4", "steps": 10}
    resnet = {"model": "resnet", "learning_rate": 0.03, "accumulate_steps": 1}
    branches = {"model": "ignoring", "accumulate_steps": 4}
    state, shortcuts = on_workers(4, tmp_path / "out", {**mesh, **resnet}, {**mesh, **branches})
    assert_close(state, alone(**resnet, steps=10)[0])
    assert_close(shortcuts, alone(**branches, steps=10)[0])


def assert_two_pipelines(folder: pathlib.Path, *, workers: int = 4, **options: Any) -> None:
    """Stages exchange with those of the same place; with int4, a run that was stopped goes on to the same bits."""
    mesh = {**options, "accumulate_steps": 2}
    int4 = {**mesh, "exchange": "int4:min_elements=64"}
    saved = {**int4, "workdir": str(folder / "run")}
    dense, encoded, _, resumed = on_workers(workers, folder / "out", mesh, int4, {**saved, "stop_after": 11}, saved)
    expected = alone("dense", accumulate_steps=2)[0]
    assert_close(dense, expected)
    for name, value in encoded.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)
    assert_near(encoded, expected)
    assert int(encoded["sent"]) < int(dense["sent"]) / 2


def test_four_workers_hold_two_pipelines(tmp_path):
    assert_two_pipelines(tmp_path, mesh="data:2,pipeline:2")


@pytest.mark.proof
@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (2, {"mesh": "data:4,pipeline:2", "devices": 4}),  # two replicas on each
        (2, {"mesh": "data:2,pipeline:2,model:2", "devices": 4}),
        (2, {"mesh": "data:1,pipeline:2"}),  # one replica has nothing to sum
        (4, {"mesh": "data:2,pipeline:2", "transport": "gloo"}),
        (4, {"mesh": "data:2,pipeline:2", "transport": "tensorflow"}),
        (8, {"mesh": "data:2,pipeline:2,model:2"}),
    ],
    ids=str,
)
def test_workers_synchronise_batch_statistics(tmp_path, workers, options):
    """30 steps each; also with stages in turn, where workers have a stage or a part of it."""
    resnet = {"model": "synchronised_resnet", "learning_rate": 0.03}
    cases = [{**resnet, "accumulate_steps": 4}, {"model": "synchronised", "accumulate_steps": 2}]
    if options["mesh"] == "data:2,pipeline:2":
        cases.append({**resnet, "accumulate_steps": 2, "stages_per_device": 2, "pipeline_schedule": "eager_1f1b"})
    results = on_workers(workers, tmp_path / "out", *({**options, **case} for case in cases))
    for found, case in zip(results, cases, strict=True):
        assert_close(found, alone(**{name: case[name] for name in case if name not in PIPELINED})[0])


def test_three_workers_share_two_layers_in_pairs(tmp_path):
    """The one in the middle talks of a layer to each of the others, and they of one each."""
    options = {"model": "shared_in_pairs", "accumulate_steps": 2, "steps": 3}
    (found,) = on_workers(3, tmp_path / "out", {**options, "mesh": "pipeline:3", "stages": "second,third"})
    assert_close(found, alone(**options)[0])


@pytest.mark.proof
def test_the_stages_that_have_a_layer_round_it_alike(tmp_path):
    """`on_workers` compares their copies, also with the stochastic rounding of a codec."""
    options = {"mesh": "data:2,pipeline:2", "accumulate_steps": 2, "model": "shared_layer", "steps": 6}
    codec = {"exchange": "int8:rounding=stochastic,min_elements=64", "shard": "optimizer"}
    scattering = {**codec, "shard": "gradients"}
    dense, *encoded = on_workers(4, tmp_path / "out", options, {**options, **codec}, {**options, **scattering})
    for found in encoded:
        assert any(name.startswith("own shared") for name in found)
        assert_near(found, {name: value for name, value in dense.items() if name.startswith("own shared")})


def test_two_workers_divide_the_layers_of_their_stages(tmp_path):
    """Each has a stage, and two devices that divide its layers; both know the whole: in digests, checkpoints,
    predictions. A divided tensor crosses the cut, then a whole one, of which each device sends a part. A run that was
    stopped goes on to the end of one that was not, and further on one device."""
    options = {"accumulate_steps": 2, "clip_norm": 0.5}
    saved = {"mesh": "pipeline:2,model:2", "devices": 2, **options, "workdir": str(tmp_path / "run")}
    of_whole = {**saved, "stages": "/norm", "predicts": True}
    stopped, found = on_workers(2, tmp_path / "out", {**saved, "stop_after": 11}, of_whole)
    # 16 examples, forward and back, and 16 of an evaluation: a tensor of 128 divided values, then one of 24 whole ones.
    assert (int(stopped["messages"]), int(found["messages"])) == (48 * 128 * 4, 48 * 24 * 4)
    weights, _, (predictions,) = alone("dense", **options)
    assert_close(found, {**weights, "predictions": predictions})
    assert_goes_on_alone(tmp_path / "run", found, options)


def assert_several_models_divided(folder: pathlib.Path, workers: int, mesh: dict[str, Any], transport: str) -> None:
    """A tied table that all divide, attention, batch statistics, computed again; stages in turn."""
    cases = {
        "large_vocabulary": {},
        "attention": {"pipeline_schedule": "eager_1f1b"},
        "batch_statistics": {"pipeline_schedule": "gpipe"},
        "vit": {"recompute": "blocks"},
        "language_model": {"stages_per_device": 2},
        "ignoring": {},
    }
    common = {**mesh, "accumulate_steps": 2, "steps": 10, "transport": transport}
    options = ({**common, "model": model, **how} for model, how in cases.items())
    found = on_workers(workers, folder / "out", *options)
    for model, weights in zip(cases, found, strict=True):
        assert_close(weights, alone(model, steps=10, accumulate_steps=2)[0])


@pytest.mark.proof
@pytest.mark.parametrize("transport", ["gloo", "tensorflow"])
def test_two_workers_divide_the_layers_of_several_models(tmp_path, transport):
    mesh = {"mesh": "pipeline:2,model:2", "devices": 2}
    assert_several_models_divided(tmp_path, 2, mesh, transport)


def test_four_workers_divide_the_layers_of_two_stages(tmp_path):
    """Each has a part of the layers of a stage; all know the whole: in digests, checkpoints, predictions. Half of a
    whole tensor crosses the cut from each worker. What they have saved goes on on one device."""
    mesh, options = {"mesh": "data:1,pipeline:2,model:2"}, {"accumulate_steps": 2, "clip_norm": 0.5}
    whole = {**options, "workdir": str(tmp_path / "run"), "stages": "/norm", "predicts": True}
    [found] = on_workers(4, tmp_path / "out", {**mesh, **whole})
    assert int(found["messages"]) == 48 * 24 * 4
    weights, _, (predictions,) = alone("dense", **options)
    assert_close(found, {**weights, "predictions": predictions})
    assert_goes_on_alone(tmp_path / "run", found, options)


@pytest.mark.proof
def test_four_workers_that_divide_two_stages_go_on_where_they_stopped(tmp_path):
    options = {"accumulate_steps": 2, "clip_norm": 0.5}
    mesh, tied = {"mesh": "data:1,pipeline:2,model:2"}, {"model": "tied", "accumulate_steps": 2, "steps": 6}
    run = {**mesh, **options, "workdir": str(tmp_path / "run")}
    _, found, of_both = on_workers(4, tmp_path / "out", {**run, "stop_after": 11}, run, {**mesh, **tied})
    assert_close(found, alone("dense", **options)[0])
    assert_close(of_both, alone(**tied)[0])


@pytest.mark.proof
@pytest.mark.parametrize("transport", ["gloo", "tensorflow"])
def test_four_workers_divide_the_layers_of_several_models(tmp_path, transport):
    mesh = {"mesh": "data:1,pipeline:2,model:2"}
    assert_several_models_divided(tmp_path, 4, mesh, transport)


@pytest.mark.proof
def test_a_run_goes_on_on_other_meshes_of_four_workers(tmp_path):
    """Without a lossy exchange, whose residuals belong to a mesh."""
    meshes = ("pipeline:2,model:2", "model:4", "pipeline:4", "pipeline:2,model:2")
    options = {"accumulate_steps": 2, "workdir": str(tmp_path / "run")}
    for number, mesh in enumerate(meshes):
        stop = {"stop_after": 7 * (number + 1)} if number < len(meshes) - 1 else {}
        [found] = on_workers(4, tmp_path / f"out{number}", {"mesh": f"data:1,{mesh}", **options, **stop})
    assert_close(found, alone("dense", accumulate_steps=2)[0])


@pytest.mark.proof
def test_residuals_are_of_one_mesh(tmp_path):
    """Eight workers, where both meshes have replicas of four workers with two devices' worth of parts each."""
    int4 = {"exchange": "int4:min_elements=64", "workdir": str(tmp_path / "run")}
    on_workers(8, tmp_path / "out", {"mesh": "data:2,pipeline:2,model:2", **int4, "stop_after": 11})
    with pytest.raises(AssertionError, match="replicas on other workers, and its residuals belong to their parts"):
        on_workers(8, tmp_path / "again", {"mesh": "data:2,model:4", **int4})


@pytest.mark.proof
def test_four_workers_of_two_devices_divide_the_layers_of_two_stages(tmp_path):
    mesh = {"mesh": "pipeline:2,model:4", "devices": 2, "accumulate_steps": 2}
    dense, tied = on_workers(4, tmp_path / "out", mesh, {**mesh, "model": "large_vocabulary", "steps": 6})
    assert_close(dense, alone("dense", accumulate_steps=2)[0])
    assert_close(tied, alone("large_vocabulary", accumulate_steps=2, steps=6)[0])


@pytest.mark.proof
def test_eight_workers_have_a_device_each_of_three_axes(tmp_path):
    """Two replicas of two stages, each divided by two workers; with int4, a run goes on to the same bits."""
    assert_two_pipelines(tmp_path, workers=8, mesh="data:2,pipeline:2,model:2")


@pytest.mark.proof
def test_three_axes_over_four_workers(tmp_path):
    assert_two_pipelines(tmp_path, mesh="data:2,pipeline:2,model:2", devices=2)


@pytest.mark.proof
def test_a_worker_may_have_nothing_to_train(tmp_path):
    """All layers of the first stage are frozen; with a codec, and where devices divide the layers."""
    options = {"trainable": "/(fourth|last)/", "accumulate_steps": 2, "steps": 6}
    dense, encoded = on_workers(
        4,
        tmp_path / "out",
        {**options, "mesh": "data:2,pipeline:2"},
        {**options, "mesh": "data:2,pipeline:2", "exchange": "int4:min_elements=64"},
    )
    [divided] = on_workers(2, tmp_path / "divided", {**options, "mesh": "pipeline:2,model:2", "devices": 2})
    expected = alone("dense", **options)[0]
    assert_close(dense, expected)
    assert_near(encoded, expected)
    assert_close(divided, expected)


@pytest.mark.proof
def test_statistics_that_two_workers_would_change_are_refused(tmp_path):
    with pytest.raises(AssertionError, match="stages of several workers call the layer of 'shared/moving_mean'"):
        on_workers(2, tmp_path / "out", {"mesh": "data:1,pipeline:2", "model": "shared_statistics", "steps": 2})


@pytest.mark.proof
def test_a_mask_that_depends_on_weights_of_another_worker_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="at least one of which depends on weights"):
        on_workers(2, tmp_path / "out", {"mesh": "data:1,pipeline:2", "model": "own_mask", "steps": 2})


@pytest.mark.proof
def test_two_workers_of_two_stages_each_hold_a_pipeline(tmp_path):
    mesh = {"mesh": "pipeline:4", "devices": 2, "accumulate_steps": 2, "predicts": True}
    vit = {**mesh, "model": "vit", "steps": 10, "pipeline_schedule": "gpipe"}
    dense, images = on_workers(2, tmp_path / "out", mesh, vit)
    weights, _, (predictions,) = alone("dense", accumulate_steps=2)
    assert_close(dense, {**weights, "predictions": predictions})
    assert_close(images, alone("vit", steps=10, accumulate_steps=2)[0])


def test_two_workers_have_two_stages_each_in_turn(tmp_path):
    """Interleaved. A tied table is on both workers, and the first has a gradient for a few of its rows only. Three
    micro-batches are no multiple of two workers."""
    mesh = {"mesh": "data:1,pipeline:2", "stages_per_device": 2, "steps": 6}
    tied = {"model": "large_vocabulary", "accumulate_steps": 3}
    (interleaved,) = on_workers(2, tmp_path / "out", {**mesh, **tied, "predicts": True})
    weights, _, (predictions,) = alone(**tied, steps=6)
    assert_close(interleaved, {**weights, "predictions": predictions})


@pytest.mark.proof
def test_stages_in_turn_over_the_transport_of_tensorflow(tmp_path):
    """Also with batch statistics, and with activations that are computed again."""
    mesh = {"mesh": "data:1,pipeline:2", "stages_per_device": 2, "steps": 10, "transport": "tensorflow"}
    tied = {"model": "large_vocabulary", "accumulate_steps": 3}
    resnet = {"model": "resnet", "learning_rate": 0.03, "accumulate_steps": 2, "recompute": "blocks"}
    cases = [tied, resnet, {"model": "branches", "accumulate_steps": 4}]
    for case, found in zip(cases, on_workers(2, tmp_path / "out", *({**mesh, **case} for case in cases)), strict=True):
        assert_close(found, alone(**case, steps=10)[0])
