"""The codecs of an exchange of sharded state."""

from __future__ import annotations

from tfpar.config import ConfigError
from tfpar.exchange.registry import Spec
from tfpar_ops import Codec
from tfpar_ops.formats import FORMATS

_PATTERNS = ("two_phase", "hierarchical")
# Blocks of a format with a mean scale may not cross tensors, as they do here; one that keeps some elements is untried.
_FORMATS = [name for name, entry in FORMATS.items() if not entry.mean_scale and not entry.keeps]


def sharded_codec(spec: Spec) -> Codec | None:
    """The codec of a sharded exchange; None if nothing is encoded.

    Raises:
      ConfigError: This exchange does not sum a gradient at one worker, from which new weights could go out.
    """
    if not spec.compresses:
        return None
    options = spec.options
    codec = options.codec
    if codec is None or options.pattern_name not in _PATTERNS or options.warmup_steps or codec.kind not in _FORMATS:
        raise ConfigError(
            f"--exchange={spec.text} does not work with --shard, which needs one owner of each gradient's "
            f"sum, and sends weights back through the codec. Use none, {', '.join(_FORMATS)}, with pattern=two_phase "
            "and without warmup_steps."
        )
    return codec


def check_exchange(spec: Spec, shard: str) -> None:
    """Refuses an exchange between workers that does not work with this value of `--shard`.

    Args:
      spec: The exchange.
      shard: The value of `--shard`, not `none`.

    Raises:
      ConfigError: See `sharded_codec`; or weights are sharded, and the exchange encodes.
    """
    if shard != "weights":
        sharded_codec(spec)
    elif spec.compresses:
        raise ConfigError(
            f"--exchange={spec.text} does not work with --shard=weights: every replica would keep a residual of full "
            "size, and weights are gathered without a codec. Use --exchange=none, or --shard=gradients."
        )
