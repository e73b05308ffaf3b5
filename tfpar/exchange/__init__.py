"""Gradient exchange: how the replicas' gradients become one.

`Exchange(spec)` is the seam between the training step and whatever moves gradients. Everything the
step needs travels together in one call: the gradient sums, and the *sidecar*, a short dense vector of
scalars (example count, non-finite flag, loss and metric sums) that is always summed exactly.
"""

# Importing an algorithm registers it.
from tfpar.exchange.algorithms import deep_gradient, dense, powersgd, value_codecs  # noqa: F401
from tfpar.exchange.exchange import Exchange
from tfpar.exchange.per_device import DevicesOfReplica, places_in_turn, places_of_part, places_that_divide
from tfpar.exchange.reducer import Traffic
from tfpar.exchange.registry import register
from tfpar.exchange.tuning import auto  # noqa: F401

__all__ = [
    "DevicesOfReplica",
    "Exchange",
    "Traffic",
    "places_in_turn",
    "places_of_part",
    "places_that_divide",
    "register",
]
