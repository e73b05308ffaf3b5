"""Client and server over Flower (`flwr`), which provides transport, TLS and authentication for real federations.

A client trains and encodes as in a simulation, and its message to the server has the payloads of our codecs. Its
residuals are stored in Flower's context of the node. The module of a Flower app is then:

    client = flower.client_app(build, examples, loss="sparse_categorical_crossentropy", learning_rate=0.1)
    server = flower.server_app(build, loss="sparse_categorical_crossentropy", rounds=20, clients_per_round=2)

Needs `pip install 'tfpar[federated]'`.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from tfpar.config import ConfigError, FederatedConfig
from tfpar.outer.federated.checks import check_over_flower, complete, federated_of
from tfpar.outer.federated.client_update import ClientData, averaged_state, frozen_digest
from tfpar.outer.federated.flower_server import FlowerServer
from tfpar.outer.federated.round import ClientRound
from tfpar.outer.federated.sampling import local_order
from tfpar.outer.federated.trainer import FederatedTrainer, reads_whole_batches, with_options
from tfpar.training.seeds import fold_in, step_seed

import keras
import numpy as np
import tensorflow as tf

INSTALL = "pip install 'tfpar[federated]'"


def client_app(
    model: Callable[[], keras.Model], examples: Callable[[Any], tuple[Any, Any]], loss: Any, **options: Any
) -> Any:
    """Returns a `flwr.clientapp.ClientApp` that trains on the examples of its node.

    Args:
      model: A function that builds the model.
      examples: A function of Flower's `Context` that returns the node's inputs and labels, arrays `[n, ...]`.
      loss: As for `tfpar.Trainer`.
      **options: As for `FederatedTrainer`, including those of clients: `local_epochs`, `client_batch`, `optimizer`,
        `averaging`, `prox`, `update_codec`, `stateful_clients`. The server needs the same options.

    Raises:
      ConfigError: Flower is not installed, or options cannot work.
    """
    flwr = _flower()
    app = flwr.clientapp.ClientApp()
    clients = _Clients(lambda: _Training(_trainer(model, loss, options)), examples)

    @app.train()
    def train(message: Any, context: Any) -> Any:
        content = message.content
        number, client = clients.of(context)
        arrays, state = content["arrays"].to_numpy_ndarrays(), context.state
        residual = state["residual"].to_numpy_ndarrays()[0] if "residual" in state else None
        sent, residual, figures = client.round(arrays, dict(content["config"]), number, residual)
        if residual is not None:
            state["residual"] = flwr.app.ArrayRecord([residual])
        reply = {"arrays": flwr.app.ArrayRecord(sent), "metrics": flwr.app.MetricRecord(figures)}
        return flwr.app.Message(content=flwr.app.RecordDict(reply), reply_to=message)

    return app


def server_app(
    model: Callable[[], keras.Model],
    loss: Any,
    *,
    workdir: str,
    evaluate: Callable[[keras.Model], dict[str, float]] | None = None,
    reply_seconds: float = 600.0,
    **options: Any,
) -> Any:
    """Returns a `flwr.serverapp.ServerApp` that averages the updates of the nodes.

    It begins once `clients_per_round` nodes are connected, and writes `model.keras` and `summary.json` at the end.
    While it waits for nodes, a line of the log says each minute how many are missing.

    Args:
      model: A function that builds the model.
      loss: As for `tfpar.Trainer`.
      workdir: The directory for results.
      evaluate: A function of the model that returns figures, which `summary.json` records after the last round.
      reply_seconds: Time limit for a node's reply. A node that takes longer, fails, or sends something that cannot be
        averaged counts as dropped out. After the first round it is also the time for which a round waits for nodes that
        are not connected: then it takes place with those that are.
      **options: As for `FederatedTrainer`, including those of rounds and of the server.

    Raises:
      ConfigError: Flower is not installed, or options cannot work.
    """
    flwr = _flower()
    app = flwr.serverapp.ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        del context
        server = FlowerServer(_trainer(model, loss, options))
        for number in range(server.options.rounds):
            server.round(flwr, grid, number, reply_seconds)
        server.finish(pathlib.Path(workdir), evaluate)

    return app


def _flower() -> Any:
    """Imports Flower.

    Raises:
      ConfigError: It is not installed.
    """
    try:
        import flwr
        import flwr.app
        import flwr.clientapp
        import flwr.serverapp
    except ImportError as error:
        raise ConfigError(f"Flower cannot be imported ({error}). Install it: {INSTALL}.") from error
    return flwr


def _trainer(model: Callable[[], keras.Model], loss: Any, options: dict[str, Any]) -> FederatedTrainer:
    """Creates the trainer whose pure functions client and server use, on one device of this process.

    Raises:
      ConfigError: The options, or the configuration among them, have one that does not work over Flower.
    """
    arguments = {name: options[name] for name in ("metrics", "runtime") if name in options}
    others = {name: value for name, value in options.items() if name not in ("config", *arguments)}
    per_round = others.get("clients_per_round")
    if isinstance(per_round, int) and per_round > FederatedConfig.clients:
        others = {"clients": per_round, **others}  # which a configuration compares; here the clients are the nodes
    config = with_options(options.get("config"), {"strategy": "one_device", "verbose": 0, **others})
    check_over_flower(config)
    return FederatedTrainer(model, loss, config=complete(config), **arguments)


class _Clients:
    """The clients of this process, by node: a process of Flower's simulation serves several nodes.

    Args:
      training: Creates what all of them train with, once.
      examples: As for `client_app`.
    """

    def __init__(self, training: Callable[[], _Training], examples: Callable[[Any], tuple[Any, Any]]) -> None:
        self._training, self._examples = functools.cache(training), examples
        self._made: dict[int, _Client] = {}

    def of(self, context: Any) -> tuple[int, _Client]:
        """Returns the number of a context's node, and the node's client."""
        number = int(context.node_config.get("partition-id", context.node_id % 2**31))
        if number not in self._made:
            self._made[number] = _Client(self._training(), *self._examples(context))
        return number, self._made[number]


class _Training:
    """The functions with which clients train and encode, compiled once for all clients of a process.

    They exist once the trainer knows the source of a client.
    """

    def __init__(self, trainer: FederatedTrainer) -> None:
        self.trainer = trainer

    @functools.cached_property
    def round(self) -> ClientRound:
        """The work of a client in a round."""
        return self.trainer.client_round()

    @functools.cached_property
    def train(self) -> Callable[..., Any]:
        """`LocalTraining.train`."""
        return self._compiled(self.round.local.train)

    @functools.cached_property
    def encode(self) -> Callable[..., Any]:
        """`UpdateEncoding.encode`."""
        return self._compiled(self.round.encoding.encode)

    @functools.cached_property
    def frozen(self) -> str:
        """`frozen_digest` of the model."""
        return frozen_digest(self.trainer.model)

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return tf.function(function, autograph=False, jit_compile=self.trainer.program.compiles_whole or None)


class _Client:
    """A client with its examples."""

    def __init__(self, training: _Training, x: Any, y: Any) -> None:
        self._source, _ = training.trainer._sources(x, y, None)
        self._training, self._trainer = training, training.trainer
        count = self._source.info.num_examples
        self._examples = self._source.fetch(tf.range(count, dtype=tf.int64))

    def round(
        self, arrays: Sequence[np.ndarray], config: dict[str, Any], number: int, residual: np.ndarray | None
    ) -> tuple[list[np.ndarray], np.ndarray | None, dict[str, Any]]:
        """Trains, and encodes the movement.

        Args:
          arrays: The server's weights, then the floating-point state of the model.
          config: `round`, `learning_rate`, and `frozen`, the digest of the server's frozen weights.
          number: Number of this client.
          residual: The client's residual, or None.

        Returns:
          The message (payloads or tensors of the movement, then changes of state), the new residual, and the metrics.

        Raises:
          ConfigError: The model has other frozen weights than that of the server.
        """
        if config["frozen"] != self._training.frozen:
            raise ConfigError(
                "the frozen weights of this client differ from those of the server, which does not send them. Let the "
                "function that builds the model load the same values on both."
            )
        options, train = federated_of(self._trainer.config), self._trainer.config.train
        model, count = self._trainer.model, self._source.info.num_examples
        weights = len(model.trainable_variables)
        order = local_order(
            *(train.seed, int(config["round"]), number, count),
            epochs=options.local_epochs,
            batch=options.client_batch,
            shuffle=self._trainer.config.input.shuffle,
            fill=reads_whole_batches(self._trainer.program),
        )
        data = ClientData(*self._examples, tf.ones([count]), tf.constant(order), tf.constant(len(order)))
        own = fold_in(step_seed(train.seed, tf.constant(int(config["round"])), tf.constant(0)), number)
        state = [tf.convert_to_tensor(variable.value) for variable in model.non_trainable_variables]
        for place, value in zip(averaged_state(model), arrays[weights:], strict=True):
            state[place] = tf.constant(value)
        rate = tf.constant(config["learning_rate"], tf.float32)
        params = [tf.constant(value) for value in arrays[:weights]]
        trained = self._training.train(params, state, data, rate, fold_in(own, 0), None)
        elements = self._training.round.encoding.residual_elements
        kept = tf.zeros([elements]) if residual is None else tf.constant(residual)
        sent, kept = self._training.encode(trained.movement, kept if elements else None, fold_in(own, 1))
        changes = [trained.state[place] - state[place] for place in averaged_state(model)]
        figures = {"num-examples": count, "loss": float(trained.loss / tf.maximum(trained.count, 1e-30))}
        return [each.numpy() for each in [*sent, *changes]], kept.numpy() if elements else None, figures
