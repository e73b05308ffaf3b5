"""What a client and a server over Flower make of each other's arrays; `test_flower.py` sends them."""

from __future__ import annotations

import types

from tests.outer.federated.flower_app import federation
from tfpar.outer.federated import FederatedTrainer, flower, partition

import numpy as np


def test_arrays_are_payloads_and_lead_to_the_weights_of_a_simulation():
    def trainer() -> FederatedTrainer:
        return flower._trainer(federation.build, federation.LOSS, dict(federation.OPTIONS))

    x, y = federation.examples()
    server = flower._Server(trainer())
    clients = [flower._Client(trainer(), x[part], y[part]) for part in partition.by_class(y, 2, 3, 4)]
    for number in range(server.options.rounds):
        weights = [np.asarray(weight) for weight in server._trainer.model.trainable_variables]
        replies = []
        for place, client in enumerate(clients):
            config = {"round": number, "learning_rate": 0.1}
            arrays, residual, figures = client.round(weights, config, place, None)
            assert residual is None
            assert [array.dtype for array in arrays] == [np.int32, np.float32, np.int32, np.float32]
            held = types.SimpleNamespace(to_numpy_ndarrays=lambda arrays=arrays: arrays)
            replies.append(types.SimpleNamespace(content={"arrays": held, "metrics": figures}))
        server._apply(replies, number)
    here = FederatedTrainer(federation.build, federation.LOSS, **federation.OPTIONS, partition="by_class:3", verbose=0)
    here.fit(x, y)
    for one, other in zip(server._trainer.model.get_weights(), here.model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
