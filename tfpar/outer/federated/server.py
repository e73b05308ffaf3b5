"""The server's part of a round: a Keras optimizer applies the mean movement, and noise protects the clients.

The weighted mean of `server's weights - client's weights` takes the place of a gradient (Reddi et al. 2021, algorithm
2), so any Keras optimizer can be used. With SGD and rate 1, the new weights are the weighted mean of the clients'
weights (FedAvg).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

from tfpar.config import ConfigError, FederatedConfig, unknown_name
from tfpar.optim.optimizers import OPTIMIZERS
from tfpar.optim.yogi import Yogi
from tfpar.training.seeds import fold_in, step_seed

import keras
import tensorflow as tf

SERVER_OPTIMIZERS: dict[str, type[keras.optimizers.Optimizer]] = {**OPTIMIZERS, "yogi": Yogi}
_SECOND_MOMENT = 0.99  # beta_2 of Reddi et al. 2021, table 1 and appendix
_NOISE = 0x401E  # separates these draws from others of a round


_ADAPTIVE = ("adam", "yogi")  # those of Reddi et al. 2021 with second moments


def check_server_optimizer(options: FederatedConfig) -> None:
    """Refuses an optimizer that does not exist or cannot work, without creating one.

    Raises:
      ConfigError: There is no such optimizer (the message suggests similar names), or one of its options is missing or
        does not fit it.
    """
    if options.optimizer_of_server not in SERVER_OPTIMIZERS:
        raise unknown_name("--server_optimizer", options.optimizer_of_server, SERVER_OPTIMIZERS)
    if not options.rate_of_server:
        raise ConfigError(
            f"--server_optimizer={options.optimizer_of_server} needs its learning rate, e.g. "
            "--server_learning_rate=0.01."
        )
    kind = SERVER_OPTIMIZERS[options.optimizer_of_server]
    arguments = inspect.signature(kind).parameters
    if options.server_momentum > 0.0 and not {"momentum", "beta_1"} & arguments.keys():
        raise ConfigError(
            f"--server_momentum={options.server_momentum}: {options.optimizer_of_server} has no momentum. Leave it out."
        )
    if (
        options.server_adaptivity != FederatedConfig().server_adaptivity
        and options.optimizer_of_server not in _ADAPTIVE
    ):
        raise ConfigError(
            f"--server_adaptivity={options.server_adaptivity:g} is for {' and '.join(_ADAPTIVE)}, and has no effect on "
            f"--server_optimizer={options.optimizer_of_server}. Leave it out."
        )


def server_optimizer(options: FederatedConfig) -> keras.optimizers.Optimizer:
    """Creates the server's optimizer; it is not built yet."""
    kind = SERVER_OPTIMIZERS[options.optimizer_of_server]
    known = inspect.signature(kind).parameters
    given: dict[str, Any] = {"momentum": options.momentum_of_server, "beta_1": options.momentum_of_server}
    if options.optimizer_of_server in _ADAPTIVE:
        given |= {"beta_2": _SECOND_MOMENT, "epsilon": options.server_adaptivity}
    elif not options.momentum_of_server:
        given.pop("beta_1")  # Keras' own default
    # AdamW and Muon would shrink the server's weights in every round.
    given |= {name: 0.0 for name, each in known.items() if "weight_decay" in name and each.default}
    arguments = {name: value for name, value in given.items() if name in known}
    return kind(learning_rate=options.rate_of_server, name=f"server_{options.optimizer_of_server}", **arguments)


@dataclasses.dataclass(frozen=True)
class Averaging:
    """Turns the sum over clients into the gradient that the optimizer applies.

    Attributes:
      seed: `--seed`.
      divisor: The divisor of the sum: with noise, the expected number of clients; 0 stands for the sum of the clients'
        masses.
      noise: Standard deviation of the Gaussian noise on each element of the sum.
    """

    seed: int
    divisor: float = 0.0
    noise: float = 0.0

    @classmethod
    def of(cls, options: FederatedConfig, seed: int, expected: float) -> Averaging:
        """Returns the averaging that the options describe.

        Args:
          options: The options of federated averaging.
          seed: `--seed`.
          expected: Mean number of clients that take part in a round.
        """
        if not options.noise_multiplier:
            return cls(seed)
        return cls(seed, expected, options.noise_multiplier * options.client_clip)

    def factor(self, mass: tf.Tensor) -> tf.Tensor:
        """Returns the factor on the sum, float32 scalar, from the sum of the masses of all clients."""
        return tf.constant(1.0 / self.divisor) if self.divisor else tf.math.divide_no_nan(1.0, mass)

    def mean(self, sums: Sequence[tf.Tensor | None], factor: tf.Tensor, step: tf.Tensor) -> list[tf.Tensor | None]:
        """Returns the mean movement, with noise; None as in `sums`.

        Args:
          sums: Sums of the movements over all clients; None for a weight that no client moves.
          factor: The result of `factor`.
          step: Int64 scalar: number of the round. All replicas draw the same noise.
        """
        if not self.noise:
            return [None if each is None else each * factor for each in sums]
        seed = step_seed(self.seed, step, tf.constant(_NOISE))

        def drawn(place: int, shape: tf.TensorShape) -> tf.Tensor:
            return tf.random.stateless_normal(shape, fold_in(seed, place), stddev=self.noise, alg="philox")

        return [None if each is None else (each + drawn(place, each.shape)) * factor for place, each in enumerate(sums)]
