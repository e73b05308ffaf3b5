"""Averaging, against NumPy: the same clients, the same batches, another implementation."""

from __future__ import annotations

import tfpar
from tests.outer.federated import numpy_reference
from tfpar import inputs
from tfpar.config import ConfigError, FederatedConfig
from tfpar.optim.yogi import Yogi
from tfpar.outer.federated import FederatedTrainer, Population, server, trainer
from tfpar.outer.federated.evaluation import FederatedEvaluator
from tfpar.outer.federated.sampling import local_order
from tfpar.outer.federated.step import ClientMemory
from tfpar.outer.federated.trainer import reads_whole_batches
from tfpar.training.sidecar import Sidecar

import keras
import numpy as np
import pytest
import tensorflow as tf

ROUNDS, CLIENTS, PER_ROUND, BATCH, EPOCHS, RATE = 5, 9, 4, 8, 2, 0.1


def examples(count: int = 230) -> tuple[np.ndarray, np.ndarray]:
    """Inputs `[count, 12]` in [0, 1] and labels of 5 classes."""
    generator = np.random.default_rng(0)
    return generator.random((count, 12), np.float32), generator.integers(0, 5, count).astype(np.int32)


def network() -> keras.Model:
    return keras.Sequential([keras.Input([12]), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(5)])


def trainer_of(model=network, **options) -> FederatedTrainer:
    common = {
        "rounds": ROUNDS,
        "partition": "dirichlet:0.5",
        "clients": CLIENTS,
        "clients_per_round": PER_ROUND,
        "client_batch": BATCH,
        "local_epochs": EPOCHS,
        "learning_rate": RATE,
        "seed": 4,
        "jit_compile": "false",
        "verbose": 0,
    }
    return FederatedTrainer(
        model,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        **{**common, **options},
    )


# Uneven clients, so that it matters what each counts.
UNEVEN = {"partition": "by_class:2", "clients": CLIENTS}


@pytest.mark.parametrize(
    ("options", "server", "mu"),
    [
        ({"jit_compile": "true", **UNEVEN}, ("sgd", 1.0, 0.0), 0.0),
        (
            # The learning rate is for the batch of a client.
            {"averaging": "fedprox", "prox": 0.5, "client_weights": "uniform", "base_batch_size": BATCH, **UNEVEN},
            ("sgd", 1.0, 0.0),
            0.5,
        ),
        ({"averaging": "fedavgm", "server_learning_rate": 0.5}, ("sgd", 0.5, 0.9), 0.0),
        ({"averaging": "fedyogi", "server_learning_rate": 0.02}, ("yogi", 0.02, 0.9), 0.0),
        ({"averaging": "scaffold", "jit_compile": "true", **UNEVEN}, ("sgd", 1.0, 0.0), 0.0),
        ({"client_dropout": 0.4, "client_sampling": "poisson"}, ("sgd", 1.0, 0.0), 0.0),
    ],
)
def test_five_rounds_are_those_of_numpy(options, server, mu):
    x, y = examples()
    trainer = trainer_of(**options)
    begun = [np.asarray(weight, np.float64) for weight in trainer.model.trainable_variables]
    trainer.fit(x, y)
    population = Population.of(inputs.as_source(x, y), trainer.config)

    def batches(number: int, client: int):
        part = population.parts[client]
        order = local_order(4, number, client, len(part), epochs=EPOCHS, batch=BATCH, shuffle=True)
        return [(x[part[row[row >= 0]]].astype(np.float64), y[part[row[row >= 0]]]) for row in order]

    expected = numpy_reference.train(
        begun,
        [population.sampling.round(number)[0] for number in range(ROUNDS)],
        batches,
        lambda client: float(population.masses(np.array([client]))[0]),
        rate=RATE,
        server=numpy_reference.Server(*server),
        clients=CLIENTS,
        mu=mu,
        scaffold=options.get("averaging") == "scaffold",
    )
    assert max(float(np.abs(old - new).max()) for old, new in zip(begun, expected, strict=True)) > 0.02
    for weight, wanted in zip(trainer.model.trainable_variables, expected, strict=True):
        np.testing.assert_allclose(np.asarray(weight), wanted, atol=1e-5)


def test_any_optimizer_of_keras_serves_on_the_server():
    x, y = examples()
    trainer = trainer_of(server_optimizer="lion", server_learning_rate=0.01, rounds=1)
    before = [np.array(weight) for weight in trainer.model.trainable_variables]
    trainer.fit(x, y)
    steps = [np.abs(np.asarray(new) - old) for new, old in zip(trainer.model.trainable_variables, before, strict=True)]
    assert all(np.allclose(step[step > 0.0], 0.01, atol=1e-6) for step in steps)  # Lion moves by its rate


def test_clients_are_evaluated_in_one_graph(monkeypatch):
    """With and without XLA; one operation after the other takes seconds for some dozens of clients."""
    eager, sums = [], FederatedEvaluator._batch_sums

    def counted(*arguments):
        eager.append(tf.executing_eagerly())
        return sums(*arguments)

    monkeypatch.setattr(FederatedEvaluator, "_batch_sums", counted)
    x, y = examples()
    trainer = trainer_of(rounds=1, local_epochs=1)
    result = trainer.fit(x, y, validation=(x[:50], y[:50]))["eval"]
    assert eager == [False]
    parts = Population.of(inputs.as_source(x, y), trainer.config).parts
    right = trainer.model.predict(x, verbose=0).argmax(axis=1) == y
    assert result["client_accuracy_mean"] == pytest.approx(np.mean([right[part].mean() for part in parts if len(part)]))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (1.0, 0.0)),
        ({"averaging": "fedavgm"}, (1.0, 0.9)),
        ({"averaging": "fedadam"}, (0.03, 0.9)),
        ({"server_optimizer": "yogi"}, (0.03, 0.9)),
        ({"averaging": "fedadam", "server_optimizer": "sgd"}, (1.0, 0.0)),
        ({"server_optimizer": "adam", "server_learning_rate": 0.1, "server_momentum": 0.0}, (0.1, 0.0)),
    ],
)
def test_rate_and_momentum_suit_the_optimizer_of_the_server(options, expected):
    config = FederatedConfig(**options)
    assert (config.rate_of_server, config.momentum_of_server) == expected


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_server_does_not_decay_weights(name):
    made = server.server_optimizer(FederatedConfig(server_optimizer=name, server_learning_rate=0.1))
    assert made.weight_decay == 0.0


def test_batch_statistics_are_averaged_as_weights_are():
    """A client's last short batch is filled, as the layer reads whole batches."""
    x, y = examples()

    def build() -> keras.Model:
        return keras.Sequential(
            [keras.Input([12]), keras.layers.BatchNormalization(momentum=0.0), keras.layers.Dense(5)]
        )

    trainer = trainer_of(build, rounds=1, clients_per_round=CLIENTS, local_epochs=1, client_batch=64, learning_rate=0.0)
    trainer.fit(x, y)
    population = Population.of(inputs.as_source(x, y), trainer.config)
    means, masses = [], []
    for client, part in enumerate(population.parts):
        order = local_order(4, 0, client, len(part), epochs=1, batch=64, shuffle=True, fill=True)
        means.append(x[part[order[-1]]].mean(axis=0))
        masses.append(len(part))
    np.testing.assert_allclose(
        np.asarray(trainer.model.layers[0].moving_mean), np.average(means, axis=0, weights=masses), atol=1e-5
    )


def test_short_batches_are_filled_for_a_loss_of_whole_batches():
    """A value per example leaves padding out, a value for the batch cannot."""

    def loss_of_batch(y, outputs):
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True))

    x, y = examples()
    for loss, fills in ((loss_of_batch, True), (keras.losses.SparseCategoricalCrossentropy(from_logits=True), False)):
        made = FederatedTrainer(network, loss, rounds=1, clients=CLIENTS, clients_per_round=1, verbose=0)
        made.fit(x, y)
        assert reads_whole_batches(made.program) is fills


def normalized_network() -> keras.Model:
    """Its batch variance overflows where the loss does not."""
    return keras.Sequential([keras.Input([12]), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(5)])


@pytest.mark.parametrize("build", [network, normalized_network])
def test_a_client_that_is_not_finite_counts_as_lost(build, messages):
    x, y = examples()
    x[3] = 1e30
    trainer = trainer_of(build, rounds=1, partition="iid", clients_per_round=CLIENTS, local_epochs=1)
    summary = trainer.fit(x, y)
    assert summary["skipped_steps"] == 0
    assert all(np.isfinite(weight).all() for weight in trainer.model.get_weights())
    assert any("left out of the last 1 rounds" in line and "not finite: 1. A lower" in line for line in messages)


@pytest.mark.parametrize("cause", ["no client replies", "all clients diverge"])
def test_a_round_without_clients_has_no_loss(cause, messages):
    """It is no step that failed, and leaves the means over several rounds as they are."""
    seen: list[tuple[float, dict]] = []
    causes = {"no client replies": {"client_dropout": 0.6}, "all clients diverge": {"learning_rate": 1e30}}
    made = trainer_of(rounds=6, partition="iid", clients_per_round=1, seed=1, eval_every=6, **causes[cause])
    note = tfpar.Hook(1, lambda state: seen.append((state.since.losses[0], state.since.results())))
    result = made.fit(*examples(), hooks=[note])
    replied = [(loss, results) for loss, results in seen if not np.isnan(loss)]
    assert result["skipped_steps"] == 0
    assert all(set(results) == {"loss"} for loss, results in seen if np.isnan(loss))
    if cause == "all clients diverge":
        assert not replied
        assert result["train_loss"] is None
        assert any("left out of the last 6 rounds" in line and "not finite: 6. A lower" in line for line in messages)
        return
    assert 0 < len(replied) < 6
    assert all(loss > 0 and results["accuracy"] > 0 for loss, results in replied)
    assert min(loss for loss, _ in replied) <= result["train_loss"] <= max(loss for loss, _ in replied)


def test_a_round_that_is_not_applied_leaves_the_control_variates_as_they_are(monkeypatch):
    """The losses of both clients are finite, and their sum is not, in float32."""
    made: list[ClientMemory] = []
    monkeypatch.setattr(trainer, "ClientMemory", lambda *args: made.append(ClientMemory(*args)) or made[-1])

    def build() -> keras.Model:
        return keras.Sequential([keras.Input([2]), keras.layers.Dense(2, kernel_initializer="identity")])

    options = {"averaging": "scaffold", "partition": "iid", "clients": 2, "clients_per_round": 2, "rounds": 1}
    x, y = np.tile(np.float32([2e36, 0.0]), (200, 1)), np.ones(200, np.int32)  # the loss of an example is 2e36
    summary = trainer_of(build, **options, learning_rate=1e-30, local_epochs=1, client_batch=100).fit(x, y)
    assert (summary["skipped_steps"], summary["federated"]["clients_trained"]) == (1, 2)
    for variable in made[0].variables:
        np.testing.assert_array_equal(np.asarray(variable), 0.0)


def test_what_replicas_send_for_the_state_of_clients_is_counted():
    """The rows of four clients are summed: control variates, and the residuals of the kernels."""
    codec = {"update_codec": "int8:min_elements=20", "stateful_clients": True}
    trainer = trainer_of(strategy="mirrored", devices=2, rounds=1, local_epochs=1, averaging="scaffold", **codec)
    sent = trainer.fit(*examples())["exchange"]["wire_bytes_per_step"]
    kernels, biases = 12 * 16 + 16 * 5, 16 + 5
    movement = kernels + biases + Sidecar.of_core(trainer.program.core, 2).length
    assert sent == 4 * (movement + PER_ROUND * (kernels + biases + kernels))


def test_yogi_is_saved_and_loaded():
    optimizer = Yogi(0.1, beta_1=0.8, epsilon=1e-2)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert isinstance(again, Yogi)
    assert again.get_config() == optimizer.get_config()


@pytest.mark.parametrize(("metrics", "name"), [({"color": ["accuracy"]}, "color_accuracy"), (None, "loss")])
def test_clients_of_a_model_with_several_outputs_are_evaluated_by_its_first_metric(metrics, name):
    x, y = examples(60)

    def build() -> keras.Model:
        given = keras.Input([12])
        outputs = {"color": keras.layers.Dense(5, name="color"), "size": keras.layers.Dense(1, name="size")}
        return keras.Model(given, {name: layer(given) for name, layer in outputs.items()})

    losses = {"color": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"}
    options = {"clients": 6, "clients_per_round": 2, "rounds": 1, "jit_compile": "false", "verbose": 0}
    data = (x, {"color": y, "size": x[:, :1]})
    figures = FederatedTrainer(build, losses, metrics, **options).fit(data, validation=data)["eval"]
    assert {key for key in figures if key.startswith("client_")} == {
        f"client_{name}_{figure}" for figure in ("mean", "min", "p10", "max")
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition": "dirichlet"}, r"--partition='dirichlet' is none of iid, dirichlet:ALPHA"),
        ({"partition": "by_file"}, r"--partition=by_file: .* has no files"),
        ({"clients_per_round": 10}, r"--clients_per_round=10 is more than --clients=9"),
        ({"server_optimizer": "adma"}, r"--server_optimizer.*adam"),
        ({"averaging": "scaffold", "optimizer": "adam"}, r"--averaging=scaffold .* plain SGD"),
        ({"update_codec": "topk:0.1"}, r"--update_codec=topk:0.1 leaves out more of some values.*--stateful_clients"),
        ({"update_codec": "powersgd:2"}, r"--update_codec=powersgd:2: clients send single payloads"),
        ({"noise_multiplier": 1.0}, r"--noise_multiplier=1.0 is relative to --client_clip, which is 0"),
        ({"noise_multiplier": 1.0, "client_clip": 1.0, "averaging": "scaffold"}, r"--averaging=scaffold and --noise"),
        ({"noise_multiplier": 1.0, "client_clip": 1.0, "exchange": "topk:0.1"}, r"--exchange=topk:0.1 and --noise"),
        ({"server_optimizer": "lion"}, r"--server_optimizer=lion needs its learning rate"),
        ({"server_adaptivity": 0.5}, r"--server_adaptivity=0\.5 .* has no effect on --server_optimizer=sgd"),
        (
            {"stateful_clients": True},
            r"--stateful_clients has no effect on --update_codec=none, .* e\.g\. --update_codec=",
        ),
        ({"delta": 1e-3}, r"--delta=0\.001 has no effect without noise: .* or give --noise_multiplier"),
        ({"prox": 1.0}, r"--prox=1 has no effect on --averaging=fedavg"),
        ({"epochs": 3.0}, r"--epochs: .* Give --rounds"),
        ({"averaging": "scaffold", "optimizer_args": "momentum=0,clipnorm=0.1"}, r"--averaging=scaffold .* plain SGD"),
        (
            {"averaging": "scaffold", "client_weights": "examples"},
            r"--client_weights=examples and --averaging=scaffold",
        ),
        ({"round_seconds": 5.0}, r"--round_seconds=5.0 does not work with federated averaging"),
        ({"partition": "by_class:nan"}, r"--partition='by_class:nan' is none of"),
        ({"schedule": "plateau"}, r"--schedule=plateau needs evaluations, and there are no validation examples"),
        ({"accumulate_steps": 2}, r"--accumulate_steps=2 does not work with federated averaging"),
        ({"offload": "optimizer"}, r"--offload=optimizer does not work with federated averaging"),
        ({"jit_segments": "auto"}, r"--jit_segments=auto does not work with federated averaging"),
        ({"global_batch_size": 32}, r"--global_batch_size=32 does not .* in steps of --client_batch examples\. Leave"),
        ({"client_holdout": 0.2}, r"--client_holdout=0\.2 has no effect: .* Give fit\(validation=\.\.\.\)"),
        ({"clients_evaluated": 5}, r"--clients_evaluated=5 has no effect: .* leave --clients_evaluated out"),
        ({"clients": 300, "partition": "iid"}, r"--clients=300: 70 of the clients would have no example"),
    ],
)
def test_what_cannot_work_is_refused_with_a_way_out(options, message):
    with pytest.raises(ConfigError, match=message):
        trainer_of(**options).fit(*examples())


def test_validation_examples_may_be_a_dataset():
    x, y = examples()
    dataset = tf.data.Dataset.from_tensor_slices((x[:20], y[:20])).batch(8)
    assert np.isfinite(trainer_of(rounds=1).fit(x, y, validation=dataset)["eval"]["loss"])
    with pytest.raises(ConfigError, match=r"validation: .*the stream has no end, .* take\(\.\.\.\) a part of it"):
        trainer_of(rounds=1).fit(x, y, validation=dataset.repeat())
