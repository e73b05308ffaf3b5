"""What the exchange asks about the transport of a group, in one place."""

from __future__ import annotations

import sys

from tfpar.collectives.tensorflow import Group
from tfpar_ops.codecs import GPU_PEERS


def allows_any_order(group: Group) -> bool:
    """Whether members may call collectives in different orders, as keys tell them apart. NCCL does not allow it."""
    return not group.gpus


def allows_variable_sizes(group: Group) -> bool:
    """Whether members may choose at run time among calls of different sizes, as rows of embeddings need."""
    return not group.gpus


def largest_fan_in(group: Group) -> int:
    """How many payloads one member can add up at once."""
    return GPU_PEERS if group.gpus else sys.maxsize
