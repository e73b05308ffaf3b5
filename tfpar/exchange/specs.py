"""What `--exchange` says: a codec, its options, and how payloads move."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfpar.config import ConfigError, parse_arguments, unknown_name
from tfpar_ops import Codec

PATTERNS = ("two_phase", "all_gather")

# Options of the codec itself, by kind; the others belong to the exchange.
_CODECS: dict[str, dict[str, Any]] = {
    "bf16": {"kind": "bf16"},
    "fp16": {"kind": "fp16"},
    "fp8": {"kind": "fp8"},
    "int8": {"kind": "quantize", "bits": 8},
    "int4": {"kind": "quantize", "bits": 4},
    "int2": {"kind": "quantize", "bits": 2},
    "sign": {"kind": "sign"},
    "topk": {"kind": "topk"},
}
_CODEC_OPTIONS = ("block", "scale", "rounding")
NAMES = ("none", *_CODECS)


@dataclasses.dataclass(frozen=True)
class Spec:
    """An exchange as the user described it.

    Attributes:
      text: What was given, e.g. `int4:block=512,pattern=all_gather`.
      name: The codec's name, `none` for the dense all-reduce.
      codec: The codec; None for `none`.
      pattern: How payloads move between workers, one of `PATTERNS`.
      error_feedback: Whether what a payload leaves out is added to the next one.
      warmup_steps: Updates at the start whose gradients travel dense.
      min_elements: Tensors with fewer elements, and all with fewer than two dims, travel dense with the sidecar.
      bucket_bytes: Tensors are fused up to this many bytes of float32.
    """

    text: str
    name: str
    codec: Codec | None = None
    pattern: str = "two_phase"
    error_feedback: bool = True
    warmup_steps: int = 0
    min_elements: int = 1024
    bucket_bytes: int = 64 << 20

    def describe(self) -> str:
        """One line: codec, options that matter, pattern."""
        if self.codec is None:
            return "none (dense float32 all-reduce)"
        feedback = "error feedback" if self.error_feedback else "no error feedback"
        warmup = f", dense for the first {self.warmup_steps} updates" if self.warmup_steps else ""
        return f"{self.text} ({self.pattern}, {feedback}{warmup})"


def parse(text: str, flag: str = "--exchange") -> Spec:
    """Reads a spec: `none`, `int4`, `int4:block=512,rounding=stochastic`, `topk:0.01`, `fp8:pattern=all_gather`.

    Args:
      text: Name, then after a colon options as `key=value`, separated by commas. `topk` takes the share of elements it
        keeps, in (0, 1], as its first option.
      flag: Where the text came from; named in errors.

    Raises:
      ConfigError: An unknown name or option, with suggestions, or a value that cannot be.
    """
    name, _, rest = text.partition(":")
    if name not in NAMES:
        raise unknown_name(flag, name, NAMES)
    share = None
    if name == "topk":
        first, _, rest = rest.partition(",") if "=" not in rest.partition(",")[0] else ("", "", rest)
        share = _share(flag, text, first or "0.01")
    options = parse_arguments(flag, rest)
    own = {field.name: field for field in dataclasses.fields(Spec) if field.name not in ("text", "name", "codec")}
    known = [*own, *(_CODEC_OPTIONS if name != "none" else ())]
    for key in options:
        if key not in known:
            raise unknown_name(f"{flag}={text}: option", key, known)
    if name == "none":
        return Spec(text, name, **_own_options(flag, text, options))
    codec_options = {key: options.pop(key) for key in _CODEC_OPTIONS if key in options}
    return Spec(text, name, _codec(flag, text, name, share, codec_options), **_own_options(flag, text, options))


def _codec(flag: str, text: str, name: str, share: float | None, options: dict[str, Any]) -> Codec:
    try:
        if share is None:
            return Codec(**_CODECS[name], **options)
        block = Codec("topk", keep=1, **options).block
        return Codec("topk", keep=max(1, round(share * block)), **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{flag}={text}: {error}") from error


def _own_options(flag: str, text: str, options: dict[str, Any]) -> dict[str, Any]:
    if "pattern" in options and options["pattern"] not in PATTERNS:
        raise unknown_name(f"{flag}={text}: pattern", str(options["pattern"]), PATTERNS)
    if not isinstance(options.get("error_feedback", True), bool):
        raise ConfigError(f"{flag}={text}: error_feedback={options['error_feedback']!r} is not true or false.")
    for key, least in (("warmup_steps", 0), ("min_elements", 0), ("bucket_bytes", 1)):
        value = options.get(key, least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{flag}={text}: {key}={value!r} is not a whole number of at least {least}.")
    return options


def _share(flag: str, text: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"{flag}={text}: {value!r} is not a share of elements in (0, 1], as in topk:0.01.")
    return share
