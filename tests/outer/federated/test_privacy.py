"""Clipping, noise, and what dp-accounting says of them."""

from __future__ import annotations

from tests.outer.federated.test_averaging import examples, trainer_of
from tfpar.config import ConfigError, FederatedConfig
from tfpar.monitor.summary import closing_table
from tfpar.outer.federated import privacy

import dp_accounting
import keras
import numpy as np
import pytest
from dp_accounting import rdp

PRIVATE = {"noise_multiplier": 1.1, "client_clip": 0.5}


def options(**others) -> FederatedConfig:
    return FederatedConfig(**{**PRIVATE, "clients": 1000, "clients_per_round": 50, "delta": 1e-5, **others})


def test_epsilon_is_that_of_the_accountant():
    """Poisson: one client more or less. Fixed: one in place of another, which moves the sum by twice the clip."""
    poisson = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    event = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.1))
    poisson.compose(dp_accounting.SelfComposedDpEvent(event, 200))
    found = privacy.epsilon(options(client_sampling="poisson"), 1000, 200)
    assert found == pytest.approx(poisson.get_epsilon(1e-5))

    fixed = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    event = dp_accounting.SampledWithoutReplacementDpEvent(1000, 50, dp_accounting.GaussianDpEvent(0.55))
    fixed.compose(event, 200)
    assert privacy.epsilon(options(), 1000, 200) == pytest.approx(fixed.get_epsilon(1e-5))
    assert privacy.epsilon(options(), 1000, 100) < privacy.epsilon(options(), 1000, 200)
    # All clients in every round, one round: the Gaussian mechanism, in closed form (Mironov 2017, proposition 3).
    whole = options(client_sampling="poisson", clients=50)
    assert privacy.epsilon(whole, 50, 1) == pytest.approx(dp_accounting.get_epsilon_gaussian(1.1, 1e-5), rel=0.15)


def test_noise_has_the_deviation_that_is_accounted_for():
    """Clients do not move, so that the server's change is noise alone: z S / expected clients."""
    x, y = examples()

    def build() -> keras.Model:
        return keras.Sequential([keras.Input([12]), keras.layers.Dense(2000), keras.layers.Dense(5)])

    run = {**PRIVATE, "learning_rate": 0.0, "rounds": 1, "client_sampling": "poisson", "client_dropout": 0.25}
    trainer = trainer_of(build, **run)
    before = [np.array(weight) for weight in trainer.model.trainable_variables]
    summary = trainer.fit(x, y)
    change = np.concatenate(
        [(np.asarray(new) - old).ravel() for new, old in zip(trainer.model.trainable_variables, before, strict=True)]
    )
    assert change.std() == pytest.approx(1.1 * 0.5 / (4 * 0.75), rel=0.02)
    assert abs(change.mean()) < 0.01
    federated = summary["federated"]
    assert federated["delta"] == pytest.approx(9**-1.1)
    assert federated["epsilon"] == pytest.approx(privacy.epsilon(trainer.config.federated, 9, 1))
    assert f"epsilon {federated['epsilon']:.4g} with delta 0.089" in closing_table(summary, "")


def test_no_client_moves_the_server_by_more_than_the_clip():
    """One client a round: with rate 1 on the server its update is the server's change."""
    x, y = examples()
    trainer = trainer_of(client_clip=0.01, clients_per_round=1, rounds=1, update_codec="int8:min_elements=10")
    before = [np.array(weight) for weight in trainer.model.trainable_variables]
    trainer.fit(x, y)
    squares = [
        np.sum((np.asarray(new) - old) ** 2) for new, old in zip(trainer.model.trainable_variables, before, strict=True)
    ]
    assert float(np.sqrt(sum(squares))) == pytest.approx(0.01, rel=1e-3)


def test_state_that_travels_without_noise_is_refused():
    def build() -> keras.Model:
        return keras.Sequential([keras.Input([12]), keras.layers.BatchNormalization(), keras.layers.Dense(5)])

    with pytest.raises(ConfigError, match=r"--noise_multiplier=1.1: the model has state .*moving_mean"):
        trainer_of(build, **PRIVATE)


def test_frozen_weights_are_not_sent():
    def build() -> keras.Model:
        return keras.Sequential([keras.Input([12]), keras.layers.Dense(2, trainable=False), keras.layers.Dense(5)])

    summary = trainer_of(build, **PRIVATE, clients_per_round=2, rounds=1).fit(*examples())
    assert summary["federated"]["bytes_up_per_round"] == 2 * (4 * (2 * 5 + 5) + 4)  # weights, and the count of examples
