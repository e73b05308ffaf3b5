"""What `--exchange` says: a codec, its options, and how payloads move."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfpar.config import ConfigError, parse_arguments, unknown_name
from tfpar_ops import Codec

# Patterns that are collectives of TensorFlow's, and those made of messages between two workers. All of them are
# hierarchical where a host has several replicas, which add up what they have first; the name asks for the default.
COLLECTIVES = ("two_phase", "all_gather", "hierarchical")
STAGED = ("ring", "halving_doubling", "binary_blocks")
PATTERNS = (*COLLECTIVES, *STAGED)

# Options of the codec itself, by kind; the others belong to the exchange.
_CODECS: dict[str, dict[str, Any]] = {
    "bf16": {"kind": "bf16"},
    "fp16": {"kind": "fp16"},
    "fp8": {"kind": "fp8"},
    "int8": {"kind": "int8"},
    "int4": {"kind": "int4"},
    "int2": {"kind": "int2"},
    "sign": {"kind": "sign"},
    "topk": {"kind": "topk"},
}
_CODEC_OPTIONS = ("block", "scale", "rounding")
NAMES = ("none", *_CODECS, "powersgd", "auto")
_TOPK_OPTIONS = ("momentum", "ramp_steps")

# Options as somebody might give them, where they are not those of most codecs.
_EXAMPLES = {
    "bf16": "pattern=ring,warmup_steps=100",
    "fp16": "pattern=ring,warmup_steps=100",
    "topk": "momentum=0.9,ramp_steps=1000",
    "powersgd": "start_after=100",
    "auto": "max_error=0.2",
}


@dataclasses.dataclass(frozen=True)
class Spec:
    """An exchange as the user described it.

    Attributes:
      text: What was given, e.g. `int4:block=512,pattern=all_gather`.
      name: The codec's name, `none` for the dense all-reduce.
      codec: The codec; None for `none`, `powersgd` and `auto`.
      rank: Of `powersgd`: columns of the factors. 0 for the others.
      pattern: How payloads move between workers, one of `PATTERNS`.
      error_feedback: Whether what a payload leaves out is added to the next one.
      warmup_steps: Updates at the start whose gradients travel dense.
      min_elements: Tensors with fewer elements, and all with fewer than two dims, travel dense with the sidecar.
      bucket_bytes: Tensors are fused up to this many bytes of float32.
      momentum: Of `topk`: momentum correction, see `deep_gradient`.
      max_error: Of `auto`: codecs with a larger relative L2 error on normally distributed numbers are not considered.
      sample_every: Exchanges from one comparison with the dense mean to the next, for TensorBoard. 0: never.
      ramp_steps: Of `topk`: exchanges after `warmup_steps` in which the share that is kept falls to the final one.
      overlap: Whether buckets leave while other gradients are being computed, where those come one after the other.
    """

    text: str
    name: str
    codec: Codec | None = None
    rank: int = 0
    pattern: str = "two_phase"
    error_feedback: bool = True
    warmup_steps: int = 0
    min_elements: int = 1024
    bucket_bytes: int = 16 << 20
    momentum: float = 0.0
    ramp_steps: int = 0
    max_error: float = 0.05
    sample_every: int = 1000
    overlap: bool = True

    @property
    def lossy(self) -> bool:
        """Whether there is anything but the dense all-reduce."""
        return self.name != "none"

    def describe(self) -> str:
        """One line: codec, options that matter, pattern."""
        if not self.lossy:
            return "none (dense float32 all-reduce)"
        feedback = "error feedback" if self.error_feedback else "no error feedback"
        warmup = f", dense for the first {self.warmup_steps} updates" if self.warmup_steps else ""
        if self.name == "auto":
            return f"{self.text} (errors up to {self.max_error:g}, {feedback}{warmup})"
        pattern = "all_reduce of factors" if self.rank else self.pattern
        return f"{self.text} ({pattern}, {feedback}{warmup})"


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
    rank = 0
    if name == "powersgd":
        first, _, rest = rest.partition(",") if "=" not in rest.partition(",")[0] else ("", "", rest)
        rank = _rank(flag, text, first or "4")
    known = _known_options(name)
    if not known and rest:
        raise ConfigError(f"{flag}={text}: {name} takes no options. Write {flag}={name}.")
    prefix = text.removesuffix(rest) if rest else text
    options = parse_arguments(flag, rest, example=_EXAMPLES.get(name, "block=512,pattern=ring"), prefix=prefix)
    for key in options:
        if key not in known:
            raise unknown_name(f"{flag}={text}: option", key, known)
    if name not in _CODECS:
        if "start_after" in options:  # what the paper's code and PyTorch call it
            if "warmup_steps" in options:
                raise ConfigError(f"{flag}={text}: start_after is another name of warmup_steps; give one of them.")
            options["warmup_steps"] = options.pop("start_after")
        return Spec(text, name, rank=rank, **_own_options(flag, text, options))
    codec_options = {key: options.pop(key) for key in _CODEC_OPTIONS if key in options}
    return Spec(text, name, _codec(flag, text, name, share, codec_options), **_own_options(flag, text, options))


def _known_options(name: str) -> list[str]:
    if name == "none":
        return []
    if name == "powersgd":
        return ["error_feedback", "warmup_steps", "start_after", "min_elements", "sample_every", "overlap"]
    if name == "auto":
        return [
            "max_error",
            "error_feedback",
            "warmup_steps",
            "min_elements",
            "bucket_bytes",
            "sample_every",
            "overlap",
        ]
    fixed = ("text", "name", "codec", "rank", "max_error")
    own = [field.name for field in dataclasses.fields(Spec) if field.name not in fixed]
    if name != "topk":
        own = [option for option in own if option not in _TOPK_OPTIONS]
    return [*own, *(_CODEC_OPTIONS if name in _CODECS else ())]


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
    for key in ("error_feedback", "overlap"):
        if not isinstance(options.get(key, True), bool):
            raise ConfigError(f"{flag}={text}: {key}={options[key]!r} is not true or false.")
    _check_momentum(flag, text, options)
    error = options.get("max_error", 0.0)
    if not isinstance(error, (int, float)) or isinstance(error, bool) or not error >= 0.0:
        raise ConfigError(f"{flag}={text}: max_error={error!r} is not a number of at least 0.")
    for key, least in (
        ("warmup_steps", 0),
        ("min_elements", 0),
        ("bucket_bytes", 1),
        ("ramp_steps", 0),
        ("sample_every", 0),
    ):
        value = options.get(key, least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{flag}={text}: {key}={value!r} is not a whole number of at least {least}.")
    return options


def _check_momentum(flag: str, text: str, options: dict[str, Any]) -> None:
    momentum = options.get("momentum", 0)
    if not isinstance(momentum, (int, float)) or isinstance(momentum, bool) or not 0.0 <= momentum < 1.0:
        raise ConfigError(f"{flag}={text}: momentum={momentum!r} is not a number in [0, 1).")
    if momentum and not options.get("error_feedback", True):
        raise ConfigError(f"{flag}={text}: momentum correction needs error_feedback=true, to which it adds.")
    if (momentum or options.get("ramp_steps")) and options.get("pattern", "two_phase") not in COLLECTIVES:
        raise ConfigError(
            f"{flag}={text}: momentum and ramp_steps work with pattern={' or '.join(COLLECTIVES)}, "
            f"not {options['pattern']}."
        )


def _rank(flag: str, text: str, value: str) -> int:
    if not value.isdecimal() or not 1 <= int(value) <= 1024:
        raise ConfigError(f"{flag}={text}: {value!r} is not a rank from 1 to 1024, as in powersgd:4.")
    return int(value)


def _share(flag: str, text: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"{flag}={text}: {value!r} is not a share of elements in (0, 1], as in topk:0.01.")
    return share
