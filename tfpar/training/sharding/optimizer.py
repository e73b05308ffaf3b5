"""The optimizer of one worker's share of the weights, and its state in a checkpoint.

A worker's optimizer is a plain Keras optimizer, built for variables that hold the worker's pieces of the weights, and
for the weights that every worker updates. Optimizers that update every element by itself get pieces as vectors, cut
anywhere; others get whole tensors.

A checkpoint holds the state of pieces in the files of their owners, under names of the whole: index of the weight,
first element, and the name that the state of the whole weight has without shards. Any number of workers reads it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from tfpar.config import ConfigError, ExperimentConfig
from tfpar.exchange import buckets
from tfpar.exchange import spec as specs
from tfpar.exchange.sharded import sharded_codec
from tfpar.exchange.shards import Piece, by_tensor, evenly, joined
from tfpar.parallel.topology import Topology
from tfpar.training.optimizer_spec import OptimizerSpec

import keras
import numpy as np
import tensorflow as tf

_log = logging.getLogger(__name__)

# Keras' optimizers that update every element from its own gradient and state alone (3.15).
_ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.RMSprop,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
)
_MARK = re.compile(r"\.at(\d+)")  # in the name of a piece: its first element
_PREFIX = "shard/"
_WEIGHTS = "weights"
# Where nothing is encoded: a smaller tensor travels with the sidecar, and every worker updates it.
_MIN_ELEMENTS = 1024


class OwnShare:
    """This worker's share of the weights, with the optimizer that updates it.

    Args:
      config: The experiment.
      topology: How replicas lie on workers.
      variables: The model's trainable variables.
      spec: The optimizer.
      assigned: Indices of variables that the model's forward pass assigns.
      device: Where the share lives.

    Attributes:
      variables: The model's trainable variables.
      optimizer: Built for `pieces` and then `whole`.
      vectors: The tensors in shards.
      pieces: For each vector, variables that hold this worker's pieces.
      whole: Indices of the variables that every worker updates.

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
        device: str,
    ) -> None:
        if assigned:
            raise ConfigError(
                f"--shard={config.train.shard}: the model assigns {variables[assigned[0]].path} in its forward pass "
                "(as SpectralNormalization does), so that no single worker can own it. Use --shard=none."
            )
        self.variables = list(variables)
        exchange = specs.parse(config.exchange.exchange)
        codec = sharded_codec(exchange)
        self._keeps_exact = codec is not None
        with _outside_of_strategies(), tf.device(device):
            optimizer = spec.create(config)
            _check_optimizer(optimizer)
            self.elementwise = isinstance(optimizer, _ELEMENTWISE) and type(optimizer) in _ELEMENTWISE
            sizes = [math.prod(variable.shape) for variable in variables]
            sharded = [index for index, variable in enumerate(variables) if self._is_sharded(variable, exchange)]
            self.whole = [index for index in range(len(variables)) if index not in set(sharded)]
            block = 1 if codec is None else codec.block
            if self.elementwise:
                limit = exchange.options.bucket_bytes if exchange.compresses else buckets.DENSE_BUCKET_BYTES
                self.vectors = evenly(sharded, sizes, topology.workers, block=block, bucket_bytes=limit)
            else:
                self.vectors = by_tensor(sharded, sizes, topology.workers, block=block)
            self._owned = [vector.pieces(topology.worker) for vector in self.vectors]
            self.pieces = [[self._piece_variable(piece) for piece in pieces] for pieces in self._owned]
            optimizer.build([*self.all_pieces, *(variables[index] for index in self.whole)])
        self.optimizer = optimizer

    @property
    def all_pieces(self) -> list[keras.Variable]:
        """The variables that hold this worker's pieces, one vector after the other."""
        return [variable for variables in self.pieces for variable in variables]

    @classmethod
    def of(
        cls,
        config: ExperimentConfig,
        topology: Topology,
        variables: Sequence[keras.Variable],
        spec: OptimizerSpec,
        assigned: Sequence[int],
        device: str,
    ) -> OwnShare | None:
        """The share that `--shard` asks for, None where every worker, or the only one, has all."""
        if config.train.shard == "none":
            return None
        told = topology.is_chief and config.monitor.verbose > 0
        if topology.workers == 1:
            if told:
                _log.info("--shard=%s is not in use: a single worker has all of the state", config.train.shard)
            return None
        share = cls(config, topology, variables, spec, assigned, device)
        if told:
            _log.info("%s", share.describe())
        return share

    def describe(self) -> str:
        """One line: what this worker keeps."""
        elements = sum(math.prod(variable.shape) for variable in self.variables)
        owned = sum(piece.size for piece in self._all_owned)
        state = sum(math.prod(variable.shape) * 4 for variable in self.optimizer.variables)
        how = "cut anywhere" if self.elementwise else "as whole tensors, which this optimizer looks at"
        return (
            f"sharded optimizer: this worker updates {owned:,} of {elements:,} weights ({how}) and keeps "
            f"{state / 2**20:.1f} MiB of optimizer state"
        )

    def shared_variables(self) -> list[keras.Variable]:
        """Variables of the optimizer that are the same on every worker."""
        return [variable for variable in self.optimizer.variables if not _MARK.search(variable.path)]

    def load_weights(self) -> None:
        """Gives the pieces the values that the model's weights have now."""
        for variable, piece in zip(self.all_pieces, self._all_owned, strict=True):
            variable.assign(_part(self.variables[piece.index].numpy(), piece, variable.shape))

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
        """Takes up the state of its pieces; after the model's weights have been restored.

        Args:
          arrays: State of whole weights by name.
          own: What a worker of the same rank exported, if it had the same share; nothing else is read then.
          exact: The owners' exact weights by index, where they are not the model's.

        Raises:
          ConfigError: State is missing, or of another shape.
        """
        self.load_weights()
        wrong = []
        for name, piece, variable in self._state():
            if own is not None:
                variable.assign(own[_key(name, piece)])
                continue
            whole = (exact or {}).get(piece.index) if name == _WEIGHTS else arrays.get(name)
            if whole is not None and whole.size == math.prod(self.variables[piece.index].shape):
                whole = _part(whole, piece, variable.shape)
            if whole is not None and tuple(whole.shape) == tuple(variable.shape):
                variable.assign(whole)
            elif name != _WEIGHTS:
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

    @property
    def _all_owned(self) -> list[Piece]:
        return [piece for pieces in self._owned for piece in pieces]

    def _state(self) -> Iterator[tuple[str, Piece, keras.Variable]]:
        """Name of the whole, piece and variable, of every variable that belongs to a piece."""
        pieces = dict(zip([_reference(each) for each in self.all_pieces], self._all_owned, strict=True))
        for variable in self.optimizer.variables:
            if _MARK.search(variable.path):
                # Keras 3.15 names a variable of an optimizer by the path of the weight that it belongs to.
                own_name = variable.path.rpartition("/")[2]
                [piece] = [found for name, found in pieces.items() if own_name.startswith(name)]
                yield f"optimizer/{_MARK.sub('', variable.path)}", piece, variable
        if self._keeps_exact:  # what other workers have of these weights lacks what payloads left out
            for variable, piece in zip(self.all_pieces, self._all_owned, strict=True):
                yield _WEIGHTS, piece, variable

    def _is_sharded(self, variable: keras.Variable, exchange: specs.Spec) -> bool:
        shape = tf.TensorShape(variable.shape)
        large = (
            exchange.options.is_compressible(shape) if exchange.compresses else shape.num_elements() >= _MIN_ELEMENTS
        )
        return large and variable.dtype == "float32" and variable.constraint is None

    def _piece_variable(self, piece: Piece) -> keras.Variable:
        weight = self.variables[piece.index]
        *scopes, name = weight.path.split("/")
        value = _part(weight.numpy(), piece, [piece.size] if self.elementwise else weight.shape)
        with contextlib.ExitStack() as stack:
            for scope in scopes:  # paths say which weights are decayed
                stack.enter_context(keras.name_scope(scope, deduplicate=False))
            return keras.Variable(tf.constant(value), dtype=weight.dtype, name=f"{name}.at{piece.begin}")


def whole_arrays(exports: Sequence[Mapping[str, np.ndarray]], shapes: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """State of whole weights by name, out of what all workers exported; exact weights under `shard/INDEX`.

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
    """Whether an array of a worker's file belongs to its share of the optimizer's state."""
    return name.startswith(_PREFIX)


def take_exact_weights(arrays: dict[str, np.ndarray]) -> dict[int, np.ndarray]:
    """Takes the owners' exact weights, by index, out of what `whole_arrays` returned."""
    return {int(name.removeprefix(_PREFIX)): arrays.pop(name) for name in list(arrays) if is_share(name)}


def _check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    for name in ("clipnorm", "global_clipnorm"):
        if getattr(optimizer, name, None):
            raise ConfigError(
                f"{name}={getattr(optimizer, name)} of the optimizer would look at this worker's share alone. Leave it "
                "out with --shard=optimizer; --clip_norm clips by the norm of all gradients."
            )
    if optimizer.use_ema:
        raise ConfigError("use_ema=True of the optimizer does not work with --shard=optimizer. Leave one of them out.")


def _key(name: str, piece: Piece) -> str:
    return f"{_PREFIX}{piece.index}/{piece.begin}/{name}"


def _part(array: np.ndarray, piece: Piece, shape: Sequence[int]) -> np.ndarray:
    return np.asarray(array).reshape(-1)[piece.begin : piece.end].reshape(shape)


def _reference(piece: keras.Variable) -> str:
    return piece.path.replace("/", "_") + "_"


@contextlib.contextmanager
def _outside_of_strategies() -> Iterator[None]:
    """In this context variables belong to this worker alone."""
    if not tf.distribute.has_strategy():
        yield
        return
    raise RuntimeError("make a worker's share outside of the strategy's scope")
