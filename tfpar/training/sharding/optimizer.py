"""The optimizers of one worker's share of the weights, and their state in a checkpoint.

Each replica has a plain Keras optimizer, built for variables that hold its pieces of the weights; the optimizer of a
worker's first replica also updates the weights that every worker updates. Elementwise optimizers get pieces as vectors,
cut anywhere; others get whole tensors.

A checkpoint holds the state of pieces in the files of their owners. A name consists of the index of the weight, the
first element of the piece, and the name that this state has without shards. Any number of workers can read it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfpar.config import ConfigError, ExperimentConfig
from tfpar.exchange import buckets
from tfpar.exchange import spec as specs
from tfpar.exchange.sharding.reducer import sharded_codec
from tfpar.exchange.sharding.shards import Piece, by_tensor, evenly, joined
from tfpar.optim.optimizers import ELEMENTWISE
from tfpar.parallel.topology import Topology
from tfpar.training.optimizer_spec import OptimizerSpec

import keras
import numpy as np
import tensorflow as tf

_log = logging.getLogger(__name__)

_MARK = re.compile(r"\.at(\d+)")  # in the name of a piece: its first element
_PREFIX = "shard/"
_WEIGHTS = "weights"


class ReplicaShare:
    """What one replica owns, with the optimizer that updates it, on its device.

    Args:
      optimizer: Not yet built.
      device: The device of the replica.
      owned: Its pieces of each vector.
      make: Creates the variable of a piece.
      whole: Variables that every worker updates, if this replica updates them for its worker.

    Attributes:
      optimizer: Built for the pieces of all vectors, one after the other, and then for `whole`.
      device: The device of the replica.
      owned: Its pieces.
      variables: The variables that hold them.
      places: For each of these variables its vector, and its index among the worker's pieces of that vector.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        device: str,
        owned: Sequence[tuple[tuple[int, int], Piece]],
        make: Callable[[Piece], keras.Variable],
        whole: Sequence[keras.Variable],
    ) -> None:
        self.device = device
        self.owned = [piece for _, piece in owned]
        self.places = [place for place, _ in owned]
        with tf.device(device):
            self.variables = [make(piece) for piece in self.owned]
            if self.variables or whole:
                optimizer.build([*self.variables, *whole])
        self.optimizer = optimizer
        self._whole = len(whole)

    def common_variables(self) -> list[keras.Variable]:
        """Variables of the optimizer that belong to no piece, in order."""
        return [variable for variable in self.optimizer.variables if self._slot(variable) is None]

    def slots(self) -> Iterator[tuple[str, Piece, keras.Variable]]:
        """For each slot of a piece: its name for the whole weight without the optimizer's prefix, the piece and the
        variable."""
        for variable in self.optimizer.variables:
            if slot := self._slot(variable):
                place, name = slot
                yield _MARK.sub("", name), self.owned[place], variable

    def _slot(self, variable: keras.Variable) -> tuple[int, str] | None:
        """The index of the piece that a variable of the optimizer belongs to, and its name; None if it is of none."""
        name = _name(variable)
        place, attribute = self._in_lists.get(id(variable), (-1, ""))
        if place < 0 and _MARK.search(name):
            starts = [name.startswith(_reference(piece)) for piece in self.variables]
            place = starts.index(True) if any(starts) else -1
        if not 0 <= place < len(self.variables):
            return None
        # Keras 3.15 names most variables of an optimizer by the path of the weight that they belong to. Adafactor's
        # rows and columns have only its name, both the same.
        start = _reference(self.variables[place])
        return place, name if name.startswith(start) else start + attribute.strip("_")

    @functools.cached_property
    def _in_lists(self) -> dict[int, tuple[int, str]]:
        """For variables in attributes of the optimizer that have one for each weight, by `id`: the index of the weight,
        and the name of the attribute."""
        count = len(self.variables) + self._whole
        every = [*map(id, self.optimizer.variables)]
        lists = {
            name: value
            for name, value in vars(self.optimizer).items()
            if isinstance(value, list) and len(value) == count and [*map(id, value)] != every
        }
        return {id(variable): (place, name) for name, value in lists.items() for place, variable in enumerate(value)}


class OwnShare:
    """This worker's share of the weights, divided among its replicas, with the optimizers that update it.

    Args:
      config: The experiment.
      topology: The topology of the run.
      variables: The model's trainable variables.
      spec: The optimizer.
      assigned: Indices of variables that the model's forward pass assigns.
      devices: Devices of this worker's replicas.

    Attributes:
      variables: The model's trainable variables.
      vectors: The tensors in shards.
      replicas: What each replica of this worker owns.
      whole: Indices of the variables that every worker updates, on its first replica.
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
    ) -> None:
        if tf.distribute.has_strategy():
            raise RuntimeError("make a worker's share outside of the strategy's scope, in which variables are mirrored")
        if assigned:
            raise ConfigError(
                f"--shard={config.train.shard}: the model assigns {variables[assigned[0]].path} in its forward pass "
                "(as SpectralNormalization does), so that no single worker can own it. Use --shard=none."
            )
        self.variables = list(variables)
        self.scatters, self._micro_batches = config.train.shard == "gradients", config.train.accumulate_steps
        exchange = specs.parse(config.exchange.exchange if topology.workers > 1 else "none")
        codec = sharded_codec(exchange)
        self._keeps_exact = codec is not None
        optimizers = [spec.create(config) for _ in devices]
        _check_optimizer(optimizers[0])
        self._elementwise = type(optimizers[0]) in ELEMENTWISE
        sizes = [math.prod(variable.shape) for variable in variables]
        sharded = [index for index, variable in enumerate(variables) if self._is_sharded(variable, exchange)]
        self.whole = [index for index in range(len(variables)) if index not in set(sharded)]
        layout: dict[str, int] = {"block": 1 if codec is None else codec.block, "per_worker": len(devices)}
        if self._elementwise:
            layout["bucket_bytes"] = exchange.options.bucket_bytes if codec else buckets.DENSE_BUCKET_BYTES
        divide = evenly if self._elementwise else by_tensor
        self.vectors = divide(sharded, sizes, topology.replicas, **layout)
        self.replicas = []
        counts = [0] * len(self.vectors)
        for number, (optimizer, device) in enumerate(zip(optimizers, devices, strict=True)):
            owned = []
            for vector, each in enumerate(self.vectors):
                for piece in each.pieces(topology.worker * len(devices) + number):
                    owned.append(((vector, counts[vector]), piece))
                    counts[vector] += 1
            whole = [] if number else [variables[index] for index in self.whole]
            self.replicas.append(ReplicaShare(optimizer, device, owned, self._piece_variable, whole))

    @classmethod
    def of(
        cls,
        config: ExperimentConfig,
        topology: Topology,
        variables: Sequence[keras.Variable],
        spec: OptimizerSpec,
        assigned: Sequence[int],
        strategy: tf.distribute.Strategy,
    ) -> OwnShare | None:
        """The share that `--shard` asks for; None for a single replica, which has all state."""
        if config.train.shard == "none" or (config.train.shard == "weights" and topology.replicas > 1):
            return None  # with sharded weights, the model itself holds parts
        told = topology.is_chief and config.monitor.verbose > 0
        if topology.replicas == 1:
            if told:
                _log.info("--shard=%s is not in use: a single replica has all of the state", config.train.shard)
            return None
        share = cls(config, topology, variables, spec, assigned, strategy.extended.worker_devices)
        if told:
            _log.info("%s", share.describe())
        return share

    @property
    def optimizer(self) -> keras.optimizers.Optimizer:
        """The optimizer of the first replica; all have its learning rate."""
        return self.replicas[0].optimizer

    def describe(self) -> str:
        """One line on the state that the first replica keeps."""
        first = self.replicas[0]
        elements = sum(math.prod(variable.shape) for variable in self.variables)
        owned = sum(piece.size for piece in first.owned)
        state = sum(math.prod(variable.shape) * 4 for variable in first.optimizer.variables)
        how = "cut anywhere" if self._elementwise else "as whole tensors, which this optimizer needs"
        what = "gradients and optimizer" if self.scatters else "optimizer"
        return (
            f"sharded {what}: this replica updates {owned:,} of {elements:,} weights ({how}) and keeps "
            f"{state / 2**20:.1f} MiB of optimizer state"
        )

    def exchanged(self) -> dict[str, Any]:
        """Arguments of `Exchange.build`."""
        return {"shards": self.vectors, "micro_batches": self._micro_batches if self.scatters else 0}

    @property
    def xla_obstacle(self) -> str:
        """Why XLA cannot compile the passes; empty where it can."""
        if not self.scatters:
            return ""
        return "--shard=gradients sends gradients as they are computed, and an XLA program returns all of them at once"

    def shared_variables(self) -> list[keras.Variable]:
        """Variables of the optimizer that are the same on every worker."""
        return self.replicas[0].common_variables()

    def load_weights(self, exact: Mapping[int, np.ndarray] | None = None) -> None:
        """Sets the pieces to the current values of the model's weights, or to those of `exact` by index."""
        for replica in self.replicas:
            for variable, piece in zip(replica.variables, replica.owned, strict=True):
                known = None if exact is None else exact.get(piece.index)
                whole = self.variables[piece.index].numpy() if known is None else known
                variable.assign(_part(whole, piece, variable.shape))

    def export(self) -> dict[str, np.ndarray]:
        """The state of this worker's pieces, for its file of a checkpoint, by names that `whole_arrays` reads."""
        return {
            _key(name, piece): np.array(variable.numpy(), copy=True, order="C")
            for name, piece, variable in self._state()
        }

    def restore(
        self,
        arrays: Mapping[str, np.ndarray],
        own: Mapping[str, np.ndarray] | None,
        exact: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        """Restores the state of the pieces; call it after the model's weights have been restored.

        Args:
          arrays: State of whole weights by name.
          own: The export of a worker of the same rank, if it had the same share; then nothing else is read.
          exact: The owners' exact weights by index, if they differ from the model's.

        Raises:
          ConfigError: State is missing, or of another shape.
        """
        self.load_weights(exact or {})
        common = {_name(variable): variable for variable in self.replicas[0].common_variables()}
        for replica in self.replicas[1:]:  # which have only those of no weight, whose names are unique
            for variable in replica.common_variables():
                variable.assign(common[_name(variable)].numpy())
        wrong = []
        for name, piece, variable in self._state():
            if own is not None:
                variable.assign(own[_key(name, piece)])
                continue
            if name == _WEIGHTS:
                continue
            whole = arrays.get(name)
            if whole is not None and whole.size == math.prod(self.variables[piece.index].shape):
                whole = _part(whole, piece, variable.shape)
            if whole is not None and tuple(whole.shape) == tuple(variable.shape):
                variable.assign(whole)
            else:
                wrong.append(name)
        if wrong:
            raise ConfigError(
                f"the checkpoint does not fit this optimizer: {', '.join(sorted(set(wrong))[:8])} missing or of "
                "another shape. Resume with the previous --optimizer, or start in another workdir with --warm_start."
            )

    def fits(self, own: Mapping[str, np.ndarray]) -> bool:
        """Whether a worker exported exactly the share that this one has."""
        shapes = {_key(name, piece): tuple(variable.shape) for name, piece, variable in self._state()}
        return shapes == {name: array.shape for name, array in own.items() if is_share(name)}

    def _state(self) -> Iterator[tuple[str, Piece, keras.Variable]]:
        """The name for the whole weight, the piece and the variable, for everything that belongs to a piece."""
        for replica in self.replicas:
            for name, piece, variable in replica.slots():
                yield f"optimizer/{self.optimizer.name}/{name}", piece, variable
            if self._keeps_exact:  # other workers' copies of these weights lack the residuals of their payloads
                for variable, piece in zip(replica.variables, replica.owned, strict=True):
                    yield _WEIGHTS, piece, variable

    def _is_sharded(self, variable: keras.Variable, exchange: specs.Spec) -> bool:
        large = exchange.options.is_compressible(tf.TensorShape(variable.shape))
        return large and variable.dtype == "float32" and variable.constraint is None

    def _piece_variable(self, piece: Piece) -> keras.Variable:
        weight = self.variables[piece.index]
        *scopes, name = weight.path.split("/")
        value = _part(weight.numpy(), piece, [piece.size] if self._elementwise else weight.shape)
        with contextlib.ExitStack() as stack:
            for scope in scopes:  # the paths determine which weights are decayed
                stack.enter_context(keras.name_scope(scope, deduplicate=False))
            return keras.Variable(tf.constant(value), dtype=weight.dtype, name=f"{name}.at{piece.begin}")


def whole_arrays(exports: Sequence[Mapping[str, np.ndarray]], shapes: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """State of whole weights by name, assembled from the exports of all workers; exact weights under `shard/INDEX`.

    Args:
      exports: The export of each worker.
      shapes: Shapes of the weights.
    """
    parts: dict[tuple[str, int], dict[int, np.ndarray]] = {}
    for export in exports:
        for key, array in export.items():
            if key.startswith(_PREFIX):
                index, begin, name = key.removeprefix(_PREFIX).split("/", 2)
                parts.setdefault((name, int(index)), {})[int(begin)] = array
    return {
        name if name != _WEIGHTS else f"{_PREFIX}{index}": joined(found, shapes[index])
        for (name, index), found in parts.items()
    }


def is_share(name: str) -> bool:
    """Whether an array of a worker's file belongs to its share of the optimizer state."""
    return name.startswith(_PREFIX)


def take_exact_weights(arrays: dict[str, np.ndarray]) -> dict[int, np.ndarray]:
    """Removes the owners' exact weights from the result of `whole_arrays`, and returns them by index."""
    return {int(name.removeprefix(_PREFIX)): arrays.pop(name) for name in list(arrays) if is_share(name)}


def _check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    for name in ("clipnorm", "global_clipnorm"):
        if getattr(optimizer, name, None):
            raise ConfigError(
                f"{name}={getattr(optimizer, name)} of the optimizer would apply to this worker's share alone. Leave "
                "it out with --shard; --clip_norm clips by the norm of all gradients."
            )


def _key(name: str, piece: Piece) -> str:
    return f"{_PREFIX}{piece.index}/{piece.begin}/{name}"


def _part(array: np.ndarray, piece: Piece, shape: Sequence[int]) -> np.ndarray:
    return np.asarray(array).reshape(-1)[piece.begin : piece.end].reshape(shape)


def _name(variable: keras.Variable) -> str:
    """The name of an optimizer's variable without the optimizer's prefix."""
    return variable.path.partition("/")[2]


def _reference(piece: keras.Variable) -> str:
    return piece.path.replace("/", "_") + "_"
