"""The optimizers of one worker's share of the weights, and their state in a checkpoint.

Each replica has a plain Keras optimizer, built for variables that hold its pieces of the weights; the optimizer of a
worker's first replica also updates the weights that every worker updates. Elementwise optimizers get pieces as vectors,
cut anywhere; others get whole tensors. If layers are divided over a model axis, each place of a replica has its own
share, of the parts that its devices have (`PlaceShare`).
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from tfpar.checkpoint.names import state_without_counts
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.exchange import DevicesOfReplica
from tfpar.exchange import spec as specs
from tfpar.exchange.sharding.codecs import sharded_codec
from tfpar.exchange.sharding.shards import Piece
from tfpar.optim.block_update import combining_part
from tfpar.parallel.split import copies_of
from tfpar.parallel.topology import Topology
from tfpar.training.optimizer_spec import OptimizerSpec
from tfpar.training.sharding.place_share import Place, PlaceShare, can_be_in_pieces
from tfpar.training.sharding.replica_share import ReplicaShare, name_of
from tfpar.training.sharding.saved import SHARED, WEIGHTS, is_share

import keras
import numpy as np
import tensorflow as tf

_log = logging.getLogger(__name__)


class OwnShare:
    """This worker's share of the weights, divided among its replicas, with the optimizers that update it.

    Args:
      config: The experiment.
      topology: The topology of the run.
      variables: The model's trainable variables.
      spec: The optimizer.
      assigned: Indices of variables that the model's forward pass assigns.
      devices: Devices of this worker's replicas.
      divided: How the devices of a replica divide its weights; None if a replica has one device.

    Attributes:
      variables: The model's trainable variables.
      places: The shares of the places of a replica.
      scatters: Whether gradients go to their owners as they are computed.

    Raises:
      ConfigError: An optimizer or model that cannot be sharded.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        topology: Topology,
        variables: Sequence[keras.Variable],
        spec: OptimizerSpec,
        assigned: Sequence[int],
        devices: Sequence[str],
        divided: DevicesOfReplica | None = None,
    ) -> None:
        if tf.distribute.has_strategy():
            raise RuntimeError("make a worker's share outside of the strategy's scope, in which variables are mirrored")
        self.variables, self._shard = list(variables), config.train.shard
        self.check_assigned(assigned)
        self.scatters, self._micro_batches = config.train.shard == "gradients", config.train.accumulate_steps
        self._in_stages = topology.pipeline_devices > 1
        exchange = specs.parse(config.exchange.exchange if topology.data_workers > 1 else "none")
        self._keeps_exact = sharded_codec(exchange) is not None

        names: list[str] = []

        def make_optimizer() -> keras.optimizers.Optimizer:
            optimizer = spec.create(config)
            _check_optimizer(optimizer, config.train.shard)
            names.append(optimizer.name)
            optimizer.name = names[0]  # state is saved by it, and any device may be the one that saves
            return optimizer

        if topology.pipeline_spans_workers:
            _check_all_can_be_in_pieces(self.variables, config.train.shard)
        self._divided = divided
        self.places = [
            PlaceShare(place, self.variables, make_optimizer, topology, exchange)
            for place in _places(self.variables, devices, divided)
        ]

    @classmethod
    def of(
        cls,
        config: ExperimentConfig,
        topology: Topology,
        variables: Sequence[keras.Variable],
        spec: OptimizerSpec,
        assigned: Sequence[int],
        strategy: tf.distribute.Strategy,
        divided: DevicesOfReplica | None = None,
    ) -> OwnShare | None:
        """The share that `--shard` asks for; None for a single replica, which has all state."""
        if config.train.shard == "none" or (config.train.shard == "weights" and topology.replicas > 1):
            return None  # with sharded weights, the model itself holds parts
        told = topology.is_chief and config.monitor.verbose > 0
        if topology.replicas == 1:
            if told:
                _log.info("--shard=%s is not in use: a single replica has all of the state", config.train.shard)
            return None
        share = cls(config, topology, variables, spec, assigned, strategy.extended.worker_devices, divided)
        if told:
            _log.info("%s", share.describe())
            spec.tell_of_lost_state(f"--shard={config.train.shard} divides the state from the beginning")
        return share

    def check_assigned(self, assigned: Collection[int]) -> None:
        """Refuses models that assign weights themselves.

        Args:
          assigned: Indices of trainable variables that the model assigns: float8 layers, as is known before the first
            step, or a forward pass, as is known when a step is traced.

        Raises:
          ConfigError: There are any.
        """
        if assigned:
            raise ConfigError(
                f"--shard={self._shard}: the model assigns {self.variables[min(assigned)].path} in its forward pass "
                "(as SpectralNormalization does), so that no single worker can own it. Use --shard=none."
            )

    @property
    def replicas(self) -> list[ReplicaShare]:
        """What each device of this worker owns."""
        return [replica for place in self.places for replica in place.replicas]

    @property
    def optimizer(self) -> keras.optimizers.Optimizer:
        """The optimizer of the first device; all have its learning rate and its count of iterations."""
        return self.places[0].replicas[0].optimizer

    @property
    def optimizers(self) -> list[keras.optimizers.Optimizer]:
        """The optimizers of all devices of this worker."""
        return [replica.optimizer for replica in self.replicas]

    def scattered(self, program: int) -> list[PlaceShare | None]:
        """The place of each tensor that a replica sums over micro-batches if gradients go to their owners as they are
        computed: shards, and weights without an owner. None for tensors that only fill up.

        Args:
          program: The index of the replica's program, among those of this worker.
        """
        own = program % self.programs
        by_program: dict[int, list[PlaceShare | None]] = {}
        for place in self.places:
            by_program.setdefault(place.program, []).extend([place] * len(place.vectors))
        shards = by_program.get(own, [])
        filling = max(map(len, by_program.values())) - len(shards)
        return [*shards, *[None] * filling, *(place for place in self.places for _ in place.whole)]

    @property
    def programs(self) -> int:
        """Number of programs that the strategy runs for a replica on this worker."""
        return self._divided.program_count if self._divided else 1

    @property
    def can_compile_update(self) -> bool:
        """Whether XLA can compile the updates: not if the devices of a model axis put whole tensors together."""
        return all(place.elementwise or not place.divided for place in self.places)

    @property
    def whole(self) -> list[int]:
        """Indices of the variables that every worker updates."""
        return [place.indices[index] for place in self.places for index in place.whole]

    def describe(self) -> str:
        """One line on the state that the first replica keeps."""
        firsts = [place.replicas[0] for place in self.places]
        elements = sum(math.prod(variable.shape) for place in self.places for variable in place.variables)
        owned = sum(piece.size for first in firsts for piece in first.owned)
        state = sum(math.prod(variable.shape) * 4 for first in firsts for variable in first.optimizer.variables)
        elementwise = self.places[0].elementwise
        how = "cut anywhere" if elementwise else "as whole tensors, which this optimizer needs"
        what = "gradients and optimizer" if self.scatters else "optimizer"
        return (
            f"sharded {what}: this replica updates {owned:,} of {elements:,} weights ({how}) and keeps "
            f"{state / 2**20:.1f} MiB of optimizer state"
        )

    def exchanged(self) -> dict[str, Any]:
        """Arguments of `Exchange.build`."""
        micro_batches = self._micro_batches if self.scatters else 0
        if self._divided:
            shards = [place.vectors for place in self.places]
            return {"per_device": self._divided._replace(shards=shards, micro_batches=micro_batches)}
        return {"shards": self.places[0].vectors, "micro_batches": micro_batches}

    @property
    def xla_obstacle(self) -> str:
        """Why XLA cannot compile the passes; empty where it can."""
        if not self.scatters or self._in_stages:
            return ""  # a stage of a pipeline returns its gradients at once without XLA, too
        return "--shard=gradients sends gradients as they are computed, and an XLA program returns all of them at once"

    def shared_variables(self) -> list[keras.Variable]:
        """Variables of the optimizers that are the same on every worker; the first, of those that all places have."""
        first, *others = (place.replicas[0].common_variables() for place in self.places)
        known = {*map(name_of, first)}
        return [*first, *(variable for other in others for variable in other if name_of(variable) not in known)]

    def load_weights(self) -> None:
        """Sets the pieces to the current values of the model's weights."""
        for place in self.places:
            place.load_weights({})

    def export(self) -> dict[str, np.ndarray]:
        """The state of this worker's pieces, for its file of a checkpoint, by names that `whole_arrays` reads; never
        empty, because all workers of a run write such a file or none does."""
        return {SHARED: np.zeros(0, np.float32)} | {
            place.part_of(piece, variable).key(piece.begin, name): np.array(variable.numpy(), copy=True, order="C")
            for place, name, piece, variable, _ in self._state()
        }

    def restore(
        self,
        read: Callable[[str, int], np.ndarray | None] = lambda name, index: None,
        *,
        own: Mapping[str, np.ndarray] | None = None,
        exact: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        """Restores the state of the pieces; call it after the model's weights have been restored.

        Args:
          read: Returns the state of a whole weight by its name and the index of the weight; None if there is none.
          own: The export of a worker of the same rank, if it had the same share; then nothing else is read.
          exact: The owners' exact weights by index, if they differ from the model's.

        Raises:
          ConfigError: State is missing, or of another shape.
        """
        for place in self.places:
            place.load_weights(exact or {})
        shared = self.shared_variables()
        common, restored = {name_of(variable): variable for variable in shared}, {*map(id, shared)}
        for variable in itertools.chain(*(replica.common_variables() for replica in self.replicas)):
            if id(variable) not in restored:  # those of no weight, whose names are unique
                variable.assign(common[name_of(variable)].numpy())
        known = None if own is None else _by_key(own)
        wrong = []
        for place, name, piece, variable, fill in self._state():
            if known is not None:
                variable.assign(known[state_without_counts(place.part_of(piece, variable).key(piece.begin, name))])
            elif name != WEIGHTS:
                value = place.of_whole(read(name, place.parts[piece.index].index), piece, variable, fill)
                if value is None:
                    wrong.append(name)
                else:
                    variable.assign(value)
        if wrong:
            raise ConfigError(
                f"the checkpoint does not fit this optimizer: {', '.join(sorted(set(wrong))[:8])} missing or of "
                "another shape. Resume with the previous --optimizer, or start in another workdir with --warm_start."
            )

    def fits(self, own: Mapping[str, np.ndarray]) -> bool:
        """Whether a worker exported exactly the share that this one has."""
        shapes = {
            state_without_counts(place.part_of(piece, variable).key(piece.begin, name)): tuple(variable.shape)
            for place, name, piece, variable, _ in self._state()
        }
        return shapes == {key: array.shape for key, array in _by_key(own).items()}

    def _state(self) -> Iterator[tuple[PlaceShare, str, Piece, keras.Variable, float]]:
        """For everything that belongs to a piece: its place, its name for the whole weight, the piece, the variable,
        and the value that padding has."""
        for place in self.places:
            for name, piece, variable, fill in place.slots():
                yield place, f"optimizer/{self.optimizer.name}/{name}", piece, variable, fill
            if self._keeps_exact:  # other workers' copies of these weights lack the residuals of their payloads
                for replica in place.replicas:
                    for variable, piece in zip(replica.variables, replica.owned, strict=True):
                        yield place, WEIGHTS, piece, variable, 0.0


def _places(weights: Sequence[keras.Variable], devices: Sequence[str], divided: DevicesOfReplica | None) -> list[Place]:
    """The places of a replica.

    Args:
      weights: The model's trainable weights.
      devices: The devices on which the strategy of this worker runs programs.
      divided: How the devices of a replica divide its weights; None if a replica has one device.
    """
    if divided is None:
        return [Place(range(len(weights)), 0, devices)]
    count = divided.program_count
    places = []
    for indices, program in zip(divided.indices, divided.programs, strict=True):
        # On the devices of the place, which may be others than the strategy's; a place without weights needs none.
        copies = [copy.device for copy in copies_of(weights[indices[0]])] if indices else devices
        places.append(Place(indices, program, copies[program::count], one_of_several=True))
    return places


def _by_key(export: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of an export; without Keras' counts, which are others for the next optimizer of a process."""
    return {state_without_counts(name): array for name, array in export.items() if is_share(name) and name != SHARED}


def _check_all_can_be_in_pieces(weights: Sequence[keras.Variable], shard: str) -> None:
    """Refuses weights that every replica would update as a whole.

    Raises:
      ConfigError: Names one.
    """
    path = next((variable.path for variable in weights if not can_be_in_pieces(variable)), None)
    if path:
        raise ConfigError(
            f"--shard={shard}: {path} has a constraint, or is not float32, so that every replica updates it as a "
            "whole; pipelines over several workers cannot do that. Use --shard=none."
        )


def _check_optimizer(optimizer: keras.optimizers.Optimizer, shard: str) -> None:
    if part := combining_part(optimizer):
        raise ConfigError(
            f"--shard={shard}: {part} of {type(optimizer).__name__} may combine weights, of which each replica updates "
            "a share: results could change. Use --shard=none, or an optimizer of Keras."
        )
    for name in ("clipnorm", "global_clipnorm"):
        if getattr(optimizer, name, None):
            raise ConfigError(
                f"{name}={getattr(optimizer, name)} of the optimizer would apply to this worker's share alone. Leave "
                "it out with --shard; --clip_norm clips by the norm of all gradients."
            )
