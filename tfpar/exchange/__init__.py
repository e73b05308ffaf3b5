"""Gradient exchange: how the replicas' gradients become one.

`Exchange(spec)` is the seam between the training step and whatever moves gradients. Everything the
step needs travels together in one call: the gradient sums, and the *sidecar*, a short dense vector of
scalars (example count, non-finite flag, loss and metric sums) that is always summed exactly.
"""

from tfpar.exchange.exchange import Exchange, Traffic

__all__ = ["Exchange", "Traffic"]
