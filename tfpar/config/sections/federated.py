"""The options of federated averaging, which one program takes in addition to those of every experiment.

This module imports neither TensorFlow nor Keras.
"""

from __future__ import annotations

import dataclasses

from tfpar.config.errors import ConfigError
from tfpar.config.fields import ConfigBase, option

AVERAGING = ("fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi", "scaffold")
_PARTITIONS = ("iid", "dirichlet", "by_class", "by_file")
# The optimizer that applies the mean update, its learning rate and its momentum: sgd with rate 1 takes the mean of
# the clients' weights (McMahan et al. 2017); 0.9 is the momentum of Hsu et al. 2019; the rate of Adam and Yogi is near
# the one that Reddi et al. 2021 found best for most of their tasks (appendix D, 10^-2 to 10^-1).
_SERVER_OPTIMIZER = {"fedavgm": "sgd", "fedadam": "adam", "fedyogi": "yogi"}
# These are by name of the optimizer.
_SERVER_RATE = {"sgd": 1.0, "adam": 0.03, "yogi": 0.03}
_SERVER_MOMENTUM = {"adam": 0.9, "yogi": 0.9}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FederatedConfig(ConfigBase):
    """Clients that train independently on their own examples, and a server that averages their updates."""

    rounds: int = option(
        100,
        "Rounds of the whole run. In each round, some clients train, and the server averages.",
        minimum=1,
        may_change_on_resume=True,
    )
    partition: str = option(
        "iid",
        "How the training examples are distributed over clients: iid, at random; dirichlet:ALPHA, each client has its "
        "own mixture of classes, which is more uneven for smaller ALPHA (Hsu et al. 2019); by_class:N, N classes per "
        "client; by_file, one client per file.",
    )
    clients: int = option(100, "Number of clients; with by_file there are as many as files.", minimum=1)
    clients_per_round: int = option(
        10, "Number of clients that train in a round; with poisson, the mean number.", minimum=1
    )
    client_sampling: str = option(
        "fixed",
        "How the clients of a round are drawn: fixed, always the same number, without replacement; poisson, each "
        "client independently, with the same probability.",
        choices=("fixed", "poisson"),
    )
    client_dropout: float = option(
        0.0, "Probability that a client that was drawn never replies.", minimum=0.0, maximum=0.999
    )
    local_epochs: int = option(1, "Passes of a client over its examples in a round.", minimum=1)
    client_batch: int = option(10, "Number of examples in a client's step.", minimum=1)
    averaging: str = option(
        "fedavg",
        "fedavg takes the mean of the clients' weights; fedprox also keeps clients near the server's weights; fedavgm, "
        "fedadam and fedyogi let an optimizer apply the mean update; scaffold corrects the drift of clients with "
        "control variates.",
        choices=AVERAGING,
    )
    prox: float = option(0.1, "fedprox: weight of the proximal term (mu).", minimum=0.0)
    server_optimizer: str = option(
        "",
        "Optimizer that applies the mean update on the server: any name of --optimizer, or yogi. Empty: that of "
        "--averaging.",
    )
    server_learning_rate: float = option(
        0.0,
        "Learning rate of the server's optimizer. 0: 1 for sgd, 0.03 for adam and yogi; others need a value.",
        minimum=0.0,
    )
    server_momentum: float = option(
        -1.0,
        "Momentum of the server's optimizer; beta_1 of adam and yogi. -1: 0.9 for fedavgm, adam and yogi, 0 for "
        "others.",
        minimum=-1.0,
        maximum=0.9999,
    )
    server_adaptivity: float = option(
        1e-3,
        "adam and yogi on the server: tau of Reddi et al. 2021, which limits the enlargement of small updates.",
        minimum=1e-12,
    )
    client_weights: str = option(
        "auto",
        "Weight of a client in the mean: examples, its number of examples; uniform, the same for all. auto: examples, "
        "but uniform for scaffold and if noise is added.",
        choices=("auto", "examples", "uniform"),
    )
    update_codec: str = option(
        "none",
        "Codec for a client's update to the server, written as for --exchange: int8, int4:block=512, topk:0.01.",
    )
    stateful_clients: bool = option(
        False,
        "Clients keep the residual of their codec and add it to their next update. Without this, the codec rounds "
        "stochastically, so that the mean is unbiased.",
    )
    client_clip: float = option(0.0, "L2 norm to which the update of a client is clipped. 0: not clipped.", minimum=0.0)
    noise_multiplier: float = option(
        0.0,
        "Differential privacy: standard deviation of the Gaussian noise on the sum of updates, relative to "
        "--client_clip. 0: no noise.",
        minimum=0.0,
    )
    delta: float = option(
        0.0,
        "Differential privacy: the delta for which epsilon is reported. 0: 1 / clients^1.1.",
        minimum=0.0,
        maximum=0.5,
    )
    client_holdout: float = option(
        0.0,
        "Share of each client's examples on which it does not train, and on which its accuracy is measured. 0: the "
        "accuracy is measured on the examples on which it trains.",
        minimum=0.0,
        maximum=0.9,
    )
    clients_evaluated: int = option(
        100,
        "The most clients whose accuracy an evaluation measures. 0: none.",
        minimum=0,
        may_change_on_resume=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parts()
        if -1.0 < self.server_momentum < 0.0:
            raise ConfigError(
                f"--server_momentum={self.server_momentum} is negative. Give 0 or more, or -1 for the default."
            )
        if self.parts()[0] != "by_file" and self.clients_per_round > self.clients:
            raise ConfigError(
                f"--clients_per_round={self.clients_per_round} is more than --clients={self.clients}. Give at most as "
                "many."
            )
        if self.noise_multiplier and not self.client_clip:
            raise ConfigError(
                f"--noise_multiplier={self.noise_multiplier} is relative to --client_clip, which is 0. Give the norm "
                "to which updates are clipped, e.g. --client_clip=1."
            )
        self._check_privacy()

    def _check_privacy(self) -> None:
        """Checks the assumptions of the privacy analysis: clients keep no state, and all have the same weight."""
        if not self.noise_multiplier:
            return
        if self.averaging == "scaffold" or self.stateful_clients:
            name = "averaging=scaffold" if self.averaging == "scaffold" else "stateful_clients"
            raise ConfigError(
                f"--{name} and --noise_multiplier={self.noise_multiplier}: what a client keeps depends on the rounds "
                "that drew it, and privacy is counted for rounds that are drawn independently. Leave one of them out."
            )
        if self.client_weights == "examples":
            raise ConfigError(
                f"--client_weights=examples and --noise_multiplier={self.noise_multiplier}: one client must not count "
                "more than another. Use --client_weights=uniform."
            )

    def parts(self) -> tuple[str, float]:
        """Returns the kind of `partition`, and its number; 0 if it has none."""
        kind, _, number = self.partition.partition(":")
        try:
            value = float(number) if number else 0.0
        except ValueError:
            value = -1.0
        whole = kind != "by_class" or value.is_integer()
        has_number = kind in ("dirichlet", "by_class")
        if kind not in _PARTITIONS or has_number != bool(number) or (has_number and not 0.0 < value < 1e9) or not whole:
            raise ConfigError(
                f"--partition={self.partition!r} is none of iid, dirichlet:ALPHA, by_class:N and by_file. Write e.g. "
                "--partition=dirichlet:0.1."
            )
        return kind, value

    @property
    def optimizer_of_server(self) -> str:
        """Name of the optimizer that applies the mean update."""
        return self.server_optimizer or _SERVER_OPTIMIZER.get(self.averaging, "sgd")

    @property
    def rate_of_server(self) -> float:
        """Learning rate of the server's optimizer."""
        return self.server_learning_rate or _SERVER_RATE.get(self.optimizer_of_server, 0.0)

    @property
    def momentum_of_server(self) -> float:
        """Momentum of the server's optimizer."""
        if self.server_momentum >= 0.0:
            return self.server_momentum
        return 0.9 if self.averaging == "fedavgm" else _SERVER_MOMENTUM.get(self.optimizer_of_server, 0.0)

    @property
    def is_uniform(self) -> bool:
        """Whether all clients have the same weight in the mean."""
        if self.client_weights == "auto":
            return self.averaging == "scaffold" or self.noise_multiplier > 0.0
        return self.client_weights == "uniform"
