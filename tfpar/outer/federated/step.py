"""The training step of a federation: one round. The clients of the round are spread over the replicas of all workers.

It replaces parts of the general step, `tfpar.training.step`: the movements of clients take the place of gradients, and
the server's optimizer applies them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from tfpar.outer.federated.population import RoundShare
from tfpar.outer.federated.round import COUNTS, ClientRound, Kept, RoundSums
from tfpar.outer.federated.server import Averaging
from tfpar.parallel import replica
from tfpar.parallel.compilation import compiled
from tfpar.precision import LossScale
from tfpar.training import sidecar
from tfpar.training.core import Core
from tfpar.training.objective import Batch, LocalSums, Tensors
from tfpar.training.seeds import step_seed
from tfpar.training.sidecar import Sidecar, is_applicable
from tfpar.training.step import TrainStep
from tfpar.training.step_loop import StepReport

import keras
import tensorflow as tf

# The number of examples that a round without clients reports: a round in which no client replies has not failed.
_NOBODY = 1e-6


@dataclasses.dataclass(frozen=True, eq=False)
class FederatedCore(Core):
    """`Core` that also reports the sums of a round."""

    @classmethod
    def of(cls, core: Core) -> FederatedCore:
        """Returns the core for the same model and objective."""
        return cls(**{field.name: getattr(core, field.name) for field in dataclasses.fields(core)})

    @property
    def local_variables(self) -> list[keras.Variable]:
        """State of the metrics that clients compute."""
        return super().metric_variables

    @property
    def metric_variables(self) -> list[Any]:
        """State of all metrics, and the sums of a round."""
        return [*self.local_variables, *[tf.TensorSpec([], tf.float32)] * len(COUNTS)]

    def metric_results(self, sums: Sequence[Any]) -> dict[str, Any]:
        """Returns metric values by name, the mean norm of the clients' updates, and the share that was clipped. Without
        clients, metrics have no value."""
        counts = dict(zip(COUNTS, map(float, sums[-len(COUNTS) :]), strict=True))
        clients = max(counts["clients"], 1.0)
        own = {"client_update_norm": counts["norms"] / clients, "clipped_clients": counts["clipped"] / clients}
        metrics = super().metric_results(sums[: -len(COUNTS)]) if counts["clients"] else {}
        return metrics | own | {"lost_clients": counts["lost"]}

    def evaluate_with_outputs(self, params: Tensors, state: Tensors, batch: Batch) -> tuple[LocalSums, Any]:
        """Evaluates as `Core` does; an evaluation counts no clients."""
        sums, outputs = super().evaluate_with_outputs(params, state, batch)
        return sums._replace(metrics=[*sums.metrics, *[tf.zeros([])] * len(COUNTS)]), outputs


class ClientMemory:
    """The state of clients between rounds, the same on every replica: one row per client, and one that is never read.

    Args:
      strategy: The running strategy.
      clients: Number of clients in the population, N.
      weights: Number of elements of the trainable weights, D; 0 without SCAFFOLD.
      residuals: Number of elements of a residual, E; 0 without error feedback.
    """

    def __init__(self, strategy: tf.distribute.Strategy, clients: int, weights: int, residuals: int) -> None:
        self.clients, self._sizes = clients, (weights, residuals)
        with strategy.scope():
            self.server = _made("server_variate", [weights])
            self.tables = [_made("variates", [clients + 1, weights]), _made("residuals", [clients + 1, residuals])]

    @property
    def variables(self) -> list[keras.Variable]:
        """Variables that a checkpoint must contain: those that are not empty."""
        return [each for each in (self.server, *self.tables) if 0 not in each.shape]

    def summed_elements(self, slots: int) -> int:
        """Returns the number of elements that replicas sum in a round, in which `store` takes rows of all of them.

        Args:
          slots: Number of slots for clients of all replicas, S.
        """
        return slots * sum(self._sizes)

    # In a replica context.

    def read(self, client: tf.Tensor) -> tuple[tf.Tensor, Kept]:
        """Returns the server's control variate, and the state of some clients.

        Args:
          client: Int32 `[C]`, -1 for none.
        """
        server, *tables = replica.read([self.server, *self.tables])
        return server, Kept(*(tf.gather(table, self._rows(client)) for table in tables))

    def store(self, share: RoundShare, kept: Kept, number: tf.Tensor, replicas: int) -> list[tf.Operation]:
        """Stores the new state of the clients of all replicas; returns the operations.

        The server's control variate moves by the mean change of the clients' control variates over the whole
        population, of which those of clients that took no part have not changed (Karimireddy et al. 2020, algorithm 1,
        line 17).

        Args:
          share: The clients of this replica.
          kept: The new state of these clients.
          number: Int32 scalar: index of this replica.
          replicas: Number of replicas of all workers.
        """
        server, *tables = replica.read([self.server, *self.tables])
        rows, new = self._rows(share.everyone), []
        for table, own, size in zip(tables, kept, self._sizes, strict=True):
            every = _of_all(own, number, replicas) if size else own
            new.append(tf.tensor_scatter_nd_update(table, rows[:, tf.newaxis], every) if size else table)
        if self._sizes[0]:
            valid = tf.cast(share.everyone >= 0, tf.float32)[:, tf.newaxis]
            change = (tf.gather(new[0], rows) - tf.gather(tables[0], rows)) * valid
            server += tf.reduce_sum(change, axis=0) / float(self.clients)
        return replica.assign(replica.own([self.server, *self.tables]), [server, *new])

    def _rows(self, client: tf.Tensor) -> tf.Tensor:
        return tf.where(client < 0, self.clients, client)


def _made(name: str, shape: Sequence[int]) -> keras.Variable:
    return keras.Variable(tf.zeros(shape), trainable=False, name=name, dtype="float32")


def _of_all(own: tf.Tensor, number: tf.Tensor, replicas: int) -> tf.Tensor:
    """Returns the rows `[R C, ...]` of all replicas, from the rows of this replica."""
    if replicas == 1:
        return own
    place = tf.one_hot(number, replicas)[:, tf.newaxis, tf.newaxis]
    spread = tf.reshape(place * own[tf.newaxis], [-1, own.shape[1]])
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, spread)


class RoundSidecar(Sidecar):
    """A `Sidecar` of a round, whose mean is not divided by what the clients' losses are divided by."""

    def should_apply(self, vector: tf.Tensor) -> tf.Tensor:
        """See `Sidecar`. A round without clients, too, is applied."""
        return is_applicable(vector)

    # What is averaged is divided by masses of clients, not by examples.
    decision = property(lambda self: self.should_apply, doc="See `Sidecar`.")


class FederatedStep(TrainStep):
    """A `TrainStep` that is a round.

    Args:
      clients: The work of the clients.
      averaging: Averages the clients' movements.
      memory: The state of the clients.
      *arguments: As for `TrainStep`, with the server's optimizer and the clients' learning rate schedule.
      **options: As for `TrainStep`; clients clip gradients themselves.
    """

    def __init__(
        self, clients: ClientRound, averaging: Averaging, memory: ClientMemory, *arguments: Any, **options: Any
    ) -> None:
        self._client_round, self._averaging, self._memory = clients, averaging, memory
        super().__init__(*arguments, **{**options, "clip_norm": 0.0})
        # The state of the model is a mean over clients, even if one replica has all of them.
        self.sidecar = RoundSidecar.of_core(self.core, max(2, self.replicas))

    def _make_programs(self) -> None:
        super()._make_programs()
        self._clients = compiled(self._client_round.run, self.plan.compiles_gradients)

    def _replica_step(
        self, batch: Any, step: tf.Tensor, lr_multiplier: tf.Tensor, loss_scale: LossScale, wants_norm: tf.Tensor | None
    ) -> StepReport:
        """Runs one round on one replica."""
        share, model = batch, self.core.model
        number = self._replica_number(tf.distribute.get_replica_context())
        params, state = replica.read(model.trainable_variables), replica.read(model.non_trainable_variables)
        variate, before = self._memory.read(share.client)
        rate, seed = self.learning_rate(step, lr_multiplier), step_seed(self._seed, step, tf.constant(0))
        sums, after = self._clients(params, state, share, rate, seed, variate, before)
        norm = self._own_norm(sums.movement)
        vector = Sidecar.flag(self._packed(sums), norm * float(self.replicas))
        computed = self._replica_clock([vector])
        vector, norm, exchanged, done = self._reduce_and_apply(
            sums.movement, vector, norm, state, {}, step, lr_multiplier, wants_norm
        )
        # A round that is not applied changes nothing that clients keep, either.
        kept = tf.nest.map_structure(functools.partial(tf.where, self.sidecar.should_apply(vector)), after, before)
        with tf.control_dependencies([done]):
            stored = self._memory.store(share, kept, number, self.replicas) if self._memory.variables else []
        with tf.control_dependencies([done, *stored]):
            report = tf.concat([[norm], self._front(vector)], axis=0)
        times = () if self.plan.single_xla_program else (computed, computed, exchanged, self.clock([report]))
        return StepReport(report, loss_scale, times)

    def _packed(self, sums: RoundSums) -> tf.Tensor:
        """Returns the sidecar without its flag, from the sums over the clients of this replica."""
        changes = [each for each, averaged in zip(sums.state, self.sidecar.averaged, strict=True) if averaged]
        front = tf.stack([tf.maximum(sums.count, _NOBODY), sums.loss])
        flat = [tf.reshape(each, [-1]) for each in [*sums.metrics, sums.counts, *changes]]
        return tf.concat([front, *flat], axis=0)

    def _front(self, vector: tf.Tensor) -> tf.Tensor:
        """Returns the front of the summed sidecar; the loss of a round without clients is NaN."""
        loss = tf.where(self._mass(vector) > 0.0, vector[sidecar.LOSS], float("nan"))
        return tf.tensor_scatter_nd_update(vector[: self.sidecar.report_length], [[sidecar.LOSS]], [loss])

    def _mass(self, vector: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the masses of all clients, from the summed sidecar."""
        return vector[self.sidecar.report_length - len(COUNTS)]

    def _factor_and_norm(self, vector: tf.Tensor, norm: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        factor = self._averaging.factor(self._mass(vector))
        return factor, norm * factor

    def _updated(self, params: Tensors, optimizer: Tensors, reduced: Any) -> tuple[Tensors, Tensors, Tensors]:
        """Returns the new weights of the server, state of its optimizer, and state of the model."""
        mean = self._averaging.mean(reduced.gradients, reduced.factor, reduced.step)
        new_params, new_optimizer = self._pure_apply(self.optimizer, optimizer, params, mean, None)
        # The sidecar divides by the number of examples, but the mean over clients divides by the sum of the masses.
        mass = tf.maximum(self._mass(reduced.vector), _NOBODY)
        vector = tf.tensor_scatter_nd_update(reduced.vector, [[sidecar.COUNT]], [mass])
        return new_params, new_optimizer, self._without_seeds(self.sidecar.state(vector, reduced.state))


def step_factory(clients: ClientRound, averaging: Averaging, memory: ClientMemory) -> Any:
    """Returns a function with the arguments of `TrainStep` that creates a `FederatedStep`."""
    return functools.partial(FederatedStep, clients, averaging, memory)
