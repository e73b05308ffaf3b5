"""A client's message to the server: its movement, encoded with a codec of `tfpar_ops`.

As in the exchange between workers, a payload holds one large tensor; biases and the weights of normalisation layers are
sent without encoding. A client with state adds the residual of earlier payloads (error feedback); a client without
state rounds stochastically, with a different seed in each round, so that the mean over many clients is unbiased.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from tfpar.config import ConfigError
from tfpar.exchange import spec as specs
from tfpar_ops import Codec, reference
from tfpar_ops.formats import FORMATS, Format

import tensorflow as tf

Tensors = list[tf.Tensor]

# Codes of this many bits have negligible rounding errors even without feedback: of bf16 at most 2^-9 of a value.
_FINE_BITS = 16


@dataclasses.dataclass(frozen=True)
class UpdateEncoding:
    """The encoding of movements of these shapes.

    Attributes:
      codec: The codec; None sends float32.
      shapes: Shapes of the trainable weights.
      coded: Indices of the weights that the codec encodes.
      feedback: Whether clients keep residuals.
    """

    codec: Codec | None
    shapes: tuple[tuple[int, ...], ...]
    coded: tuple[int, ...]
    feedback: bool

    @classmethod
    def of(cls, text: str, shapes: Sequence[Sequence[int]], *, stateful: bool) -> UpdateEncoding:
        """Returns the encoding that `--update_codec` names.

        Args:
          text: The value of the option.
          shapes: Shapes of the trainable weights.
          stateful: Whether clients keep state.

        Raises:
          ConfigError: There is no codec of that name, or it needs error feedback and clients keep no state.
        """
        codec, is_compressible = parse(text, stateful=stateful)
        each = tuple(tuple(int(size) for size in shape) for shape in shapes)
        coded = [place for place, shape in enumerate(each) if codec and is_compressible(tf.TensorShape(shape))]
        return cls(codec, each, tuple(coded), bool(coded) and stateful)

    @property
    def residual_elements(self) -> int:
        """Number of elements of the residual of one client; 0 without error feedback."""
        return sum(math.prod(self.shapes[place]) for place in self.coded) if self.feedback else 0

    @property
    def payload_bytes(self) -> int:
        """Number of bytes in which one client's movement is sent."""
        total = 4 * sum(math.prod(shape) for shape in self.shapes)
        for place in self.coded:
            elements = math.prod(self.shapes[place])
            assert self.codec is not None
            total += self.codec.payload_bytes(elements) - 4 * elements
        return total

    @property
    def sent(self) -> list[tf.TensorSpec]:
        """Shapes and dtypes of what `encode` returns for the tensors of a movement."""
        specs = [tf.TensorSpec(shape, tf.float32) for shape in self.shapes]
        for place in self.coded:
            assert self.codec is not None
            words = self.codec.payload_bytes(math.prod(self.shapes[place])) // 4
            specs[place] = tf.TensorSpec([1, words], tf.int32)
        return specs

    def through(
        self, movement: Tensors, residual: tf.Tensor | None, seed: tf.Tensor
    ) -> tuple[Tensors, tf.Tensor | None]:
        """Returns the movement after encoding and decoding, and the new residual; arguments as for `encode`."""
        sent, residual = self.encode(movement, residual, seed)
        return self.decode(sent), residual

    def encode(
        self, movement: Tensors, residual: tf.Tensor | None, seed: tf.Tensor
    ) -> tuple[Tensors, tf.Tensor | None]:
        """Encodes a movement.

        Args:
          movement: Float32 tensors with the shapes `shapes`.
          residual: Float32 `[residual_elements]`, or None without error feedback.
          seed: Int32 `[2]`, different for every client and round.

        Returns:
          For each tensor of the movement, a payload int32 `[1, words]` or, if it is not encoded, the tensor; and the
          new residual.
        """
        if self.codec is None:
            return list(movement), residual
        sizes = [math.prod(self.shapes[place]) for place in self.coded]
        residuals = tf.split(residual, sizes) if self.feedback else [None] * len(sizes)
        sent, kept = list(movement), []
        for number, place in enumerate(self.coded):
            encoded = reference.encode(
                [movement[place]], residuals[number], self.codec, seed_step=self._seed_step(seed, number)
            )
            sent[place] = encoded.payload
            kept.append(encoded.residual)
        return sent, tf.concat(kept, axis=0) if self.feedback else residual

    def decode(self, sent: Tensors) -> Tensors:
        """Decodes the result of `encode`; returns the movement, float32 tensors with the shapes `shapes`."""
        received = list(sent)
        for place in self.coded:
            assert self.codec is not None
            [received[place]] = reference.decode(sent[place], self.codec, [self.shapes[place]])
        return received

    def _seed_step(self, seed: tf.Tensor, number: int) -> tf.Tensor | None:
        assert self.codec is not None
        if self.codec.rounding != "stochastic":
            return None
        return tf.cast(tf.random.fold_in(seed, number, alg="philox"), tf.int64)


def parse(text: str, *, stateful: bool) -> tuple[Codec | None, Callable[[tf.TensorShape], bool]]:
    """Returns the codec that `--update_codec` names, and a function that says whether it encodes a shape.

    Args:
      text: The value of the option.
      stateful: Whether clients keep state.

    Raises:
      ConfigError: As `UpdateEncoding.of`.
    """
    found = specs.parse(text, "--update_codec")
    options = found.options
    if not found.compresses:
        return None, options.is_compressible
    codec = options.codec
    if codec is None or not options.sends_only_gradient or options.warmup_steps:
        raise ConfigError(
            f"--update_codec={text}: clients send single payloads of a codec. Give one of {', '.join(FORMATS)}, "
            "without momentum, ramp_steps and warmup_steps."
        )
    if stateful:
        return codec, options.is_compressible
    if codec.format.stochastic:
        return dataclasses.replace(codec, rounding="stochastic"), options.is_compressible
    if not _is_fine(codec.format):
        stateless = [name for name, found in FORMATS.items() if found.stochastic or _is_fine(found)]
        raise ConfigError(
            f"--update_codec={text} leaves out more of some values than of others, and clients that keep no state "
            f"never make up for it. Give --stateful_clients, or one of {', '.join(stateless)}."
        )
    return codec, options.is_compressible


def _is_fine(found: Format) -> bool:
    return found.code_bits >= _FINE_BITS and not found.keeps
