"""The server of a federation over Flower: draws nodes, sends them the weights, and averages their replies."""

from __future__ import annotations

import json
import logging
import pathlib
import time
from collections.abc import Callable
from typing import Any

from tfpar.checkpoint import run_state
from tfpar.checkpoint.export import export_model
from tfpar.config.errors import TrainingError
from tfpar.optim.pure_update import pure_apply
from tfpar.outer.federated.checks import federated_of
from tfpar.outer.federated.client_update import averaged_state, frozen_digest
from tfpar.outer.federated.replies import BadReplyError, read_reply
from tfpar.outer.federated.sampling import Sampling
from tfpar.outer.federated.server import Averaging
from tfpar.outer.federated.trainer import FederatedTrainer
from tfpar.process.whole_files import replace_file

import keras
import numpy as np
import tensorflow as tf

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_LINE_SECONDS = 60.0  # between two lines about nodes that are missing
_REASON_CHARACTERS = 300


class FlowerServer:
    """Holds the weights, and applies the clients' replies.

    Args:
      trainer: The trainer whose model, optimizer and options it uses.

    Attributes:
      options: The options of federated averaging.
    """

    def __init__(self, trainer: FederatedTrainer) -> None:
        self._trainer, self._encoding = trainer, trainer.encoding()
        self.options = federated_of(trainer.config)
        seed, per_round = trainer.config.train.seed, self.options.clients_per_round
        self._averaging = Averaging.of(self.options, seed, float(per_round))
        self._schedule = trainer.program.schedule(self.options.rounds)
        self._counts = {"clients_trained": 0, "clients_dropped": 0, "bytes_up": 0, "bytes_down": 0}
        self._frozen = frozen_digest(trainer.model)
        self._loss: float | None = None  # of the last round in which a client replied

    def round(self, flwr: Any, grid: Any, number: int, seconds: float) -> None:
        """Sends the weights to some nodes, and applies the mean of their replies.

        Args:
          flwr: The module of Flower.
          grid: Flower's connection to the nodes.
          number: Number of the round, from 0.
          seconds: Time limit for replies and, after the first round, for nodes that are not connected.
        """
        model, seed = self._trainer.model, self._trainer.config.train.seed
        nodes = self._connected(grid, number, seconds)
        per_round = min(self.options.clients_per_round, len(nodes))
        sampling = Sampling(seed, len(nodes), per_round, self.options.client_sampling)
        chosen = [nodes[place] for place in sampling.round(number)[0]] if nodes else []
        state = [model.non_trainable_variables[place] for place in averaged_state(model)]
        arrays = [np.asarray(variable) for variable in [*model.trainable_variables, *state]]
        assert self._schedule is not None
        rate = float(self._schedule(tf.constant(number, tf.int64)))
        config = flwr.app.ConfigRecord({"round": number, "learning_rate": rate, "frozen": self._frozen})
        content = {"arrays": flwr.app.ArrayRecord(arrays), "config": config}
        messages = [
            flwr.app.Message(content=flwr.app.RecordDict(dict(content)), message_type="train", dst_node_id=node)
            for node in chosen
        ]
        self._counts["bytes_down"] += len(messages) * sum(array.nbytes for array in arrays)
        self._apply(self._answers(grid, messages, number, seconds) if messages else [], number)

    def _connected(self, grid: Any, number: int, seconds: float) -> list[int]:
        """Waits until enough nodes for a round are connected; returns all that are.

        The first round waits without a limit: an operator starts the nodes after the server. In later ones, nodes that
        are not connected again in time count as dropped out.
        """
        began, wanted, line_due = time.monotonic(), self.options.clients_per_round, 0.0
        while len(nodes := sorted(grid.get_node_ids())) < wanted:
            waited, missing = time.monotonic() - began, wanted - len(nodes)
            if number and waited >= seconds:
                self._counts["clients_dropped"] += missing
                _log.warning(
                    "round %d: %d of %d nodes are not connected after %g s, and count as dropped out",
                    *(number + 1, missing, wanted, seconds),
                )
                break
            if waited >= line_due:
                _log.warning("round %d: waiting for %d of %d nodes to connect", number + 1, missing, wanted)
                line_due += _LINE_SECONDS
            time.sleep(min(_POLL_SECONDS, seconds))
        return nodes

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
