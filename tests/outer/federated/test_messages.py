"""What a client and a server over Flower make of each other's arrays; `test_flower.py` sends them."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import types

from tests.outer.federated.flower_app import federation
from tfpar.config import ConfigError
from tfpar.config.errors import TrainingError
from tfpar.outer.federated import FederatedTrainer, flower, partition
from tfpar.outer.federated.client_update import averaged_state
from tfpar.outer.federated.flower_server import FlowerServer
from tfpar.outer.federated.trainer import with_options

import keras
import numpy as np
import pytest
import tensorflow as tf


def reply(arrays: list[np.ndarray], figures: dict[str, object], node: int = 7) -> types.SimpleNamespace:
    held = types.SimpleNamespace(to_numpy_ndarrays=lambda: arrays)
    metadata = types.SimpleNamespace(src_node_id=node, reply_to_message_id=str(node))
    content = {"arrays": held, "metrics": figures}
    return types.SimpleNamespace(content=content, metadata=metadata, has_error=lambda: False)


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


@pytest.mark.parametrize("through_config", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"averaging": "scaffold"},
        {"noise_multiplier": 1.0, "client_clip": 1.0},
        {"schedule": "plateau"},
        {"partition": "by_class:2"},
        {"clients": 20},
        {"client_dropout": 0.5},
        {"client_holdout": 0.2},
        {"clients_evaluated": 5},
        {"eval_every": 3},
        {"checkpoint_every": 3},
    ],
)
def test_what_does_not_work_over_flower_is_refused(options, through_config):
    name = next(iter(options))
    if through_config:
        options = {"config": with_options(None, options)}
    with pytest.raises(ConfigError, match=f"--{name}=.* does not work over Flower"):
        flower._trainer(with_statistics, "mse", options)


def with_statistics() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)])


def test_more_nodes_than_the_default_population_need_no_other_option():
    made = flower._trainer(with_statistics, "mse", {"clients_per_round": 150})
    assert FlowerServer(made).options.clients_per_round == 150


def server_and_arrays() -> tuple[FlowerServer, list[np.ndarray]]:
    """A server of a model with batch statistics, and a reply of clients whose weights have moved by 1."""
    server = FlowerServer(flower._trainer(with_statistics, "mse", {"clients_per_round": 2}))
    model = server._trainer.model
    state = [model.non_trainable_variables[index] for index in averaged_state(model)]
    return server, [np.ones(variable.shape, np.float32) for variable in [*model.trainable_variables, *state]]


def not_finite(place: int):
    def changed(arrays: list[np.ndarray]) -> list[np.ndarray]:
        arrays[place] = np.full_like(arrays[place], np.nan)
        return arrays

    return changed


@pytest.mark.parametrize(
    ("change", "figures", "reason"),
    [
        (not_finite(0), {}, "the norm of its update is nan"),
        (not_finite(-1), {}, "the norm of its change of state is nan"),
        (lambda arrays: arrays[:-1], {}, "it has 5 arrays, and the model and --update_codec need 6"),
        (lambda arrays: [*arrays, arrays[0]], {}, "it has 7 arrays"),
        (lambda arrays: [np.array(each.flat[0]) for each in arrays], {}, r"its array 0 is float32 \[\], and"),
        (lambda arrays: [each.reshape(-1)[:1] for each in arrays], {}, r"array 0 is float32 \[1\], .* float32 \[2\]"),
        (lambda arrays: [each.astype(np.float64) for each in arrays], {}, r"its array 0 is float64 \[2\]"),
        (list, {"loss": np.nan}, "its loss is nan"),
        (list, {"num-examples": np.nan}, "its num-examples is nan"),
        (list, {"num-examples": [5]}, r"its num-examples is \[5\], not a finite number"),
        (list, {"num-examples": 0}, "its num-examples is 0, not a whole number from 1 to 1000000000"),
        (list, {"num-examples": 2.5}, r"its num-examples is 2\.5"),
        (list, {"num-examples": 1e300}, r"its num-examples is 1e\+300"),
    ],
)
def test_a_reply_that_cannot_be_averaged_counts_as_dropped_out(change, figures, reason, capfd):
    server, arrays = server_and_arrays()
    metrics = {"num-examples": 5, "loss": 1.0}
    server._apply([reply(change([*arrays]), {**metrics, **figures}, node=42), reply(arrays, metrics)], 2)
    assert (server._counts["clients_trained"], server._counts["clients_dropped"]) == (1, 1)
    assert re.search(rf"WARNING: round 3: node 42 counts as dropped out: .*{reason}", capfd.readouterr().out)
    weights = server._trainer.model.get_weights()
    assert all(np.isfinite(each).all() for each in weights)
    np.testing.assert_array_equal(weights[0], [0.0, 0.0])  # gamma: 1 minus the movement of the other client


def message(dst_node_id, **_) -> types.SimpleNamespace:
    return types.SimpleNamespace(metadata=types.SimpleNamespace(dst_node_id=dst_node_id, message_id=str(dst_node_id)))


FLWR = types.SimpleNamespace(
    app=types.SimpleNamespace(ConfigRecord=dict, RecordDict=dict, ArrayRecord=list, Message=message)
)


def test_nodes_without_a_usable_reply_are_named(capfd):
    server, _ = server_and_arrays()
    failed = reply([], {}, node=11)
    failed.has_error, failed.error = lambda: True, types.SimpleNamespace(code=2, reason="Traceback\n  out of memory")
    grid = types.SimpleNamespace(get_node_ids=lambda: [11, 12], send_and_receive=lambda messages, timeout: [failed])

    server.round(FLWR, grid, 0, 60.0)
    said = capfd.readouterr().out
    assert "round 1: node 11 counts as dropped out: error 2: Traceback out of memory" in said
    assert "round 1: node 12 counts as dropped out: no reply within 60 s" in said
    assert server._counts["clients_dropped"] == 2


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@pytest.mark.parametrize("connected", [[11], []])
def test_a_round_does_not_wait_forever_for_nodes_that_are_gone(connected, sampling, capfd):
    server, arrays = server_and_arrays()
    server.options = dataclasses.replace(server.options, client_sampling=sampling)
    sent = []

    def send_and_receive(messages, timeout):
        sent.extend(each.metadata.dst_node_id for each in messages)
        return [reply(arrays, {"num-examples": 5, "loss": 1.0}, node=11)]

    grid = types.SimpleNamespace(get_node_ids=lambda: connected, send_and_receive=send_and_receive)
    server.round(FLWR, grid, 1, 0.0)
    assert sent == connected
    missing = 2 - len(connected)
    assert server._counts["clients_dropped"] == missing
    assert server._counts["clients_trained"] == len(connected)
    assert f"round 2: {missing} of 2 nodes are not connected after 0 s" in capfd.readouterr().out


def test_the_first_round_says_at_once_how_many_nodes_it_waits_for(capfd):
    server, arrays = server_and_arrays()
    found = iter([[11], [11], [11, 12]])
    replies = [reply(arrays, {"num-examples": 5, "loss": 1.0}, node=node) for node in (11, 12)]
    grid = types.SimpleNamespace(get_node_ids=lambda: next(found), send_and_receive=lambda messages, timeout: replies)
    server.round(FLWR, grid, 0, 0.01)
    assert server._counts["clients_trained"] == 2
    assert capfd.readouterr().out.count("round 1: waiting for 1 of 2 nodes to connect") == 1


def test_the_loss_is_that_of_the_last_round_with_clients(tmp_path):
    server, arrays = server_and_arrays()
    server.options = dataclasses.replace(server.options, rounds=1)
    server._apply([], 0)
    with pytest.raises(TrainingError, match="no client replied in any round"):
        server.finish(tmp_path, None)
    assert not [*tmp_path.iterdir()]
    for replies in ([reply(arrays, {"num-examples": 4, "loss": 0.5})], []):
        server._apply(replies, 0)
        server.finish(tmp_path, None)
        assert json.loads((tmp_path / "summary.json").read_text())["train_loss"] == 0.5


def test_results_have_the_figures_of_numpy_and_tensorflow_and_appear_whole(tmp_path, monkeypatch):
    server, arrays = server_and_arrays()
    server._apply([reply(arrays, {"num-examples": 4, "loss": 0.5})], 0)
    server.finish(tmp_path, lambda model: {"accuracy": np.float32(0.5), "error": tf.constant(0.25)})
    assert json.loads((tmp_path / "summary.json").read_text())["eval"] == {"accuracy": 0.5, "error": 0.25}
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {"model.keras", "summary.json"}

    def full(*_) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        server.finish(tmp_path, None)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_payload_of_another_codec_counts_as_dropped_out(capfd):
    server = FlowerServer(flower._trainer(federation.build, federation.LOSS, dict(federation.OPTIONS)))
    arrays = [np.full(spec.shape, 1, spec.dtype.as_numpy_dtype) for spec in server._encoding.sent]
    server._apply([reply(arrays, {"num-examples": 5, "loss": 1.0})], 0)
    assert "node 7 counts as dropped out: a payload is not one of --update_codec" in capfd.readouterr().out


def with_statistics_of_batches() -> keras.Model:
    """Short batches of a client are filled for it."""
    return keras.Sequential([keras.Input([12]), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(5)])


def with_frozen_layer() -> keras.Model:
    return keras.Sequential([keras.Input([12]), keras.layers.Dense(12, trainable=False), keras.layers.Dense(5)])


@pytest.mark.parametrize("build", [federation.build, with_statistics_of_batches, with_frozen_layer])
def test_arrays_are_payloads_and_lead_to_the_weights_of_a_simulation(build):
    def trainer() -> FederatedTrainer:
        return flower._trainer(build, federation.LOSS, dict(federation.OPTIONS))

    x, y = federation.examples()
    server = FlowerServer(trainer())
    training = flower._Training(trainer())
    clients = [flower._Client(training, x[part], y[part]) for part in partition.by_class(y, 2, 3, 4)]
    for number in range(server.options.rounds):
        model = server._trainer.model
        state = [model.non_trainable_variables[index] for index in averaged_state(model)]
        weights = [np.asarray(weight) for weight in [*model.trainable_variables, *state]]
        replies = []
        for place, client in enumerate(clients):
            config = {"round": number, "learning_rate": 0.1, "frozen": server._frozen}
            arrays, residual, figures = client.round(weights, config, place, None)
            assert residual is None
            if build is federation.build:
                assert [array.dtype for array in arrays] == [np.int32, np.float32, np.int32, np.float32]
            if build is with_frozen_layer:
                assert [array.dtype for array in arrays] == [np.int32, np.float32]
            replies.append(reply(arrays, figures))
        server._apply(replies, number)
    here = FederatedTrainer(build, federation.LOSS, **federation.OPTIONS, clients=2, partition="by_class:3", verbose=0)
    here.fit(x, y)
    for one, other in zip(server._trainer.model.get_weights(), here.model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_client_with_other_frozen_weights_is_refused():
    server = FlowerServer(flower._trainer(with_frozen_layer, federation.LOSS, dict(federation.OPTIONS)))
    other = {**federation.OPTIONS, "seed": 5}
    x, y = federation.examples()
    client = flower._Client(flower._Training(flower._trainer(with_frozen_layer, federation.LOSS, other)), x, y)
    weights = [np.asarray(weight) for weight in server._trainer.model.trainable_variables]
    config = {"round": 0, "learning_rate": 0.1, "frozen": server._frozen}
    with pytest.raises(ConfigError, match="the frozen weights of this client differ from those of the server"):
        client.round(weights, config, 0, None)
