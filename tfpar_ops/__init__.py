"""Gradient codecs as TensorFlow operations: casts, quantisation, signs and top-k, with the residual on the way.

`FORMAT.md` beside this file has the payload formats. Three implementations give the same bits: C++ (`core/`), CUDA
(`core/cuda/`) and plain TensorFlow operations (`reference`), which take over where the library is not built.

Importing this package does not import TensorFlow; the first use of an operation does. It checks that the library was
built for the TensorFlow that is installed, and warns if it was not built from the sources beside it. The package
imports nothing of `tfpar`.

Raises:
  LibraryError: An ImportError: the library was built for another TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfpar_ops.built_for import check_sources, check_tensorflow
from tfpar_ops.codecs import Codec
from tfpar_ops.formats import FORMATS, Format

if TYPE_CHECKING:
    from tfpar_ops.checksums import masked_crc32c
    from tfpar_ops.operations import (
        decode,
        decode_sum,
        encode,
        encode_into,
        library_status,
        norm_squared,
        recode,
        recode_into,
        uses_library,
    )
    from tfpar_ops.reference import Encoded

__all__ = [
    "FORMATS",
    "Codec",
    "Encoded",
    "Format",
    "decode",
    "decode_sum",
    "encode",
    "encode_into",
    "library_status",
    "masked_crc32c",
    "norm_squared",
    "recode",
    "recode_into",
    "uses_library",
]

check_tensorflow()
check_sources()


def __getattr__(name: str) -> Any:
    if name == "masked_crc32c":
        return importlib.import_module("tfpar_ops.checksums").masked_crc32c
    if name in __all__:
        return getattr(importlib.import_module("tfpar_ops.operations"), name)
    raise AttributeError(f"module 'tfpar_ops' has no attribute {name!r}")
