"""The options of federated averaging, which one program takes beside those of every experiment.

This module imports neither TensorFlow nor Keras.
"""

from __future__ import annotations

import dataclasses

from tfpar.config.errors import ConfigError
from tfpar.config.fields import ConfigBase, option

AVERAGING = ("fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi", "scaffold")
_PARTITIONS = ("iid", "dirichlet", "by_class", "by_file")
# What applies the mean movement, and its learning rate and momentum: sgd with rate 1 takes the mean of the clients'
# weights (McMahan et al. 2017); 0.9 is the momentum of Hsu et al. 2019; Adam's and Yogi's rate is near the one that
# Reddi et al. 2021 found best for most of their tasks (appendix D, 10^-2 to 10^-1).
_SERVER_OPTIMIZER = {"fedavgm": "sgd", "fedadam": "adam", "fedyogi": "yogi"}
_SERVER_RATE = {"fedadam": 0.03, "fedyogi": 0.03}
_SERVER_MOMENTUM = {"fedavgm": 0.9, "fedadam": 0.9, "fedyogi": 0.9}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FederatedConfig(ConfigBase):
    """Clients that train by themselves on their own examples, and a server that averages what they have moved."""

    rounds: int = option(
        100,
        "Rounds of the whole run. In each, some clients train, and the server averages.",
        minimum=1,
        may_change_on_resume=True,
    )
    partition: str = option(
        "iid",
        "How the training examples lie on clients: iid, at random; dirichlet:ALPHA, each client has its own mixture of "
        "classes, the more uneven the smaller ALPHA (Hsu et al. 2019); by_class:N, N classes each; by_file, a client "
        "for each file.",
    )
    clients: int = option(100, "Clients of the population; with by_file there are as many as files.", minimum=1)
    clients_per_round: int = option(10, "Clients that train in a round; with poisson, in the mean.", minimum=1)
    client_sampling: str = option(
        "fixed",
        "How the clients of a round are drawn: fixed, always as many, without replacement; poisson, each by itself "
        "with the same probability.",
        choices=("fixed", "poisson"),
    )
    client_dropout: float = option(
        0.0, "Probability that a client that was drawn never answers.", minimum=0.0, maximum=0.999
    )
    local_epochs: int = option(1, "Passes of a client over its examples in a round.", minimum=1)
    client_batch: int = option(10, "Examples of a client's step.", minimum=1)
    averaging: str = option(
        "fedavg",
        "fedavg takes the mean of the clients' weights; fedprox also holds clients near the server's weights; fedavgm, "
        "fedadam and fedyogi let an optimizer apply the mean movement; scaffold corrects the drift of clients by "
        "control variates.",
        choices=AVERAGING,
    )
    prox: float = option(0.1, "fedprox: weight of the proximal term (mu).", minimum=0.0)
    server_optimizer: str = option(
        "",
        "Optimizer that applies the mean movement on the server: any name of --optimizer, or yogi. Empty: what "
        "--averaging says.",
    )
    server_learning_rate: float = option(
        0.0, "Its learning rate. 0: 1 for sgd, 0.03 for fedadam and fedyogi.", minimum=0.0
    )
    server_momentum: float = option(
        -1.0,
        "Its momentum, beta_1 of adam and yogi. -1: 0.9 for fedavgm, fedadam and fedyogi, 0 for others.",
        minimum=-1.0,
        maximum=0.9999,
    )
    server_adaptivity: float = option(
        1e-3, "adam and yogi on the server: tau of Reddi et al. 2021, which bounds small movements.", minimum=1e-12
    )
    client_weights: str = option(
        "auto",
        "What a client counts in the mean: examples, their number; uniform, all alike. auto: examples, but uniform for "
        "scaffold and where noise is added.",
        choices=("auto", "examples", "uniform"),
    )
    update_codec: str = option(
        "none",
        "Codec of what a client sends to the server, written as for --exchange: int8, int4:block=512, topk:0.01.",
    )
    stateful_clients: bool = option(
        False,
        "Clients keep what their codec has left out, and add it to their next update. Without, the codec rounds "
        "stochastically, so that the mean is right.",
    )
    client_clip: float = option(0.0, "L2 norm to which the update of a client is clipped. 0: not clipped.", minimum=0.0)
    noise_multiplier: float = option(
        0.0,
        "Differential privacy: standard deviation of the Gaussian noise on the sum of updates, relative to "
        "--client_clip. 0: no noise.",
        minimum=0.0,
    )
    delta: float = option(
        0.0, "Differential privacy: delta, at which epsilon is reported. 0: 1 / clients^1.1.", minimum=0.0, maximum=0.5
    )
    client_holdout: float = option(
        0.0,
        "Share of each client's examples that it does not train on, for the accuracy of each client. 0: that is "
        "measured on the examples it trains on.",
        minimum=0.0,
        maximum=0.9,
    )
    clients_evaluated: int = option(
        100,
        "Clients whose accuracy is measured at an evaluation, at most; 0: none.",
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
        """What the analysis of the noise rests on: clients that keep nothing, and all count alike."""
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
        """`partition` as the kind, and its number; 0 where it has none."""
        kind, _, number = self.partition.partition(":")
        try:
            value = float(number) if number else 0.0
        except ValueError:
            value = -1.0
        whole = kind != "by_class" or value == int(value)
        has_number = kind in ("dirichlet", "by_class")
        if kind not in _PARTITIONS or has_number != bool(number) or (has_number and not 0.0 < value < 1e9) or not whole:
            raise ConfigError(
                f"--partition={self.partition!r} is none of iid, dirichlet:ALPHA, by_class:N and by_file. Write e.g. "
                "--partition=dirichlet:0.1."
            )
        return kind, value

    @property
    def optimizer_of_server(self) -> str:
        """The optimizer that applies the mean movement, by name."""
        return self.server_optimizer or _SERVER_OPTIMIZER.get(self.averaging, "sgd")

    @property
    def rate_of_server(self) -> float:
        """Its learning rate."""
        return self.server_learning_rate or _SERVER_RATE.get(self.averaging, 1.0)

    @property
    def momentum_of_server(self) -> float:
        """Its momentum."""
        return self.server_momentum if self.server_momentum >= 0.0 else _SERVER_MOMENTUM.get(self.averaging, 0.0)

    @property
    def is_uniform(self) -> bool:
        """Whether all clients count alike in the mean."""
        if self.client_weights == "auto":
            return self.averaging == "scaffold" or self.noise_multiplier > 0.0
        return self.client_weights == "uniform"
