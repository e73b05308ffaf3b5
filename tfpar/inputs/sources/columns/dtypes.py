"""The dtypes in which a program's values are stored, and in which a model receives them.

| values | kept as | received as |
|---|---|---|
| floating point, booleans | float32, or float64 if that is `keras.config.floatx()` | the same |
| images: uint8 inputs of two dims or more | uint8 | float32 or float64, not scaled, as from Keras' `fit` |
| other integers | int32, or int64 for inputs that need it | the same |
| text, for inputs only | bytes | `tf.string` |

Inputs that are read item by item need int64 if int32 does not hold their dtype: later items may be larger.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

_INT32 = np.iinfo(np.int32)
_INT64 = np.iinfo(np.int64)
_TEXT = np.dtype(object)


def float_dtype() -> np.dtype:
    """Returns the dtype of floating-point values: float64 if that is `keras.config.floatx()`, else float32."""
    return np.dtype(np.float64 if keras.config.floatx() == "float64" else np.float32)


def stored_dtype(values: np.ndarray, what: str, rank: int, *, complete: bool = True) -> np.dtype:
    """Returns the dtype in which values are stored.

    Args:
      values: Any array.
      what: `"inputs"`, `"labels"` or `"weights"`.
      rank: Number of dims of one example.
      complete: Whether these are all values; otherwise others of their dtype follow, which may be larger.

    Raises:
      ValueError: The values are neither real numbers nor text, are text but not inputs, or have an integer that is too
        large. The message ends a sentence whose subject is the values.
    """
    if is_text(values) and what == "inputs":
        return _TEXT
    dtype = values.dtype
    if dtype.kind not in "biuf" and dtype.name != "bfloat16":  # NumPy takes durations (timedelta64) for integers
        allowed = "real numbers or text" if what == "inputs" else "real numbers"
        raise ValueError(
            f"have dtype {dtype}, but must be {allowed}. Convert them, e.g. with np.asarray(..., np.float32); convert "
            "class labels to integers."
        )
    if what == "weights" or not np.issubdtype(dtype, np.integer):
        return float_dtype()
    if what == "inputs" and dtype == np.uint8 and rank >= 2:
        return np.dtype(np.uint8)
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    holds_others = complete or what == "labels" or np.can_cast(dtype, np.int32)
    if _INT32.min <= low and high <= _INT32.max and holds_others:
        return np.dtype(np.int32)
    if what == "inputs" and high <= _INT64.max:
        return np.dtype(np.int64)
    held = "int32 holds -2^31 to 2^31 - 1" if what == "labels" else "int64 holds -2^63 to 2^63 - 1"
    raise ValueError(
        f"range from {low} to {high}, but {held}. Map them to smaller integers (ids, e.g. with keras.layers.Hashing), "
        "or convert them to floating point."
    )


def fetched_dtype(stored: np.dtype) -> tf.DType:
    """Returns the dtype in which a model receives values that are stored in a dtype of `stored_dtype`."""
    if stored == _TEXT:
        return tf.string
    return tf.as_dtype(float_dtype() if stored == np.uint8 else stored)


def as_stored(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Copies values to a dtype of `stored_dtype`; text becomes bytes.

    Raises:
      ValueError: The dtype does not hold an integer, or a value among text is no text.
    """
    if dtype == _TEXT:
        encoded = [_encoded(text) for text in values.ravel().tolist()]
        result = np.empty(len(encoded), object)
        result[:] = encoded
        return result.reshape(values.shape)
    if np.issubdtype(dtype, np.integer) and not np.can_cast(values.dtype, dtype) and values.size:
        low, high = int(values.min()), int(values.max())
        limits = np.iinfo(dtype)
        if low < limits.min or high > limits.max:
            raise ValueError(f"integers range from {low} to {high}, but {dtype} holds {limits.min} to {limits.max}")
    with np.errstate(over="ignore"):  # values beyond float32 become infinite, which is reported as such
        return values.astype(dtype)


def _encoded(text: object) -> bytes:
    if isinstance(text, str):
        return text.encode()
    if isinstance(text, (bytes, bytearray)):
        return bytes(text)
    raise ValueError(  # `bytes` makes that many zeros of an integer
        f"{text!r} is {type(text).__name__}, but the other values are text (str or bytes). Convert it, e.g. with str()"
    )


def is_text(values: np.ndarray) -> bool:
    """Whether an array holds text or bytes."""
    if values.dtype.kind in "SU":
        return True
    return values.dtype == object and all(isinstance(value, (str, bytes)) for value in values.flat)
