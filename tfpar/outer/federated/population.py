"""The population of clients: the examples of each client, and the input of each replica in a round.

Shapes: R replicas of all workers, C clients of a replica, M examples of all clients of a replica in the largest round,
at most T local steps, B examples of a step, S = R C slots for clients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from tfpar.config import ConfigError, ExperimentConfig, FederatedConfig
from tfpar.inputs import Source, structures
from tfpar.inputs.memory import read_labels
from tfpar.inputs.source import CLASSIFICATION
from tfpar.outer.federated import partition, sampling
from tfpar.outer.federated.client_update import ClientData

import numpy as np
import tensorflow as tf


class RoundShare(NamedTuple):
    """The clients of a round that one replica trains.

    Attributes:
      data: The examples of all its clients, one client after the other, and for each client `order`, `[C, T, B]`, and
        `steps`, `[C]`.
      mass: Float32 `[C]`: the weight of each client in the mean.
      client: Int32 `[C]`: the number of each client; -1 for empty slots, which come last.
      everyone: Int32 `[S]`: `client` of all replicas.
    """

    data: ClientData
    mass: tf.Tensor
    client: tf.Tensor
    everyone: tf.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Population:
    """Clients with their examples.

    Attributes:
      source: All training examples.
      options: The options of federated averaging.
      seed: `--seed`.
      shuffle: Whether clients use their examples in random order.
      parts: For each client, the indices of its training examples, int64.
      held: For each client, the indices of the examples that are held out for its evaluation, int64.
    """

    source: Source
    options: FederatedConfig
    seed: int
    shuffle: bool
    parts: list[np.ndarray]
    held: list[np.ndarray]

    @classmethod
    def of(cls, source: Source, config: ExperimentConfig) -> Population:
        """Divides the training examples among clients.

        Args:
          source: The training examples.
          config: The configuration; its section `federated` determines the division.

        Raises:
          ConfigError: The examples cannot be divided in this way, or no client would take part in any round.
        """
        options = config.federated
        assert options is not None
        if source.skip:
            raise ConfigError(
                f"{source.info.name}: on_bad_record='skip' does not work with federated averaging: a client with a bad "
                "example would not be averaged at all. Remove bad examples, and leave it out."
            )
        seed = config.train.seed
        parts = _parts(source, options, seed)
        if len(parts) < options.clients_per_round:
            raise ConfigError(
                f"--clients_per_round={options.clients_per_round} is more than the {len(parts)} clients that "
                f"--partition={options.partition} makes of {source.info.name}. Give at most as many."
            )
        empty = sum(not len(part) for part in parts)
        if empty:
            raise ConfigError(
                f"--clients={options.clients}: {empty} of the clients would have no example, as {source.info.name} has "
                f"{source.info.num_examples} training examples. Give fewer clients."
            )
        held = [np.zeros(0, np.int64)] * len(parts)
        if options.client_holdout:
            parts, held = partition.hold_out(parts, options.client_holdout, seed)
        made = cls(source, options, seed, config.input.shuffle, parts, held)
        # Who takes part depends on the seed alone, so that this is known before anything is trained.
        if not any(len(made.sampling.round(number)[0]) for number in range(options.rounds)):
            raise ConfigError(
                f"--client_dropout={options.client_dropout:g} with --rounds={options.rounds} and --clients_per_round="
                f"{options.clients_per_round}: no client takes part in any round, so nothing would be learned. Draw "
                "more clients, train for more rounds, or let fewer drop out."
            )
        return made

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.parts)

    @property
    def sampling(self) -> sampling.Sampling:
        """The method that draws the clients of a round."""
        options = self.options
        return sampling.Sampling(
            self.seed, self.clients, options.clients_per_round, options.client_sampling, options.client_dropout
        )

    def masses(self, clients: np.ndarray) -> np.ndarray:
        """Returns the weights of some clients in the mean, float32."""
        if self.options.is_uniform:
            return np.ones(len(clients), np.float32)
        return np.array([len(self.parts[client]) for client in clients], np.float32)

    def describe(self) -> str:
        """Returns a few lines for the input report."""
        sizes = [len(part) for part in self.parts]
        options = self.options
        drawn = f"{options.clients_per_round} of {self.clients} clients a round ({options.client_sampling})"
        lost = f", of which {options.client_dropout:.0%} drop out" if options.client_dropout else ""
        return (
            f"{self.source.info.name}: {sum(sizes)} examples on {self.clients} clients ({options.partition}), "
            f"{min(sizes)} to {max(sizes)} each, {np.median(sizes):g} in the median\n"
            f"{drawn}{lost}, {options.local_epochs} local epochs in steps of {options.client_batch}"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class RoundElements:
    """The input of a worker's replicas in each round.

    Attributes:
      population: The clients.
      replicas: Number of replicas of all workers, R.
      slots: Number of clients per replica, C.
      rounds: Number of rounds. No client takes part in later ones, which tf.data may prepare.
      rows: Number of examples per replica, M. Shorter shares are padded, so that only one shape is traced.
      fill: Whether short batches are filled, because the model needs whole batches.
    """

    population: Population
    replicas: int
    slots: int
    rounds: int
    rows: int
    fill: bool

    @classmethod
    def of(cls, population: Population, replicas: int, rounds: int, *, fill: bool) -> RoundElements:
        """Returns the input for a run of this many rounds."""
        slots, sizes = -(-population.sampling.most(rounds) // replicas), np.array([0, *map(len, population.parts)])
        tables = (_dealt(population, number, slots, replicas) for number in range(rounds))
        rows = max(1, *(int(sizes[table + 1].sum(axis=0).max()) for table in tables))
        return cls(population, replicas, slots, rounds, rows, fill)

    def dataset(self, worker: int, local_replicas: int | None, start: int) -> tf.data.Dataset:
        """Returns a data set without end: one `RoundShare` per round and local replica, in order.

        Args:
          worker: Index of the input pipeline.
          local_replicas: Number of replicas of this worker.
          start: The first round.
        """
        local = local_replicas or self.replicas
        first, slots = worker * local, self.slots
        shapes = ([None], [slots, *self._steps_and_batch], [slots], [slots], [slots], [slots * self.replicas])
        types = (tf.int64, tf.int32, tf.int32, tf.float32, tf.int32, tf.int32)
        signature = tuple(map(tf.TensorSpec, shapes, types))

        def rounds() -> Iterator[tuple[np.ndarray, ...]]:
            number = start
            while True:
                yield from self.shares(number, range(first, first + local))
                number += 1

        self.population.source.load()
        chosen = tf.data.Dataset.from_generator(rounds, output_signature=signature)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
        return chosen.map(self._fetch).prefetch(2 * local).with_options(options)

    @property
    def _steps_and_batch(self) -> tuple[int, int]:
        """Returns T and B."""
        options = self.population.options
        most = max(map(len, self.population.parts))
        return options.local_epochs * -(-most // options.client_batch), options.client_batch

    def shares(self, number: int, replicas: range) -> Iterator[tuple[np.ndarray, ...]]:
        """Yields, for each replica, the indices of its clients' examples, and order, steps, mass, client, everyone."""
        population, options, slots = self.population, self.population.options, self.slots
        steps, batch = self._steps_and_batch
        table = np.full([slots, self.replicas], -1, np.int32)
        if number < self.rounds:
            table = _dealt(population, number, slots, self.replicas)
        for replica in replicas:
            own, count = table[:, replica], 0
            indices = [np.zeros(0, np.int64)]
            order, lengths = np.full([slots, steps, batch], -1, np.int32), np.zeros(slots, np.int32)
            for place, client in enumerate(own[own >= 0]):
                part = population.parts[client]
                rows = sampling.local_order(
                    *(population.seed, number, int(client), len(part)),
                    epochs=options.local_epochs,
                    batch=batch,
                    shuffle=population.shuffle,
                    fill=self.fill,
                )
                order[place, : len(rows)], lengths[place] = np.where(rows < 0, -1, rows + count), len(rows)
                indices.append(part)
                count += len(part)
            mass = np.zeros(slots, np.float32)
            mass[own >= 0] = population.masses(own[own >= 0])
            yield np.concatenate(indices), order, lengths, mass, own, table.T.reshape(-1)

    def _fetch(self, indices: tf.Tensor, *others: tf.Tensor) -> RoundShare:
        order, lengths, mass, own, everyone = others

        def padded(value: tf.Tensor) -> tf.Tensor:
            missing = tf.zeros([self.rows - tf.shape(value)[0], *value.shape[1:]], value.dtype)
            return tf.ensure_shape(tf.concat([value, missing], axis=0), [self.rows, *value.shape[1:]])

        x, y = tf.nest.map_structure(padded, self.population.source.fetch(indices))
        weights = padded(tf.ones(tf.shape(indices)))
        return RoundShare(ClientData(x, y, weights, order, lengths), mass, own, everyone)


def _dealt(population: Population, number: int, slots: int, replicas: int) -> np.ndarray:
    """Returns the clients of a round on each replica, int32 `[C, R]`; -1 for empty slots."""
    clients = population.sampling.round(number)[0]
    sizes = np.array([len(population.parts[client]) for client in clients], np.int64)
    table = np.full([slots, replicas], -1, np.int32)
    # Deals out the largest clients first, so that all replicas have about the same number of steps.
    table.reshape(-1)[: len(clients)] = clients[np.argsort(-sizes, kind="stable")]
    return table


def _parts(source: Source, options: FederatedConfig, seed: int) -> list[np.ndarray]:
    """Returns the examples of each client, divided according to `--partition`."""
    kind, number = options.parts()
    if kind == "iid":
        return partition.iid(source.info.num_examples, options.clients, seed)
    if kind == "by_file":
        if not source.info.files:
            raise ConfigError(
                f"--partition=by_file: {source.info.name} has no files. Use iid, dirichlet:ALPHA or by_class:N."
            )
        return [part for part in partition.by_file(source.info.records_per_file) if len(part)]
    labels = class_labels(source, options.partition)
    if kind == "dirichlet":
        return partition.dirichlet(labels, options.clients, number, seed)
    return partition.by_class(labels, options.clients, int(number), seed)


def class_labels(source: Source, text: str) -> np.ndarray:
    """Returns the classes of all examples, int64 `[n]`.

    Args:
      source: The examples.
      text: `--partition`, for error messages.

    Raises:
      ConfigError: Examples do not have one class each, or one cannot be read.
    """
    info = source.info
    one = structures.is_single(info.target_spec) and not info.target_spec.shape.rank
    if info.task != CLASSIFICATION or not one or not info.target_spec.dtype.is_integer:
        raise ConfigError(
            f"--partition={text} needs examples with one class each, which {info.name} has not. Use iid or by_file."
        )
    return read_labels(source)


def bytes_of_round(clients: int, lost: int, *, up: int, down: int) -> tuple[int, int]:
    """Returns the bytes that the clients of a round send, and the bytes that they receive.

    Args:
      clients: Number of clients that take part.
      lost: Number of clients that received the weights and dropped out.
      up: Bytes that one client sends.
      down: Bytes that one client receives.
    """
    return clients * up, (clients + lost) * down
