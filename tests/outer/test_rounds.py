"""The end of a round against its formulas, on devices of this process; refusals; reports put together."""

from __future__ import annotations

import tfpar
from tests.training.harness import strategy_of
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.tensorflow import world_group
from tfpar.config import ConfigError, ExperimentConfig, OuterConfig
from tfpar.config.errors import TrainingError
from tfpar.exchange import Exchange
from tfpar.outer.local import Rounds, saved
from tfpar.training.validate import validate_config

import keras
import numpy as np
import pytest

ALONE = WorkerAgreement(world_group())


def rounds_of(replicas: int = 1, **options) -> tuple[Rounds, list[keras.Variable], keras.Variable]:
    """Rounds over two weights and a state, with one worker."""
    strategy = strategy_of(replicas)
    with strategy.scope():
        weights = [keras.Variable([1.0, 2.0], name="a"), keras.Variable([[3.0]], name="b")]
        state = keras.Variable([10.0], trainable=False, name="mean")
        inner = keras.optimizers.Adam()
        inner.build(weights)
    exchange = Exchange("none")
    exchange.build(weights, strategy=strategy, group=world_group())
    config = OuterConfig(**{"local_steps": 5, **options})
    others = {"inner": inner, "exchange": exchange, "strategy": strategy, "worker": 0, "workers": 1}
    rounds = Rounds(config, weights, [state], [], **others)
    rounds.start()
    return rounds, weights, state


def move(rounds: Rounds, weights, by: float) -> None:
    """Local steps that move every weight."""
    for weight in weights:
        rounds.assign_here(weight, weight.numpy() + by)
    rounds.note(5, np.array([40.0]))


def expected(kind: str, moves: list[float]) -> float:
    """How far the outer weights come: the formulas of the papers, in float64."""
    place, velocity, square = 0.0, 0.0, 0.0
    for turn, by in enumerate(moves, start=1):
        gradient = -by
        if kind == "sgd":
            place -= gradient
        elif kind == "nesterov":  # Sutskever et al. 2013
            velocity = 0.9 * velocity - 0.7 * gradient
            place += 0.9 * velocity - 0.7 * gradient
        else:  # Kingma & Ba 2015, end of section 2, with the epsilon of Reddi et al. 2021
            velocity, square = 0.9 * velocity + 0.1 * gradient, 0.99 * square + 0.01 * gradient**2
            place -= 0.01 * np.sqrt(1 - 0.99**turn) / (1 - 0.9**turn) * velocity / (np.sqrt(square) + 1e-3)
    return place


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", ["nesterov", "sgd", "adam"])
def test_outer_optimizers_follow_their_formulas(kind, replicas):
    rounds, weights, state = rounds_of(replicas, outer_optimizer=kind)
    moves = [0.5, -0.25, 0.125]
    for turn, by in enumerate(moves, start=1):
        move(rounds, weights, by)
        rounds.assign_here(state, state.numpy() + 1.0)
        report = rounds.end(ALONE, 5 * turn)
        assert report.movement == pytest.approx(np.sqrt(3) * abs(by), rel=1e-6)
        assert report.drift == pytest.approx(0.0, abs=1e-3)  # there is one worker
        place = expected(kind, moves[:turn])
        np.testing.assert_allclose(weights[0].numpy(), [1.0 + place, 2.0 + place], rtol=1e-6)
        np.testing.assert_allclose(weights[1].numpy(), [[3.0 + place]], rtol=1e-6)
        np.testing.assert_allclose(state.numpy(), [10.0 + turn], rtol=1e-6)
    assert rounds.done == 3
    assert not rounds.under_way


def test_the_outer_weights_are_shown_within_a_round():
    rounds, weights, _ = rounds_of(outer_optimizer="sgd")
    move(rounds, weights, 0.5)
    with rounds.sets.showing_outer():
        np.testing.assert_array_equal(weights[0].numpy(), [1.0, 2.0])
        np.testing.assert_array_equal(rounds.inner_values()[0], [1.5, 2.5])
    np.testing.assert_array_equal(weights[0].numpy(), [1.5, 2.5])
    np.testing.assert_array_equal(rounds.inner_values()[0], [1.5, 2.5])
    rounds.sets.show_outer()
    np.testing.assert_array_equal(weights[0].numpy(), [1.0, 2.0])
    rounds.end(ALONE, 5)  # of the inner weights, whatever is shown
    np.testing.assert_array_equal(weights[0].numpy(), [1.5, 2.5])


def test_weights_that_a_hook_assigns_are_where_the_next_round_begins():
    rounds, weights, _ = rounds_of(outer_optimizer="sgd", outer_learning_rate=0.5)
    rounds.assign_here(weights[0], [5.0, 6.0])
    rounds.begin()
    move(rounds, weights, 1.0)
    rounds.begin()  # not within a round
    rounds.end(ALONE, 5)
    np.testing.assert_array_equal(weights[0].numpy(), [5.5, 6.5])


def test_lost_weights_are_taken_back_and_end_the_run_the_third_time(caplog):
    rounds, weights, state = rounds_of()
    rounds.assign_here(rounds.inner.variables[2], [np.nan, 1.0])
    for turn in range(3):
        move(rounds, weights, np.nan)
        rounds.assign_here(state, [np.inf])
        if turn == 2:
            with pytest.raises(TrainingError, match=r"worker 0 were not finite .* 3 rounds in a row"):
                rounds.end(ALONE, 5)
            return
        assert rounds.end(ALONE, 5) is None
        np.testing.assert_array_equal(weights[0].numpy(), [1.0, 2.0])
        np.testing.assert_array_equal(state.numpy(), [10.0])
        np.testing.assert_array_equal(rounds.inner.variables[2].numpy(), [0.0, 1.0])
    assert "contributes nothing" in caplog.text


def file_of_worker(by: float, slot: float) -> dict[str, np.ndarray]:
    """The state of a worker whose weights have moved within a round, and whose inner optimizer has equal slots."""
    rounds, weights, _ = rounds_of(outer_optimizer="sgd")
    move(rounds, weights, by)
    slots = [variable.numpy() for variable in rounds.inner.variables]
    slots = [np.full_like(value, slot) if value.dtype == np.float32 else value for value in slots]
    return saved.export(rounds, None) | {f"local/optimizer/{place}": value for place, value in enumerate(slots)}


def test_workers_that_are_not_finite_contribute_nothing_when_their_number_changes():
    rounds, weights, _ = rounds_of(outer_optimizer="sgd")
    files = [file_of_worker(0.5, 0.0), file_of_worker(np.nan, np.inf), file_of_worker(1.0, 4.0)]
    _, message = saved.restore(rounds, 3, 1, files.__getitem__)
    ended = "ended the round of 3 workers, 5 steps long, where it was saved"
    assert message == f"{ended}; left out worker 1 of 3: not finite"
    np.testing.assert_array_equal(weights[0].numpy(), [1.75, 2.75])
    np.testing.assert_array_equal(rounds.inner.variables[2].numpy(), [2.0, 2.0])
    # None is left.
    rounds.assign_here(rounds.inner.variables[2], [np.nan, 2.0])
    _, message = saved.restore(rounds, 2, 1, [files[0], files[1]].__getitem__)
    assert message == "left out workers 0, 1 of 2: not finite"
    np.testing.assert_array_equal(weights[0].numpy(), [1.75, 2.75])
    np.testing.assert_array_equal(rounds.inner.variables[2].numpy(), [0.0, 2.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "one_device", "shard": "optimizer"}, "--local_steps=5 does not work with --shard=optimizer"),
        ({"ema": 0.9}, "--local_steps=5 does not work with --ema=0.9"),
        ({"exchange": "topk:0.01,momentum=0.9"}, "does not work with momentum or a ramp in --exchange=topk"),
    ],
)
def test_what_cannot_have_local_steps_is_refused_by_name(options, message):
    config = ExperimentConfig.from_flat_dict({"model": "mlp", "dataset": "digits", "local_steps": 5, **options})
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        validate_config(config)


@pytest.mark.parametrize("name", ["outer_momentum", "outer_learning_rate", "outer_time_share"])
def test_outer_options_without_local_steps_are_refused(name):
    config = ExperimentConfig.from_flat_dict({"model": "mlp", "dataset": "digits", name: 0.5})
    with pytest.raises(ConfigError, match=rf"--{name}=0\.5 has no effect"):
        validate_config(config)


@pytest.mark.parametrize(
    ("length", "given"), [({"local_steps": 5}, "--local_steps=5"), ({"round_seconds": 2.0}, "--round_seconds=2")]
)
def test_a_share_of_the_time_is_for_rounds_whose_length_is_measured(length, given):
    common = {"model": "mlp", "dataset": "digits", "outer_time_share": 0.5}
    with pytest.raises(ConfigError, match=f"_time_share=0.5 has no effect with {given}: rounds have that length"):
        validate_config(ExperimentConfig.from_flat_dict(common | length))
    validate_config(ExperimentConfig.from_flat_dict(common | {"local_steps": "auto"}))


def test_the_defaults_of_outer_optimizers():
    assert not OuterConfig().uses_rounds
    assert OuterConfig(outer_optimizer="sgd").uses_rounds
    assert (OuterConfig(local_steps=2).learning_rate, OuterConfig(local_steps=2).momentum) == (0.7, 0.9)
    with pytest.raises(ConfigError, match=r"--outer_momentum=-0\.5 is negative"):
        OuterConfig(outer_momentum=-0.5)


@pytest.mark.parametrize("options", [{}, {"outer_fragments": 2}])
def test_a_model_that_was_built_before_the_strategy_takes_local_steps(options):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    common = {"strategy": "one_device", "global_batch_size": 8, "jit_compile": False, "verbose": 0, "local_steps": 2}
    x = np.ones([16, 2], np.float32)
    assert tfpar.Trainer(model, "sgd", "mse", **common, **options).fit(x, x[:, :1], steps=4)["rounds"] == 2
