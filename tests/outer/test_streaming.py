"""Fragments that travel while steps run: against plain rounds, a simulation in NumPy, and their rules."""

from __future__ import annotations

from tests.training.harness import strategy_of
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.tensorflow import world_group
from tfpar.config import ConfigError, ExperimentConfig, OuterConfig, TrainingError
from tfpar.exchange import Exchange
from tfpar.outer.local import FragmentExchange, Rounds, Streaming
from tfpar.outer.local.fragments import divide
from tfpar.training.validate import validate_config

import keras
import numpy as np
import pytest
import tensorflow as tf

ALONE = WorkerAgreement(world_group())
WIDTHS = [3, 5, 4, 2]


class OneWorker:
    """One worker, whose steps a test makes: rounds, or fragments."""

    def __init__(self, replicas: int = 1, *, streams: bool = True, **options) -> None:
        self.config = OuterConfig(**{"local_steps": 4, **options})
        strategy = strategy_of(replicas)
        random = np.random.default_rng(0)
        with strategy.scope():
            self.weights = [keras.Variable(random.normal(size=[n]), name=f"w{n}") for n in WIDTHS]
            self.state = keras.Variable([10.0], trainable=False, name="mean")
            inner = keras.optimizers.SGD()
            inner.build(self.weights)
        exchange = FragmentExchange("none", self.config.outer_fragments) if streams else Exchange("none")
        exchange.build(self.weights, strategy=strategy, group=world_group())
        others = {"inner": inner, "exchange": exchange, "strategy": strategy, "worker": 0, "workers": 1}
        kind = Streaming if streams else Rounds
        self.rounds = kind(self.config, self.weights, [self.state], [], **others)
        self.rounds.start()
        self.step = 0

    def run(self, steps: int, *, finished: bool = False) -> list[list[np.ndarray]]:
        """Steps of which each moves all weights by amounts of its own; the inner weights after each of them."""
        history, end = [], self.step + steps
        while self.step < end:
            self.rounds.begin()
            self.step += 1
            for weight, move in zip(self.weights, moves(self.step), strict=True):
                self.rounds.assign_here(weight, weight.numpy() + move)
            self.rounds.assign_here(self.state, self.state.numpy() + 1.0)
            self.rounds.note(1, np.array([8.0]))
            self.rounds.after_steps(ALONE, self.step, finished=finished and self.step == end)
            history.append(self.rounds.inner_values())
        return history


def moves(step: int) -> list[np.ndarray]:
    return [np.random.default_rng([step, n]).normal(size=[n]).astype(np.float32) for n in WIDTHS]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", ["nesterov", "sgd", "adam"])
def test_one_fragment_without_delay_is_a_plain_round_bit_for_bit(kind, replicas):
    plain = OneWorker(replicas, streams=False, outer_optimizer=kind).run(10, finished=True)
    streamed = OneWorker(replicas, outer_optimizer=kind, outer_delay=0).run(10, finished=True)
    for mine, theirs in zip(streamed, plain, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(one, other)


def simulated(steps: int, config: OuterConfig, fragments: list[tuple[int, ...]]) -> list[list[np.ndarray]]:
    """Algorithm 2 of Douillard et al. 2025 with one worker and outer SGD, in float64."""
    outer = [np.asarray(weight.numpy(), np.float64) for weight in OneWorker().weights]
    inner = [weight.copy() for weight in outer]
    flights: dict[int, tuple[int, dict[int, np.ndarray]]] = {}
    history = []
    for step in range(1, steps + 1):
        inner = [weight + move for weight, move in zip(inner, moves(step), strict=True)]
        for part, (due, movement) in list(flights.items()):
            if due == step:
                del flights[part]
                for place, value in movement.items():
                    outer[place] = outer[place] - config.learning_rate * value
                    inner[place] = config.own_share * inner[place] + (1 - config.own_share) * outer[place]
        for part, places in enumerate(fragments):
            if step % config.local_steps == (part + 1) * config.local_steps // len(fragments) % config.local_steps:
                flights[part] = step + config.delay, {place: outer[place] - inner[place] for place in places}
        history.append([*inner])
    return history


@pytest.mark.parametrize(("own_share", "rate"), [(0.0, 1.0), (0.5, 1.0), (0.25, 0.5)])
def test_fragments_follow_the_paper(own_share, rate):
    options = {"outer_fragments": 2, "outer_delay": 1, "outer_optimizer": "sgd"}
    options |= {"outer_own_share": own_share, "outer_learning_rate": rate}
    worker = OneWorker(**options)
    found = worker.run(14)
    expected = simulated(14, worker.config, worker.rounds._exchange.fragments)
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True), start=1):
        for one, other in zip(mine, theirs, strict=False):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=f"step {step}")


def test_a_run_goes_on_with_a_fragment_in_flight_bit_for_bit():
    options = {"outer_fragments": 2, "outer_delay": 1}
    whole = OneWorker(**options)
    whole.run(14, finished=True)
    first, second = OneWorker(**options), OneWorker(**options)
    first.run(10)
    saved = first.rounds.export()
    assert saved["flight/0/due"] == 11
    second.step = first.step
    for mine, theirs in zip(
        [*second.rounds.sets.outer, *second.rounds.outer_state],
        [*first.rounds.sets.outer, *first.rounds.outer_state],
        strict=True,
    ):
        mine.assign(theirs)
    second.rounds.restore(saved, same_workers=True)
    second.rounds.resume_inner(first.rounds.inner_values(), 1, 0.0)
    second.run(4, finished=True)
    assert second.rounds.applied == whole.rounds.applied
    for mine, theirs in zip(second.rounds.inner_values(), whole.rounds.inner_values(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_at_the_end_the_model_has_the_outer_weights():
    worker = OneWorker(outer_fragments=2, outer_delay=1)
    worker.run(11)
    assert worker.rounds.under_way
    worker.run(1, finished=True)
    assert not worker.rounds.under_way
    for one, other in zip(worker.rounds.sets.model, worker.rounds.sets.outer, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.parametrize("streams", [True, False])
def test_another_run_of_a_trainer_counts_its_own_rounds(streams):
    worker = OneWorker(streams=streams)
    for _ in range(2):
        worker.rounds.start()  # as `fit` does
        worker.step = 0
        worker.run(10, finished=True)
        assert worker.rounds.done == 3


def test_lost_weights_are_taken_back_and_end_the_run_the_third_time():
    worker = OneWorker(outer_fragments=2, outer_delay=1)
    before = [weight.numpy() for weight in worker.weights]
    worker.rounds.note(1, np.array([8.0]))  # a round is under way

    def lose() -> None:
        for _ in range(20):
            worker.rounds.assign_here(worker.weights[0], np.full([3], np.nan))
            worker.run(1)

    with pytest.raises(TrainingError, match=r"worker 0 were not finite .* 3 exchanges in a row"):
        lose()
    for weight, value in zip(worker.rounds.sets.outer, before, strict=False):
        np.testing.assert_array_equal(weight.numpy(), value)


def test_fragments_are_layers_in_order_of_about_equal_bytes():
    model = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(n) for n in (8, 64, 64, 8, 8, 8))])
    weights = model.trainable_variables
    for fragments in range(1, 7):
        found = divide(weights, fragments)
        assert [place for part in found for place in part] == list(range(12))
        assert all(part and len(part) % 2 == 0 for part in found)  # kernel and bias stay together
    assert divide(weights, 3) == [(0, 1, 2, 3), (4, 5), (6, 7, 8, 9, 10, 11)]
    with pytest.raises(ConfigError, match=r"--outer_fragments=7: the model has only 6 layers"):
        divide(weights, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"outer_fragments": 6},
            r"--outer_fragments=6 does not work with --local_steps=5: the exchanges of fragments start",
        ),
        ({"outer_delay": 5}, r"--outer_delay=5 does not work with --local_steps=5: a fragment must be applied before"),
        ({"outer_fragments": 2, "local_steps": "auto"}, r"--outer_fragments=2 does not work with --local_steps=auto"),
        ({"outer_own_share": -0.5}, r"--outer_own_share=-0\.5 is negative"),
        ({"outer_own_share": 0.5}, r"--outer_own_share=0\.5 has no effect"),
    ],
)
def test_what_fragments_cannot_be_is_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        validate_config(
            ExperimentConfig.from_flat_dict({"model": "mlp", "dataset": "digits", "local_steps": 5, **options})
        )


def test_the_defaults_of_fragments():
    plain, streamed = OuterConfig(local_steps=50), OuterConfig(local_steps=50, outer_fragments=4)
    assert (plain.streams, plain.delay, plain.own_share) == (False, 0, 0.0)
    assert (streamed.streams, streamed.delay, streamed.own_share) == (True, 5, 0.5)
    assert OuterConfig(local_steps=6, outer_fragments=3).delay == 2
    assert OuterConfig(local_steps=6, outer_fragments=3, outer_delay=0).own_share == 0.0


def test_a_fragment_travels_while_the_next_step_runs():
    """A step does not wait for the exchange, which ends only after it here; the result does not depend on it."""
    worker = OneWorker(outer_fragments=2, outer_delay=1)
    release, started = tf.Variable(False), []
    start = worker.rounds._exchange.start

    def slow(exchange):
        def call():
            started.append(worker.step)
            while not release.numpy():
                pass
            return exchange()

        return start(call)

    worker.rounds._exchange.start = slow
    worker.run(2)  # the first leaves
    (exchange,) = worker.rounds._running.values()
    assert not exchange.result.done()
    release.assign(True)
    worker.run(1)
    expected = OneWorker(outer_fragments=2, outer_delay=1).run(3)[-1]
    for one, other in zip(worker.rounds.inner_values(), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_statistics_that_some_fragments_do_not_have_yet(monkeypatch):
    """The sums of an exchange are compared now and then, and fragments take turns."""
    exchange = FragmentExchange("int4", 2)
    exchange.build([keras.Variable(np.zeros([64, 64], np.float32)) for _ in range(2)], group=world_group())
    found = [{"residual_over_gradient": 0.5, "cosine": 0.9}, {"residual_over_gradient": 0.25}]
    for part, values in zip(exchange.parts, found, strict=True):
        monkeypatch.setattr(part, "observed", lambda values=values: values)
    assert exchange.observed() == {"residual_over_gradient": 0.375, "cosine": 0.9}
