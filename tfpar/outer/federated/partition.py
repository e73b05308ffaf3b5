"""Distributions of examples over clients: pure functions of labels, files and a seed.

Shapes: n examples, C clients, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.config import ConfigError

import numpy as np

_SALT = 0x9A27  # separates these draws from others with the same seed


def iid(examples: int, clients: int, seed: int) -> list[np.ndarray]:
    """Distributes examples at random; the numbers of examples of two clients differ by at most one.

    Args:
      examples: Number of examples, n.
      clients: Number of clients, C.
      seed: Seed of the draw.

    Returns:
      For each client, the indices of its examples, int64, in ascending order.
    """
    return [np.sort(part) for part in np.array_split(_generator(seed).permutation(examples), clients)]


def dirichlet(labels: np.ndarray, clients: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Gives each client its own mixture of classes, drawn from Dir(alpha K p), where p are the shares of the classes.

    The method is that of Hsu, Qi and Brown 2019, "Measuring the Effects of Non-Identical Data Distribution for
    Federated Visual Classification", section 3: the numbers of examples of two clients differ by at most one, every
    example is on one client, and a class that is used up is excluded from the mixtures of later clients. If all classes
    have the same number of examples, alpha is the concentration of every class, as in most papers and libraries; Hsu et
    al. state K times this value.

    Args:
      labels: int64 `[n]`.
      clients: Number of clients, C.
      alpha: Concentration. With a small value, each client has one class; with a large one, all have the same mixture.
      seed: Seed of the draw.

    Returns:
      See `iid`.
    """
    generator = _generator(seed)
    classes, counts = np.unique(labels, return_counts=True)
    pools = [generator.permutation(np.flatnonzero(labels == each)) for each in classes]
    left = counts.copy()
    concentration = alpha * len(classes) * counts / counts.sum()
    mixtures = generator.dirichlet(concentration, size=clients)
    sizes = [len(part) for part in np.array_split(np.arange(len(labels)), clients)]
    parts = []
    for mixture, size in zip(mixtures, sizes, strict=True):
        chosen = []
        for _ in range(size):
            weights = np.where(left > 0, np.nan_to_num(mixture), 0.0)
            weights = weights if weights.sum() > 0.0 else left.astype(np.float64)
            place = int(generator.choice(len(classes), p=weights / weights.sum()))
            left[place] -= 1
            chosen.append(pools[place][left[place]])
        parts.append(np.sort(np.array(chosen, np.int64)))
    return parts


def by_class(labels: np.ndarray, clients: int, number: int, seed: int) -> list[np.ndarray]:
    """Gives each client the same number of classes; the examples of a class are split evenly among its clients.

    Args:
      labels: int64 `[n]`.
      clients: Number of clients, C.
      number: Number of classes per client.
      seed: Seed of the draw.

    Returns:
      See `iid`.

    Raises:
      ConfigError: `number` is greater than K, or there are too few clients for all classes.
    """
    classes = np.unique(labels)
    if number > len(classes) or number * clients < len(classes):
        raise ConfigError(
            f"--partition=by_class:{number} with --clients={clients}: there are {len(classes)} classes. Give at most "
            "as many, and so many clients that each class lies on one."
        )
    generator = _generator(seed)
    turn = generator.permutation(len(classes))
    windows = [turn[(client * number + np.arange(number)) % len(classes)] for client in range(clients)]
    windows = [windows[place] for place in generator.permutation(clients)]
    owned: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for place, each in enumerate(classes):
        owners = [client for client, window in enumerate(windows) if place in window]
        members = generator.permutation(np.flatnonzero(labels == each))
        for owner, part in zip(owners, np.array_split(members, len(owners)), strict=True):
            owned[owner].append(part)
    return [np.sort(np.concatenate(parts)) for parts in owned]


def by_file(records_per_file: Sequence[int]) -> list[np.ndarray]:
    """Creates one client per file.

    Args:
      records_per_file: Number of examples in each file; the examples of a file have consecutive indices.

    Returns:
      See `iid`.
    """
    return np.split(np.arange(sum(records_per_file)), np.cumsum(records_per_file)[:-1])


def hold_out(parts: Sequence[np.ndarray], share: float, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Holds out a share of each client's examples, rounded down; a client keeps at least one.

    Args:
      parts: The result of one of the functions above.
      share: The share to hold out, in [0, 1).
      seed: Seed of the draw.

    Returns:
      The examples for training and the examples held out, both in the form of `iid`.
    """
    kept, held = [], []
    for client, part in enumerate(parts):
        order = np.random.default_rng([_SALT, seed, 1, client]).permutation(part)
        count = min(int(share * len(part)), max(len(part) - 1, 0))
        kept.append(np.sort(order[count:]))
        held.append(np.sort(order[:count]))
    return kept, held


def _generator(seed: int) -> np.random.Generator:
    return np.random.default_rng([_SALT, seed])
