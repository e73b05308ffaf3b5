"""Gradient exchange: sums the replicas' gradients.

`Exchange(spec)` is the interface between the training step and the code that sends gradients. One call carries
everything that the step needs: the gradient sums, and the *sidecar*, a short dense vector of scalars (example count,
non-finite flag, loss and metric sums) that is always summed exactly.
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
