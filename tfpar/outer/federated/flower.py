"""Client and server over Flower (`flwr`), which provides transport, TLS and authentication for real federations.

A client trains and encodes as in a simulation, and its message to the server has the payloads of our codecs. Its
residuals are stored in Flower's context of the node. The module of a Flower app is then:

    client = flower.client_app(build, examples, loss="sparse_categorical_crossentropy", learning_rate=0.1)
    server = flower.server_app(build, loss="sparse_categorical_crossentropy", rounds=20, clients_per_round=2)

Needs `pip install 'tfpar[federated]'`.
"""

from __future__ import annotations

import functools
import json
import logging
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfpar.checkpoint import run_state
from tfpar.checkpoint.export import export_model
from tfpar.config import ConfigError
from tfpar.config.errors import TrainingError
from tfpar.optim.pure_update import pure_apply
from tfpar.outer.federated.checks import complete, federated_of
from tfpar.outer.federated.client_update import ClientData
from tfpar.outer.federated.replies import BadReplyError, read_reply
from tfpar.outer.federated.round import ClientRound
from tfpar.outer.federated.sampling import Sampling, local_order
from tfpar.outer.federated.server import Averaging
from tfpar.outer.federated.trainer import FederatedTrainer, reads_whole_batches, with_options
from tfpar.process.whole_files import replace_file
from tfpar.training.seeds import fold_in, step_seed

import keras
import numpy as np
import tensorflow as tf

_log = logging.getLogger(__name__)

INSTALL = "pip install 'tfpar[federated]'"
_POLL_SECONDS = 0.5
_REASON_CHARACTERS = 300


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

    Args:
      model: A function that builds the model.
      loss: As for `tfpar.Trainer`.
      workdir: The directory for results.
      evaluate: A function of the model that returns figures, which `summary.json` records after the last round.
      reply_seconds: Time limit for a node's reply. A node that takes longer, fails, or sends something that cannot be
        averaged counts as dropped out.
      **options: As for `FederatedTrainer`, including those of rounds and of the server.

    Raises:
      ConfigError: Flower is not installed, or options cannot work.
    """
    flwr = _flower()
    app = flwr.serverapp.ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        del context
        server = _Server(_trainer(model, loss, options))
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
      ConfigError: The options, or the configuration among them, choose SCAFFOLD, whose control variates are not sent
        over Flower; noise, which would be drawn from a seed that clients know; or a schedule that needs evaluations.
    """
    arguments = {name: options[name] for name in ("metrics", "runtime") if name in options}
    others = {name: value for name, value in options.items() if name not in ("config", *arguments)}
    config = complete(with_options(options.get("config"), {"strategy": "one_device", "verbose": 0, **others}))
    federated = federated_of(config)
    if federated.noise_multiplier:
        raise ConfigError(
            f"--noise_multiplier={federated.noise_multiplier:g} does not work over Flower: the noise follows from the "
            "seed, which all clients have. Use Flower's own differential privacy."
        )
    if federated.averaging == "scaffold":
        raise ConfigError("--averaging=scaffold does not work over Flower yet. Use another, such as fedprox.")
    if config.schedule.schedule == "plateau":
        raise ConfigError(
            "--schedule=plateau does not work over Flower, whose server evaluates only at the end. Use another, such "
            "as constant."
        )
    return FederatedTrainer(model, loss, config=config, **arguments)


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
          config: `round` and `learning_rate`.
          number: Number of this client.
          residual: The client's residual, or None.

        Returns:
          The message (payloads or tensors of the movement, then changes of state), the new residual, and the metrics.
        """
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


class _Server:
    """The server: holds the weights and applies the clients' replies."""

    def __init__(self, trainer: FederatedTrainer) -> None:
        self._trainer, self._encoding = trainer, trainer.encoding()
        self.options = federated_of(trainer.config)
        seed, per_round = trainer.config.train.seed, self.options.clients_per_round
        self._averaging = Averaging.of(self.options, seed, float(per_round))
        self._schedule = trainer.program.schedule(self.options.rounds)
        self._counts = {"clients_trained": 0, "clients_dropped": 0, "bytes_up": 0, "bytes_down": 0}
        self._loss: float | None = None  # of the last round in which a client replied

    def round(self, flwr: Any, grid: Any, number: int, seconds: float) -> None:
        """Sends the weights to some nodes, and applies the mean of their replies."""
        model = self._trainer.model
        while len(nodes := sorted(grid.get_node_ids())) < self.options.clients_per_round:
            time.sleep(_POLL_SECONDS)
        seed = self._trainer.config.train.seed
        chosen = Sampling(seed, len(nodes), self.options.clients_per_round, self.options.client_sampling).round(number)
        state = [model.non_trainable_variables[place] for place in averaged_state(model)]
        arrays = [np.asarray(variable) for variable in [*model.trainable_variables, *state]]
        assert self._schedule is not None
        rate = float(self._schedule(tf.constant(number, tf.int64)))
        config = flwr.app.ConfigRecord({"round": number, "learning_rate": rate})
        content = {"arrays": flwr.app.ArrayRecord(arrays), "config": config}
        messages = [
            flwr.app.Message(content=flwr.app.RecordDict(dict(content)), message_type="train", dst_node_id=nodes[place])
            for place in chosen[0]
        ]
        self._counts["bytes_down"] += len(messages) * sum(array.nbytes for array in arrays)
        self._apply(self._answers(grid, messages, number, seconds), number)

    def _answers(self, grid: Any, messages: list[Any], number: int, seconds: float) -> list[Any]:
        """Sends messages, and returns the replies of the nodes that neither fail nor take too long, by node."""
        received = grid.send_and_receive(messages, timeout=seconds)
        replies = {reply.metadata.reply_to_message_id: reply for reply in received}
        answers = []
        for message in messages:
            reply = replies.get(message.metadata.message_id)
            if reply is None:
                self._drop(message.metadata.dst_node_id, number, f"no reply within {seconds:g} s")
            elif reply.has_error():
                self._drop(message.metadata.dst_node_id, number, f"error {reply.error.code}: {reply.error.reason}")
            else:
                answers.append(reply)
        return sorted(answers, key=lambda reply: reply.metadata.src_node_id)

    def _drop(self, node: int, number: int, reason: str) -> None:
        """Counts a client as dropped out, and logs why."""
        self._counts["clients_dropped"] += 1
        text = " ".join(reason.split())[:_REASON_CHARACTERS]  # one line: it may contain text from the client
        _log.warning("round %d: node %d counts as dropped out: %s", number + 1, node, text)

    def _apply(self, replies: list[Any], number: int) -> None:
        """Applies the mean of replies."""
        model, program = self._trainer.model, self._trainer.program
        params = [tf.convert_to_tensor(weight.value) for weight in model.trainable_variables]
        kept = [model.non_trainable_variables[place] for place in averaged_state(model)]
        state = [tf.TensorSpec(variable.shape, variable.dtype) for variable in kept]
        totals = [tf.zeros(param.shape) for param in params]
        changes = [tf.zeros(each.shape) for each in state]
        mass = 0.0
        losses: list[tuple[float, float]] = []
        for message in replies:
            try:
                reply = read_reply(message.content, self._encoding, state)
            except BadReplyError as reason:
                self._drop(message.metadata.src_node_id, number, str(reason))
                continue
            clip = self.options.client_clip
            factor = clip / max(reply.norm, clip) if clip else 1.0
            own = 1.0 if self.options.is_uniform else reply.examples
            totals = [total + own * factor * each for total, each in zip(totals, reply.movement, strict=True)]
            changes = [total + own * each for total, each in zip(changes, reply.changes, strict=True)]
            mass, losses = mass + own, [*losses, (own, reply.loss)]
            self._counts["clients_trained"] += 1
            self._counts["bytes_up"] += reply.num_bytes
        factor = self._averaging.factor(tf.constant(mass))
        mean = self._averaging.mean(totals, factor, tf.constant(number, tf.int64))
        slots = [tf.convert_to_tensor(variable.value) for variable in program.optimizer.variables]
        new, new_slots = pure_apply(program.optimizer, slots, params, mean)
        for variable, value in zip(
            [*model.trainable_variables, *program.optimizer.variables], [*new, *new_slots], strict=True
        ):
            variable.assign(value)
        for variable, change in zip(kept, changes, strict=True):
            variable.assign_add(change / max(mass, 1e-30))
        if not losses:
            _log.info("round %d: no client replied", number + 1)
            return
        self._loss = sum(own * loss for own, loss in losses) / mass
        _log.info("round %d: %d clients, loss %.4f", number + 1, len(losses), self._loss)

    def finish(self, workdir: pathlib.Path, evaluate: Callable[[keras.Model], dict[str, float]] | None) -> None:
        """Writes `model.keras` and `summary.json`.

        Raises:
          TrainingError: No client replied in any round.
        """
        model, rounds = self._trainer.model, self.options.rounds
        if not self._counts["clients_trained"]:
            raise TrainingError(
                f"--rounds={rounds}: no client replied in any round, so nothing was learned, and {workdir} gets no "
                "model. The log names the clients that failed, and why."
            )
        workdir.mkdir(parents=True, exist_ok=True)
        export_model(model, model.trainable_variables, workdir / "model.keras")
        federated: dict[str, Any] = {"averaging": self.options.averaging, "update_codec": self.options.update_codec}
        for name in ("up", "down"):
            federated[f"bytes_{name}_per_round"] = self._counts[f"bytes_{name}"] / rounds
        federated |= {name: self._counts[name] for name in ("clients_trained", "clients_dropped")}
        summary = {
            "rounds": rounds,
            "train_loss": self._loss,
            "eval": {name: float(value) for name, value in evaluate(model).items()} if evaluate else {},
            "params_sha256": run_state.params_sha256(model.trainable_variables),
            "federated": federated,
        }
        replace_file(workdir / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())


def averaged_state(model: keras.Model) -> list[int]:
    """Returns the indices of the non-trainable variables that are averaged: floating-point state, e.g. statistics."""
    variables = enumerate(model.non_trainable_variables)
    return [place for place, variable in variables if tf.as_dtype(variable.dtype).is_floating]
