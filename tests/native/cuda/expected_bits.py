"""Writes what the codecs' reference gives for random gradients, for `on_pytorch.py` to compare the CUDA kernels with.

The reference needs TensorFlow, the machine with the GPU does not: carry the file there. Run it as
`python tests/native/cuda/expected_bits.py FILE`; `make -C tests/native/cuda expected` does.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from tfpar_ops import codecs, reference

import numpy as np
import tensorflow as tf

WORKERS = 4
ELEMENTS = 50_003  # neither whole blocks nor whole quads
SEED_STEP = (11, 7)
_CODECS = (
    codecs.Codec("bf16"),
    codecs.Codec("fp16"),
    codecs.Codec("fp8"),
    codecs.Codec("int8"),
    codecs.Codec("int8", block=64, scale="float32"),
    codecs.Codec("int4"),
    codecs.Codec("int4", block=4096),
    codecs.Codec("int4", rounding="stochastic"),
    codecs.Codec("int2", rounding="stochastic"),
    codecs.Codec("sign"),
    codecs.Codec("topk", block=4096, keep=41),
    codecs.Codec("topk", block=16384, keep=100),
)


def _gradient(generator: np.random.Generator) -> np.ndarray:
    """Normal numbers of many scales, with runs of zeros. float32 [ELEMENTS]."""
    values = generator.standard_normal(ELEMENTS) * np.exp2(generator.integers(-12, 4, ELEMENTS))
    values[generator.random(ELEMENTS) < 0.1] = 0.0
    return values.astype(np.float32)


def _fields(codec: codecs.Codec) -> list[int]:
    """The fields of `tfpar_codec`, in its order."""
    stochastic = codec.rounding == "stochastic"
    seed, step = SEED_STEP if stochastic else (0, 0)
    scale_bits = 8 * codec.scale_bytes * codec.has_scale
    return [codec.format.number, codec.block, codec.keep, scale_bits, stochastic, seed, step]


def main(arguments: Sequence[str]) -> int:
    """Writes the file that is named."""
    if len(arguments) != 1:
        print(f"usage: {sys.argv[0]} FILE", file=sys.stderr)
        return 2
    generator = np.random.default_rng(1)
    x = np.stack([_gradient(generator) for _ in range(WORKERS)])
    residual = np.stack([_gradient(generator) for _ in range(WORKERS)]) * np.float32(0.1)
    contents = {"x": x, "residual": residual, "codecs": np.array([_fields(codec) for codec in _CODECS], np.int64)}
    for number, codec in enumerate(_CODECS):
        seed_step = tf.constant(SEED_STEP, tf.int64) if codec.rounding == "stochastic" else None
        encoded = [
            reference.encode([tf.constant(own)], tf.constant(left), codec, seed_step=seed_step)
            for own, left in zip(x, residual, strict=True)
        ]
        payloads = tf.concat([result.payload for result in encoded], axis=0)
        again = reference.recode(
            payloads, tf.constant(residual[0]), codec, ELEMENTS, factor=1 / WORKERS, seed_step=seed_step
        )
        assert again.residual is not None
        contents[f"payloads_{number}"] = payloads.numpy()
        contents[f"residuals_{number}"] = np.stack([result.residual for result in encoded])
        contents[f"sum_{number}"] = reference.decode_sum(payloads, codec, ELEMENTS, factor=1 / WORKERS).numpy()
        contents[f"recoded_{number}"] = again.payload.numpy()[0]
        contents[f"recoded_residual_{number}"] = again.residual.numpy()
    np.savez_compressed(pathlib.Path(arguments[0]), **contents)
    print(f"{arguments[0]}: {len(_CODECS)} codecs, {WORKERS} gradients of {ELEMENTS} elements")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
