"""What a client and a server over Flower make of each other's arrays; `test_flower.py` sends them."""

from __future__ import annotations

import types

from tests.outer.federated.flower_app import federation
from tfpar.config import ConfigError
from tfpar.outer.federated import FederatedTrainer, flower, partition

import keras
import numpy as np
import pytest


def reply(arrays: list[np.ndarray], figures: dict[str, float]) -> types.SimpleNamespace:
    held = types.SimpleNamespace(to_numpy_ndarrays=lambda: arrays)
    return types.SimpleNamespace(content={"arrays": held, "metrics": figures})


def test_each_node_of_a_process_has_a_client_of_its_own():
    made = []

    def training() -> flower._Training:
        made.append(flower._Training(flower._trainer(federation.build, federation.LOSS, dict(federation.OPTIONS))))
        return made[-1]

    nodes = [types.SimpleNamespace(node_config={"partition-id": place}, node_id=100 + place) for place in (0, 1, 0)]
    clients = flower._Clients(training, federation.of_node)
    found = [clients.of(node) for node in nodes]
    assert [number for number, _ in found] == [0, 1, 0]
    assert found[0][1] is found[2][1]
    for (_, client), node in zip(found[:2], nodes[:2], strict=True):
        np.testing.assert_array_equal(client._examples[0].numpy(), federation.of_node(node)[0])
    assert len(made) == 1


@pytest.mark.parametrize("options", [{"averaging": "scaffold"}, {"noise_multiplier": 1.0, "client_clip": 1.0}])
def test_what_does_not_work_over_flower_is_refused(options):
    with pytest.raises(ConfigError, match="does not work over Flower"):
        flower._trainer(with_statistics, "mse", options)


def with_statistics() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)])


@pytest.mark.parametrize(
    ("place", "figures"),
    [(0, {}), (-1, {}), (None, {"loss": np.nan}), (None, {"num-examples": np.nan}), (None, {"num-examples": 0})],
)
def test_a_reply_that_is_not_finite_counts_as_dropped(place, figures):
    server = flower._Server(flower._trainer(with_statistics, "mse", {"clients": 2, "clients_per_round": 2}))
    model = server._trainer.model
    state = [model.non_trainable_variables[index] for index in flower.averaged_state(model)]
    before = [weight.copy() for weight in model.get_weights()]
    arrays = [np.zeros(variable.shape, np.float32) for variable in [*model.trainable_variables, *state]]
    if place is not None:
        arrays[place][...] = np.nan
    server._apply([reply(arrays, {"num-examples": 5, "loss": 1.0, **figures})], 0)
    assert (server._counts["clients_trained"], server._counts["clients_dropped"]) == (0, 1)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def with_statistics_of_batches() -> keras.Model:
    """Short batches of a client are filled for it."""
    return keras.Sequential([keras.Input([12]), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(5)])


@pytest.mark.parametrize("build", [federation.build, with_statistics_of_batches])
def test_arrays_are_payloads_and_lead_to_the_weights_of_a_simulation(build):
    def trainer() -> FederatedTrainer:
        return flower._trainer(build, federation.LOSS, dict(federation.OPTIONS))

    x, y = federation.examples()
    server = flower._Server(trainer())
    training = flower._Training(trainer())
    clients = [flower._Client(training, x[part], y[part]) for part in partition.by_class(y, 2, 3, 4)]
    for number in range(server.options.rounds):
        model = server._trainer.model
        state = [model.non_trainable_variables[index] for index in flower.averaged_state(model)]
        weights = [np.asarray(weight) for weight in [*model.trainable_variables, *state]]
        replies = []
        for place, client in enumerate(clients):
            config = {"round": number, "learning_rate": 0.1}
            arrays, residual, figures = client.round(weights, config, place, None)
            assert residual is None
            if build is federation.build:
                assert [array.dtype for array in arrays] == [np.int32, np.float32, np.int32, np.float32]
            replies.append(reply(arrays, figures))
        server._apply(replies, number)
    here = FederatedTrainer(build, federation.LOSS, **federation.OPTIONS, partition="by_class:3", verbose=0)
    here.fit(x, y)
    for one, other in zip(server._trainer.model.get_weights(), here.model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
