"""Federated averaging of a small network in NumPy, float64, written from the papers and from nothing of tfpar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Weights = list[np.ndarray]


def gradients(weights: Weights, x: np.ndarray, y: np.ndarray) -> Weights:
    """Of the mean cross-entropy of a network with one hidden layer of ReLUs."""
    first, first_bias, second, second_bias = weights
    hidden = np.maximum(x @ first + first_bias, 0.0)
    logits = hidden @ second + second_bias
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    back = shares.copy()
    back[np.arange(len(y)), y] -= 1.0
    back /= len(y)
    below = (back @ second.T) * (hidden > 0.0)
    return [x.T @ below, below.sum(axis=0), hidden.T @ back, back.sum(axis=0)]


def client(weights: Weights, batches: Sequence[tuple], rate: float, mu: float, correction: Weights) -> Weights:
    """Local SGD: FedProx with mu, SCAFFOLD with a correction."""
    own = [each.copy() for each in weights]
    for x, y in batches:
        found = gradients(own, x, y)
        for place, gradient in enumerate(found):
            own[place] = own[place] - rate * (gradient + mu * (own[place] - weights[place]) + correction[place])
            # the gradients of a step are all taken before the step
    return own


class Server:
    """Applies a mean movement; the optimizers of Reddi et al. 2021, algorithm 2."""

    def __init__(self, kind: str, rate: float, momentum: float, tau: float = 1e-3) -> None:
        self.kind, self.rate, self.momentum, self.tau = kind, rate, momentum, tau
        self.first: Weights = []
        self.second: Weights = []

    def apply(self, weights: Weights, movement: Weights) -> Weights:
        if not self.first:
            self.first = [np.zeros_like(each) for each in movement]
            self.second = [np.full_like(each, self.tau**2) for each in movement]
        if self.kind == "sgd":
            self.first = [self.momentum * old - self.rate * new for old, new in zip(self.first, movement, strict=True)]
            return [*map(np.add, weights, self.first)]
        assert self.kind == "yogi"
        squares = [each**2 for each in movement]
        self.first = [
            self.momentum * old + (1.0 - self.momentum) * new for old, new in zip(self.first, movement, strict=True)
        ]
        self.second = [
            old - 0.01 * square * np.sign(old - square) for old, square in zip(self.second, squares, strict=True)
        ]
        return [
            weight - self.rate * first / (np.sqrt(second) + self.tau)
            for weight, first, second in zip(weights, self.first, self.second, strict=True)
        ]


def train(
    weights: Weights,
    rounds: Sequence[Sequence[int]],
    batches: Callable[[int, int], Sequence[tuple]],
    masses: Callable[[int], float],
    *,
    rate: float,
    server: Server,
    clients: int,
    mu: float = 0.0,
    scaffold: bool = False,
) -> Weights:
    """Rounds of clients.

    Args:
      weights: Of the server, float64.
      rounds: The clients of each round.
      batches: From round and client to its batches `(x, y)`.
      masses: What a client counts.
      rate: Learning rate of the clients.
      server: The server's optimizer.
      clients: Clients of the population.
      mu: Of FedProx.
      scaffold: Whether clients correct their drift: Karimireddy et al. 2020, algorithm 1, option II.
    """
    zeros = [np.zeros_like(each) for each in weights]
    variate, variates = zeros, dict.fromkeys(range(clients), zeros)
    for number, chosen in enumerate(rounds):
        total, changes, mass = zeros, zeros, 0.0
        for each in chosen:
            data = batches(number, each)
            correction = [c - own for c, own in zip(variate, variates[each], strict=True)] if scaffold else zeros
            after = client(weights, data, rate, mu, correction)
            moved = [old - new for old, new in zip(weights, after, strict=True)]
            total = [old + masses(each) * new for old, new in zip(total, moved, strict=True)]
            mass += masses(each)
            if scaffold:
                fresh = [
                    own - c + step / (len(data) * rate)
                    for own, c, step in zip(variates[each], variate, moved, strict=True)
                ]
                changes = [old + new - own for old, new, own in zip(changes, fresh, variates[each], strict=True)]
                variates[each] = fresh
        variate = [c + change / clients for c, change in zip(variate, changes, strict=True)]
        weights = server.apply(weights, [each / (mass or 1.0) for each in total])
    return weights
