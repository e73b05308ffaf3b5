"""Every kind of model on every way to divide it: weights, results and predictions of one device after 30 steps.

What other tests beside it show is left out: tests/training/test_tensor_parallel.py, test_pipeline.py. Batches are
uneven. Between workers: tests/integration/test_tensor_parallel.py, test_pipeline.py, test_sharded.py.
"""

from __future__ import annotations

from typing import Any

from tests.integration.scripts import divided, divided_models
from tests.training.test_tensor_parallel import assert_as_alone
from tfpar.parallel.weight_shards import can_be_sharded

import pytest

pytestmark = pytest.mark.proof
AGAIN = {"recompute": "blocks"}
TWICE = {"accumulate_steps": 2}
CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("dense", "model:4", 4, TWICE),
    ("dense", "data:2,model:2", 4, {**TWICE, "recompute": "first|third"}),
    ("language_model", "model:2", 2, {**TWICE, **AGAIN}),
    ("language_model", "model:4", 4, AGAIN),
    ("language_model", "data:2,model:2", 4, {**TWICE, **AGAIN}),
    ("language_model", "pipeline:2", 2, {"accumulate_steps": 4, **AGAIN}),
    ("language_model", "data:2,pipeline:2", 4, TWICE),
    ("language_model", "pipeline:4", 4, {**TWICE, "stage_balance": "weights"}),
    ("vit", "model:2", 2, {**TWICE, **AGAIN}),
    ("vit", "data:2,model:2", 4, {}),
    ("vit", "pipeline:4", 4, TWICE),
    ("vit", "data:2,pipeline:2", 4, TWICE),
    ("vit", "pipeline:2,model:2", 4, TWICE),
    ("resnet", "pipeline:2", 2, {**TWICE, "learning_rate": 0.03}),
    ("resnet", "pipeline:4", 4, {**TWICE, "learning_rate": 0.03}),
    ("recurrent", "pipeline:4", 4, TWICE),
    ("recurrent", "data:2,pipeline:2", 4, TWICE),
    *((model, f"pipeline:{size}", size, TWICE) for model in ("gpt2", "grouped_query") for size in (2, 4)),
    *((model, "data:2,pipeline:2", 4, TWICE) for model in ("gpt2", "grouped_query")),
    *((model, "pipeline:2,model:2", 4, TWICE) for model in ("gpt2", "grouped_query")),
]
SAME = ("accumulate_steps", "learning_rate")  # of one device


@pytest.mark.parametrize(("model", "mesh", "devices", "options"), CASES)
def test_meshes_equal_one_device(model, mesh, devices, options):
    trainer = divided.here("mirrored", mesh, devices, model=model, **options)
    assert_as_alone(trainer, model, **{name: value for name, value in options.items() if name in SAME})


@pytest.mark.parametrize("model", ["dense", "language_model", "vit", "recurrent", "gpt2", "grouped_query"])
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("shard", ["optimizer", "gradients", "weights"])
def test_shards_equal_one_device(model, devices, shard):
    """With micro-batches; blocks are computed again where there are such."""
    if shard == "weights":
        assert any(can_be_sharded(variable) for variable in divided_models.MODELS[model]().trainable_variables)
    options = {"recompute": "blocks"} if model in ("language_model", "vit") and shard != "weights" else {}
    trainer = divided.here("mirrored", "", devices, model=model, shard=shard, accumulate_steps=2, **options)
    assert_as_alone(trainer, model, accumulate_steps=2)
