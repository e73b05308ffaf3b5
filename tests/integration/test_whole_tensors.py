"""Optimizers that need whole tensors, of weights whose parts or stages are on several workers."""

from __future__ import annotations

from typing import Any

from tests.integration.test_pipeline import assert_goes_on_alone
from tests.integration.test_tensor_parallel import assert_close, on_workers
from tests.training.test_tensor_parallel import alone

import numpy as np
import pytest

pytestmark = pytest.mark.cluster
WHOLE = {"steps": 9, "accumulate_steps": 2, "learning_rate": 0.02}
OPTIMIZERS = ("muon", "lamb", "lars", "adafactor")


def expected_of(model: str, optimizer: str) -> dict[str, np.ndarray]:
    """The weights of one device. Of Adafactor without keys' biases: it makes steps of full size of their gradients too,
    which are zero but for rounding."""
    weights = alone(model, **WHOLE, optimizer=optimizer)[0]
    return {name: value for name, value in weights.items() if optimizer != "adafactor" or "qkv/bias" not in name}


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adafactor", marks=pytest.mark.proof)])
def test_stages_on_two_workers(optimizer, tmp_path):
    """A worker has no elements of the other's weights, and its optimizer treats a matrix as one all the same. A run
    that was stopped goes on to the bits of one that was not, and further on one device."""
    mesh = {"mesh": "data:1,pipeline:2", **WHOLE, "optimizer": optimizer}
    saved = {**mesh, "workdir": str(tmp_path / "run")}
    through, _, found = on_workers(2, tmp_path / "out", mesh, {**saved, "stop_after": 7}, saved)
    assert_close(found, expected_of("dense", optimizer))
    for name, value in through.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    alike = {name: value for name, value in {**WHOLE, "optimizer": optimizer}.items() if name != "steps"}
    assert_goes_on_alone(tmp_path / "run", found, alike)


@pytest.mark.proof
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (2, {"mesh": "data:1,pipeline:2"}),
        (2, {"mesh": "data:1,pipeline:2,model:2", "devices": 2}),
        (4, {"mesh": "data:1,pipeline:2,model:2"}),
        (4, {"mesh": "data:2,pipeline:2,model:2", "devices": 2}),
        (4, {"mesh": "data:2,pipeline:2"}),
    ],
    ids=str,
)
def test_stages_whose_layers_are_divided(tmp_path, workers: int, options: dict[str, Any], optimizer: str):
    case = {**options, **WHOLE, "optimizer": optimizer}
    dense, language_model = on_workers(workers, tmp_path / "out", case, {**case, "model": "language_model"})
    assert_close(dense, expected_of("dense", optimizer))
    assert_close(language_model, expected_of("language_model", optimizer))


@pytest.mark.proof
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (2, {"mesh": "data:2,model:2", "devices": 2}),
        (4, {"mesh": "data:2,model:2"}),
        (4, {"mesh": "data:2,pipeline:2,model:2", "devices": 2}),
    ],
    ids=str,
)
def test_owners_of_shards_whose_layers_are_divided(
    tmp_path, workers: int, options: dict[str, Any], shard: str, optimizer: str
):
    """A run that was stopped goes on to the bits of one that was not, and further on one device."""
    case = {**options, **WHOLE, "optimizer": optimizer, "shard": shard}
    saved = {**case, "workdir": str(tmp_path / "run")}
    through, _, found, language_model = on_workers(
        workers, tmp_path / "out", case, {**saved, "stop_after": 7}, saved, {**case, "model": "language_model"}
    )
    assert_close(found, expected_of("dense", optimizer))
    assert_close(language_model, expected_of("language_model", optimizer))
    for name, value in through.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    alike = {name: value for name, value in {**WHOLE, "optimizer": optimizer}.items() if name != "steps"}
    assert_goes_on_alone(tmp_path / "run", found, alike)


@pytest.mark.parametrize(
    "optimizer", ["muon", *(pytest.param(each, marks=pytest.mark.proof) for each in OPTIMIZERS[1:])]
)
@pytest.mark.parametrize(
    ("workers", "devices"), [(2, 1), *(pytest.param(*each, marks=pytest.mark.proof) for each in ((2, 2), (3, 1)))]
)
def test_replicas_that_share_the_weights(tmp_path, workers: int, devices: int, optimizer: str):
    """A run that was stopped goes on to the bits of one that was not, and further on one device."""
    case = {
        "mesh": f"data:{workers * devices}",
        "devices": devices,
        **WHOLE,
        "optimizer": optimizer,
        "shard": "weights",
    }
    saved = {**case, "workdir": str(tmp_path / "run")}
    through, _, found = on_workers(workers, tmp_path / "out", case, {**saved, "stop_after": 7}, saved)
    assert_close(found, expected_of("dense", optimizer))
    for name, value in through.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    alike = {name: value for name, value in {**WHOLE, "optimizer": optimizer}.items() if name != "steps"}
    assert_goes_on_alone(tmp_path / "run", found, alike)
