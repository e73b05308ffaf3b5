"""The payload formats, one entry each: the only list of them in Python.

`core/formats.h` is the list of the C++ side, and `FORMAT.md` says what each format is, byte by byte. Options, lengths,
error texts, headers and the reference derive from an entry.
"""

from __future__ import annotations

import dataclasses
import importlib
from types import ModuleType
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Format:
    """How a block of float32 elements is written.

    Attributes:
      name: What users and operations call it.
      number: In the header of a payload, 1 to 127.
      code_bits: Bits of one code.
      scale: Of a block: `none`; `byte`, one byte of the format's own; `float`, bfloat16 or float32 as the user says.
      blocks: Elements that a block may have, powers of two.
      default_block: Elements of a block where the user does not say.
      keeps: Whether a block has a code for `keep` of its elements only, with their positions.
      stochastic: Whether the user may ask for stochastic rounding.
      mean_scale: Whether the scale is a mean over the block. A tensor beside a much larger one in a block would then
        lose its own size, so blocks of such a format do not cross tensors.
      automatic: Whether `--exchange=auto` considers it.
      reference_module: Module of `tfpar_ops.reference` with its `encode` and `decode`; by default of the same name.
      other_names: What people write who mean this format, in lower case without `-` and `_`.
      example: Options that it needs, as Python, for messages that suggest it.
    """

    name: str
    number: int
    code_bits: int
    scale: Literal["none", "byte", "float"] = "none"
    blocks: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096)
    default_block: int = 512
    keeps: bool = False
    stochastic: bool = False
    mean_scale: bool = False
    automatic: bool = True
    reference_module: str = ""
    other_names: tuple[str, ...] = ()
    example: str = ""

    @property
    def reference(self) -> ModuleType:
        """Its implementation in plain TensorFlow operations; imports TensorFlow.

        The module has `encode(codec, v, elements, offsets) -> Codes` and `decode(codec, stored) -> tf.Tensor`, see
        `tfpar_ops.reference.blocks`.
        """
        return importlib.import_module(f"tfpar_ops.reference.{self.reference_module or self.name}")

    @property
    def call(self) -> str:
        """The Python that makes a codec of it, as in `Codec('int4')`."""
        return f"Codec({self.name!r}{self.example and ', ' + self.example})"


_TABLE = (
    Format("bf16", 1, 16, blocks=(1024,), default_block=1024, other_names=("bfloat16",)),
    # `auto` leaves fp16 out: its range does not suit every gradient.
    Format("fp16", 2, 16, blocks=(1024,), default_block=1024, automatic=False, other_names=("float16", "half")),
    Format("fp8", 3, 8, scale="byte", other_names=("float8", "e4m3")),
    Format("int8", 4, 8, scale="float", stochastic=True, reference_module="integers"),
    Format("int4", 5, 4, scale="float", stochastic=True, reference_module="integers"),
    Format("int2", 6, 2, scale="float", stochastic=True, reference_module="integers"),
    Format("sign", 7, 1, scale="float", mean_scale=True, other_names=("signsgd",)),
    Format(
        *("topk", 8, 32),
        blocks=tuple(64 << power for power in range(9)),
        default_block=4096,
        keeps=True,
        other_names=("dgc",),
        example="keep=41",
    ),
)
FORMATS = {entry.name: entry for entry in _TABLE}
