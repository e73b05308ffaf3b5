"""Callbacks that keep and restore the weights of a model whose variables are divided."""

from __future__ import annotations

import functools
from typing import Any

import tfpar
from tests.integration.scripts import divided, divided_models
from tests.training.trainers import BATCH, EXAMPLES, assert_same_bits, everything, source, trainer_of
from tfpar.training.sharding import OwnShare
from tfpar.training.sharding.saved import whole_arrays

import keras
import numpy as np
import pytest

MODEL, WEIGHTS = {"devices": 2, "mesh": "model:2"}, {"devices": 2, "shard": "weights"}
BOTH = {"devices": 4, "mesh": "data:2,model:2", "shard": "weights"}
STAGES = {"devices": 4, "mesh": "pipeline:2,model:2", "accumulate_steps": 2}


def stopped(**options: Any) -> tfpar.Trainer:
    """A run of two epochs that ends with the weights of the first."""
    strategy = "mirrored" if options else "one_device"
    config = tfpar.ExperimentConfig.from_flat_dict({**divided.COMMON, "strategy": strategy, **options})
    runtime = divided.runtime_of(strategy, options.get("mesh", ""), options.get("devices", 0))
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    trainer = tfpar.Trainer(
        divided_models.dense,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        config=config,
        runtime=runtime,
    )
    x, y = divided_models.data("dense")
    stopping = keras.callbacks.EarlyStopping(patience=1, min_delta=100.0, restore_best_weights=True)
    trainer.results = trainer.fit(x, y, epochs=9, validation=(x[:50], y[:50]), callbacks=[stopping])
    assert (stopping.best_epoch, stopping.stopped_epoch) == (0, 1)
    return trainer


@functools.cache
def stopped_alone() -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Weights and evaluation of one device."""
    trainer = stopped()
    return divided.weights_of(trainer), trainer.results["eval"]


@pytest.mark.parametrize(
    "places", [MODEL, WEIGHTS, *(pytest.param(each, marks=pytest.mark.proof) for each in (BOTH, STAGES))]
)
def test_early_stopping_restores_whole_weights(places):
    trainer, (expected, results) = stopped(**places), stopped_alone()
    for path, value in expected.items():
        np.testing.assert_allclose(divided.weights_of(trainer)[path], value, rtol=1e-4, atol=1e-5, err_msg=path)
    assert trainer.results["eval"] == pytest.approx(results, rel=1e-4)


def test_an_interrupted_run_resumes_from_its_last_weights(tmp_path):
    """Not from those that the end of the first start has restored."""
    one, other = ({"workdir": str(tmp_path / name)} for name in ("one", "other"))
    best_first = keras.callbacks.EarlyStopping(patience=9, min_delta=100.0, restore_best_weights=True)
    adam = functools.partial(keras.optimizers.Adam, 0.01)
    interrupted = trainer_of(optimizer=adam(), stop_after=2 * EXAMPLES // BATCH, **one)
    interrupted.fit(source(), epochs=3, validation=source(11, 9), callbacks=[best_first])
    assert best_first.best_epoch == 0
    resumed, uninterrupted = trainer_of(optimizer=adam(), **one), trainer_of(optimizer=adam(), **other)
    resumed.fit(source(), epochs=3)
    uninterrupted.fit(source(), epochs=3)
    assert_same_bits(everything(uninterrupted), everything(resumed))


def test_weights_of_another_shape_are_refused():
    trainer = divided.made_here("mirrored", "model:2", 2)
    listed = trainer.model.get_weights()
    assert [value.shape for value in listed] == [value.shape for value in divided_models.dense().get_weights()]
    with pytest.raises(ValueError, match="has 14 weights, but got 13"):
        trainer.model.set_weights(listed[1:])
    with pytest.raises(ValueError, match=r"first/kernel has shape \(12, 64\), but got \(12, 32\)"):
        trainer.model.set_weights([listed[0][:, :32], *listed[1:]])


# Weights that have the same path


def towers() -> keras.Model:
    """Functional models whose layers have the same names, and so the same paths."""
    inputs, outputs = [], []
    for name in ("left", "middle", "right"):
        one = keras.Input((40,))
        tower = keras.Model(one, keras.layers.Dense(40, name="fc")(one), name=name)
        inputs.append(keras.Input((40,)))
        outputs.append(tower(inputs[-1]))
    return keras.Model(inputs, keras.layers.add(outputs))


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_shares_of_weights_with_one_path_are_told_apart(optimizer):
    """Lamb has whole tensors in a share, of which one replica may own several."""

    def share(replicas: int) -> OwnShare:
        options = {"shard": "optimizer", "global_batch_size": 12, "jit_compile": False}
        made = tfpar.Trainer(towers, optimizer, "mse", strategy="mirrored", devices=replicas, **options)
        return made.program.share

    source, target = share(2), share(3)
    for replica in source.replicas:
        for _, piece, slot in replica.slots():
            slot.assign(np.full(slot.shape, piece.index + 1.0))
    whole = whole_arrays([source.export()], [variable.shape for variable in source.variables])
    assert {index for _, index in whole} == {0, 2, 4}
    assert all((array == index + 1.0).all() for (_, index), array in whole.items())
    slots = {(name.rpartition("/")[2], index): array for (name, index), array in whole.items()}  # without `adam_1`
    target.restore(lambda name, index: slots[name.rpartition("/")[2], index])
    seen = [(piece.index, slot.numpy()) for replica in target.replicas for _, piece, slot in replica.slots()]
    assert len(seen) >= 6
    assert all((value == index + 1.0).all() for index, value in seen)


def test_shares_of_workers_whose_names_have_other_counts_make_a_whole():
    exports = [
        {f"shard/0/0/optimizer/own/dense_kernel_slot_{number}": number * np.arange(4.0) for number in (1, 2)},
        {f"shard/0/4/optimizer/own_1/dense_2_kernel_slot_{number}": number * np.arange(4.0, 6.0) for number in (1, 2)},
    ]
    whole = whole_arrays(exports, [(2, 3)])
    assert [*whole] == [(f"optimizer/own/dense_kernel_slot_{number}", 0) for number in (1, 2)]
    expected = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal([*whole.values()], [expected, 2.0 * expected])
