"""Differential privacy of a population: the privacy that one client loses in rounds with noise, by `dp-accounting`.

The unit of privacy is a client with all its examples. In each round the updates of the clients drawn are clipped to an
L2 norm S and summed, all with weight 1, and Gaussian noise of standard deviation z S is added to the sum (McMahan et
al. 2018, "Learning Differentially Private Recurrent Language Models"); the sum is divided by the expected number of
clients, which is not secret. The accountant composes the rounds by Renyi differential privacy (Mironov 2017).

- `poisson`: neighbouring populations differ in the presence of one client; the sum then changes by at most S.
- `fixed`: neighbouring populations have the same size and differ in one client; the sum then changes by at most 2 S, so
  that the noise is z / 2 times as large as the sensitivity.

Drop-outs are drawn independently of the data. They are not counted as amplification, so that epsilon is an upper bound.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from tfpar.config import ConfigError, FederatedConfig

from absl import logging

INSTALL = "pip install 'tfpar[privacy]'"


def delta_of(options: FederatedConfig, clients: int) -> float:
    """Returns the delta for which epsilon is reported."""
    return options.delta or clients**-1.1


def epsilon(options: FederatedConfig, clients: int, rounds: int) -> float:
    """Returns the epsilon of (epsilon, delta)-differential privacy that the first rounds of a run have spent.

    Args:
      options: Options of a run with noise.
      clients: Number of clients in the population.
      rounds: Number of rounds.

    Raises:
      ConfigError: `dp-accounting` is not installed.
    """
    per_round = options.clients_per_round
    return _epsilon(
        options.client_sampling, per_round, clients, options.noise_multiplier, delta_of(options, clients), rounds
    )


def check_installed() -> None:
    """Checks that the accountant is installed, which noise needs.

    Raises:
      ConfigError: `dp-accounting` is not installed.
    """
    _library()


def _library() -> Any:
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError as error:
        raise ConfigError(
            f"--noise_multiplier needs dp-accounting to count epsilon, which cannot be imported ({error}). Install it: "
            f"{INSTALL}."
        ) from error
    return dp_accounting, rdp


@functools.lru_cache(maxsize=4096)
def _epsilon(kind: str, per_round: int, clients: int, noise: float, delta: float, rounds: int) -> float:
    if rounds == 0:
        return 0.0
    library, rdp = _library()
    relations = library.NeighboringRelation
    if kind == "poisson":
        accountant = rdp.RdpAccountant(neighboring_relation=relations.ADD_OR_REMOVE_ONE)
        event = library.PoissonSampledDpEvent(per_round / clients, library.GaussianDpEvent(noise))
    else:
        accountant = rdp.RdpAccountant(neighboring_relation=relations.REPLACE_ONE)
        event = library.SampledWithoutReplacementDpEvent(clients, per_round, library.GaussianDpEvent(noise / 2.0))
    with _without_warnings():
        accountant.compose(event, rounds)
        return float(accountant.get_epsilon(delta))


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Does not show which orders of the Renyi divergence the accountant leaves out: any other order gives a bound."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)
