"""DQN: what is remembered, which targets are made of it, and what is minimised."""

from __future__ import annotations

import dataclasses
import tracemalloc
from typing import NamedTuple

from tests.rl.harness import SMALL, trained, values
from tfpar import rl
from tfpar.config import ConfigError, ExperimentConfig, ReinforcementConfig
from tfpar.parallel.topology import Topology
from tfpar.rl import environments, noise, ppo, rollout
from tfpar.rl.dqn import DQN
from tfpar.rl.options import Room, check_replay, rooms_for_replays, with_options
from tfpar.rl.policy import build_q_network
from tfpar.rl.ppo import PPO
from tfpar.rl.step import MEMORY, AgentMemory

import keras
import numpy as np
import pytest
import tensorflow as tf

OPTIONS = ReinforcementConfig(
    algorithm="dqn",
    environments=4,
    rollout_steps=8,
    minibatches=1,
    rollout_epochs=2,
    replay_size=96,
    replay_batch=40,
    n_step=3,
    discount=0.9,
    target_every=4,
    explore_end=0.5,
    explore_share=0.5,
    reward_scale=2.0,
)


@pytest.fixture(scope="module")
def gathered():
    """An algorithm, and what it remembers after three and four gatherings of a replay of three."""
    keras.utils.set_random_seed(1)
    algorithm = DQN(
        build_q_network((10, 5, 1), environments.Discrete(3), hidden=(6,)), environments.find("Catch"), OPTIONS, 3, 40
    )
    params = [tf.convert_to_tensor(variable) for variable in algorithm.model.trainable_variables]
    memory, remembered = algorithm.initial_memory(0), []
    for step in (0, 2, 4, 6):
        _, memory = algorithm.gather([param + step for param in params], [], memory, tf.constant(step, tf.int64), 0)
        remembered.append(memory)
    return algorithm, params, remembered


def test_the_replay_keeps_the_newest_and_the_target_network_follows(gathered):
    _, params, (first, _, third, fourth) = gathered
    assert [int(memory.written) for memory in (first, third, fourth)] == [8, 24, 32]
    assert np.all(third.replay.observation[8:24] == fourth.replay.observation[8:24])
    assert np.any(third.replay.observation[:8] != fourth.replay.observation[:8])
    for memory, change in ((first, 0), (third, 4), (fourth, 4)):  # every 4 steps
        np.testing.assert_array_equal(memory.target[0], params[0] + change)
    assert float(third.episodes[0]) == np.sum(third.replay.ended[16:24])
    assert np.max(np.abs(third.replay.reward)) == 2.0


def test_targets_are_those_of_the_definition(gathered):
    """Sums of three rewards, less where an episode ends, in plain Python over everything that is remembered."""
    algorithm, _, (*_, memory) = gathered
    replay = [np.asarray(part) for part in memory.replay]
    observation, action, reward, following, terminated, ended = replay
    expected = {}
    for env in range(4):
        for time in range(8, 32 - 2):  # the newest 24 steps, of which the last two have too few after them
            total, discount = 0.0, 1.0
            for later in range(3):
                slot = (time + later) % 24
                total += discount * reward[slot, env]
                discount *= 0.9 * (1.0 - terminated[slot, env])
                if ended[slot, env]:
                    break
            start = time % 24
            key = (observation[start, env].tobytes(), int(action[start, env]), following[slot, env].tobytes())
            expected.setdefault(key, set()).add((round(float(total), 4), round(float(discount), 4)))
    x, targets, weight = algorithm.batch(memory, tf.constant(6, tf.int64), 0)
    assert x.shape == (1, 40, 10, 5, 1)
    assert float(tf.reduce_sum(weight)) == 40.0
    seen = set()
    for place in range(40):
        key = (
            x[0, place].numpy().tobytes(),
            int(targets.action[0, place]),
            targets.following[0, place].numpy().tobytes(),
        )
        found = round(float(targets.reward[0, place]), 4), round(float(targets.discount[0, place]), 4)
        assert found in expected[key]
        seen.add(found)
    assert len(seen) > 2
    assert float(tf.reduce_sum(targets.episodes[0, :, 0])) == pytest.approx(float(memory.episodes[0]))
    again = algorithm.batch(memory, tf.constant(7, tf.int64), 0)
    assert np.any(again[0] != x)
    assert not np.any(again[1].episodes)  # reported once


def test_the_current_network_chooses_and_the_target_network_values(gathered):
    algorithm, params, (*_, memory) = gathered
    x, targets, weight = tf.nest.map_structure(
        lambda part: part[0], algorithm.batch(memory, tf.constant(6, tf.int64), 0)
    )
    shifted = [param + tf.random.stateless_normal(param.shape, [4, place]) for place, param in enumerate(params)]
    sums = algorithm.objective(shifted, [], (x, targets, weight), training=True)

    def network(weights, observations):
        kernel, bias, last, offset = (np.asarray(part) for part in weights)
        return np.maximum(np.reshape(observations, [40, 50]) @ kernel + bias, 0.0) @ last + offset

    ahead = network(shifted, targets.following)
    valued = network(memory.target, targets.following)[np.arange(40), np.argmax(ahead, axis=1)]
    assert np.any(np.argmax(ahead, axis=1) != np.argmax(network(memory.target, targets.following), axis=1))
    error = network(shifted, x)[np.arange(40), targets.action] - (targets.reward + targets.discount * valued)
    huber = np.where(np.abs(error) < 1.0, 0.5 * error**2, np.abs(error) - 0.5)
    assert float(sums.loss) == pytest.approx(np.sum(huber), rel=1e-4)
    assert algorithm.objective.totals.results(sums.metrics)["error"] == pytest.approx(np.mean(np.abs(error)), rel=1e-4)


def test_importance_weights_do_not_change_returns(gathered):
    algorithm, params, (*_, memory) = gathered
    x, targets, weight = algorithm.batch(
        memory._replace(episodes=tf.constant([2.0, 5.0, 18.0])), tf.constant(6, tf.int64), 0
    )
    first = tf.nest.map_structure(lambda part: part[0], (x, targets, 0.1 * weight))
    sums = algorithm.objective(params, [], first, training=True)
    results = algorithm.objective.totals.results(sums.metrics)
    assert (results["return"], results["length"]) == (pytest.approx(2.5), pytest.approx(9.0))
    assert dict(zip(("episodes", "return", "length"), map(float, sums.metrics[-3:]), strict=True)) == pytest.approx(
        {"episodes": 2.0, "return": 5.0, "length": 18.0}
    )


def test_transitions_of_larger_errors_are_drawn_more_often(gathered, monkeypatch):
    """By frequencies and weights of the definition (Schaul et al. 2016, equation 1 and section 3.4)."""
    algorithm, params, (*_, memory) = gathered
    options = dataclasses.replace(OPTIONS, replay_priority=0.5, replay_correction=0.4, replay_batch=40)
    algorithm = dataclasses.replace(algorithm, options=options)
    powers = np.random.default_rng(0).uniform(0.1, 2.0, [24, 4]).astype(np.float32)
    memory = memory._replace(priority=tf.constant(powers))
    drawn_at = tf.function(lambda step: algorithm._drawn(memory, step, 0), autograph=False)
    times, weights = [], []
    for step in range(300):
        first, weight = drawn_at(tf.constant(step, tf.int64))
        times.append(first.numpy())
        weights.append(weight.numpy())
    times, weights = np.concatenate(times), np.concatenate(weights)
    assert (times.min(), times.max()) == (8, 29)  # of 32 steps the newest 24, less those with too few after them
    for env in range(4):
        power = np.array([powers[time % 24, env] for time in range(8, 30)])
        odds = power / power.sum()
        np.testing.assert_allclose(np.bincount(times[:, env] - 8, minlength=22) / 3000, odds, atol=0.02)
        # The exponent rises from 0.4 to 1 over the run's 40 steps.
        np.testing.assert_allclose(weights[:10, env], (22 * odds[times[:10, env] - 8]) ** -0.4, rtol=1e-3)
        np.testing.assert_allclose(weights[-10:, env], (22 * odds[times[-10:, env] - 8]) ** -1.0, rtol=1e-3)

    step = tf.constant(6, tf.int64)
    batch, (first, weight) = algorithm.batch(memory, step, 0), algorithm._drawn(memory, step, 0)
    assert algorithm.noted_fields == ("priority",)
    monkeypatch.setattr(DQN, "_drawn", None)  # the places are in the batch
    [priority] = algorithm.noted(params, [], memory, batch, step, 0)
    monkeypatch.undo()
    noted = priority.numpy()
    np.testing.assert_array_equal(batch[2].numpy().ravel(), weight.numpy().ravel())
    values = algorithm.model(batch[0][0])
    errors = algorithm.objective.errors(params, [], values, tf.nest.map_structure(lambda part: part[0], batch[1]))
    drawn = np.zeros([24, 4], bool)
    for place, (time, error) in enumerate(zip(first.numpy().ravel(), errors.numpy(), strict=True)):
        drawn[time % 24, place % 4] = True
        assert noted[time % 24, place % 4] == pytest.approx(np.sqrt(abs(error) + 1e-3), rel=1e-4)
    np.testing.assert_array_equal(noted[~drawn], powers[~drawn])
    _, later = algorithm.gather(params, [], memory._replace(priority=tf.constant(noted)), step, 0)
    np.testing.assert_allclose(later.priority[8:16], np.maximum(noted.max(axis=0), 1.0)[np.newaxis].repeat(8, axis=0))


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_binary_search_draws_what_comparing_all_does(jit_compile):
    random = np.random.default_rng(0)
    search = tf.function(noise.upper_bound, jit_compile=jit_compile, autograph=False)
    for size in (1, 7, 8, 300):
        # Some transitions have no weight, and some places are ends.
        ends = np.cumsum(random.uniform(size=[size, 3]) * (random.uniform(size=[size, 3]) < 0.7), axis=0)
        ends = ends.astype(np.float32)
        places = np.concatenate([random.uniform(0.0, ends[-1], [50, 3]), ends[:5], np.zeros([1, 3])])
        places = places.astype(np.float32)
        np.testing.assert_array_equal(search(ends, places), (ends <= places[:, np.newaxis]).sum(axis=1))


def test_a_draw_makes_no_tensor_of_every_pair(gathered):
    """Of a place and a transition: 512 places in a replay of a million would be half a billion comparisons."""
    algorithm, _, (*_, memory) = gathered
    algorithm = dataclasses.replace(algorithm, options=dataclasses.replace(OPTIONS, replay_priority=0.5))
    memory = memory._replace(priority=tf.ones([24, 4]))
    traced = tf.function(lambda: algorithm._drawn(memory, tf.constant(6, tf.int64), 0), autograph=False)
    shapes = [output.shape for op in traced.get_concrete_function().graph.get_operations() for output in op.outputs]
    assert max(shape.num_elements() or 0 for shape in shapes if shape.rank is not None) == 24 * 4


def test_a_transition_that_is_not_finite_does_not_spoil_the_priorities(gathered):
    """An environment reported one reward that is not a number."""
    algorithm, params, (*_, memory) = gathered
    algorithm = dataclasses.replace(algorithm, options=dataclasses.replace(OPTIONS, replay_priority=0.5))
    reward = memory.replay.reward.numpy()
    reward[3, 1] = np.nan
    priority = np.ones_like(reward)
    priority[3, 1] = 1e4  # so that it is drawn
    memory = memory._replace(replay=memory.replay._replace(reward=reward), priority=tf.constant(priority))
    step = tf.constant(6, tf.int64)
    batch = algorithm.batch(memory, step, 0)
    assert np.isnan(batch[1].reward).any()
    [noted] = algorithm.noted(params, [], memory, batch, step, 0)
    assert np.isfinite(noted).all()
    assert noted[3, 1] < 0.1
    assert np.isfinite(algorithm.batch(memory._replace(priority=noted), step, 0)[2]).all()


@pytest.mark.parametrize("priority", [0.0, 0.6])
def test_two_replicas_learn_what_one_does(tmp_path, priority):
    options = {
        "algorithm": "dqn",
        "replay_priority": priority,
        "minibatches": 1,
        "replay_size": 512,
        "replay_batch": 16,
        "steps": 8,
        "workdir": str(tmp_path),
    }
    one, summary = trained(**options)
    assert summary["eval"]["return"] >= 8.0
    assert "return" in summary.history
    two, _ = trained(**options | {"strategy": "mirrored", "devices": 2, "workdir": ""})
    for first, second in zip(values(one), values(two), strict=True):
        np.testing.assert_allclose(first, second, atol=1e-4)
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded(np.zeros([3, 4], np.float32)).shape == (3, 2)


def test_bytes_stay_bytes_and_give_the_same_batches(gathered):
    """An environment of bytes, and one that differs from it in the dtype of what is kept."""
    algorithm, params, _ = gathered
    random = np.random.default_rng(0)
    shape, batches = [8, 4, 10, 5, 1], []
    observation, following = (random.integers(0, 256, shape).astype(np.uint8) for _ in range(2))
    numbers = {name: random.integers(0, 2, [8, 4]).astype(np.float32) for name in rollout.Step._fields}
    for kind in ("uint8", "float32"):
        environment = environments.HostEnvironment(
            "gym:Bytes", (10, 5, 1), environments.Discrete(3), None, 1.0, None, None, None, kind
        )
        own = dataclasses.replace(algorithm, environment=environment)
        taken = {"observation": observation.astype(kind), "following": following.astype(kind)}
        taken = rollout.Step(**numbers | taken | {"action": numbers["log_prob"].astype(np.int32)})
        memory = own.remember(params, [], own.initial_memory(0), tf.nest.map_structure(tf.constant, taken), 0)
        assert memory.replay.observation.dtype == memory.replay.following.dtype == kind
        batches.append(tf.nest.flatten(own.batch(memory, tf.constant(0, tf.int64), 0)))
    for one, two in zip(*batches, strict=True):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)


def test_the_memory_says_its_dtypes_without_tensors():
    memory = AgentMemory(
        DQN(build_q_network((4,), environments.Discrete(2)), environments.find("CartPole-v1"), OPTIONS, 3, 40),
        tf.distribute.get_strategy(),
        first=0,
    )
    saved = {name: array.astype(np.float32) for name, array in memory.export().items()}
    assert memory.restore(saved)  # numbers in another dtype, as pixels before they stayed bytes
    assert not any(map(tf.is_tensor, tf.nest.flatten(memory.structure)))
    assert memory.structure.replay.observation == tf.TensorSpec([24, 4, 4], tf.float32)


def test_a_replay_that_does_not_fit_is_refused():
    with pytest.raises(
        ConfigError, match=r"--replay_size=1000000000000: the replay of CartPole-v1 takes 44,703 GiB on each replica"
    ):
        rl.ReinforcementTrainer("CartPole-v1", algorithm="dqn", replay_size=10**12, strategy="one_device")
    environment = environments.find("CartPole-v1")
    options = dataclasses.replace(OPTIONS, replay_size=3200, replay_priority=0.5)
    own = DQN(build_q_network((4,), environments.Discrete(2)), environment, options, 3, 40, replicas=2).initial_memory(
        0
    )
    size = sum(part.numpy().nbytes for part in [*own.replay, own.priority])

    def check(available, copies=2, options=options):
        check_replay(options, environment, 2, Room(available, copies, "twice that", "replicas"))

    check(2 * size)
    check(0)  # unknown
    with pytest.raises(ConfigError, match=r"at most --replay_size=3168, or use more replicas"):
        check(2 * size - 1)
    check(2 * size - 1, options=dataclasses.replace(options, replay_size=3168))
    check(3 * size, copies=3)
    with pytest.raises(ConfigError, match=r"on each replica, and twice that; [\d.]+ KiB are available"):
        check(3 * size - 1, copies=3)
    with pytest.raises(ConfigError, match=r"Give fewer --environments"):
        check(100)


@pytest.mark.parametrize(
    ("device_type", "saves", "expected"),
    [
        ("CPU", False, [(500, 2)]),
        ("CPU", True, [(500, 3)]),
        ("GPU", False, [(70, 2)]),
        ("GPU", True, [(70, 2), (500, 1)]),
    ],
)
def test_a_checkpoint_is_a_copy_of_the_replay_in_the_memory_of_the_host(device_type, saves, expected, monkeypatch):
    monkeypatch.setattr("tfpar.rl.options.main_memory", lambda: (1000, 1000))
    monkeypatch.setattr("tfpar.rl.options.device_memory", lambda kind, devices: 70)
    topology = Topology(name="mirrored", local_replicas=2, device_type=device_type)
    rooms = rooms_for_replays(topology, saves=saves)
    assert [(room.available, room.copies) for room in rooms] == expected


@pytest.mark.parametrize("devices", [1, 2])
def test_what_a_checkpoint_saves_of_a_memory_is_copied_once(devices):
    """And not first into a list of the replicas' values: observations are a third of a replay each."""
    options = dataclasses.replace(OPTIONS, replay_size=32_000)
    algorithm = DQN(
        build_q_network((4,), environments.Discrete(2)),
        environments.find("CartPole-v1"),
        options,
        *(3, 40),
        replicas=devices,
    )
    strategy = tf.distribute.MirroredStrategy([f"CPU:{place}" for place in range(devices)])
    memory = AgentMemory(algorithm, strategy, first=0)
    tracemalloc.start()
    try:
        saved = memory.export()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = sum(array.nbytes for array in saved.values())
    assert all(len(array) == devices for array in saved.values())
    assert peak < 1.05 * size


class Counting(PPO):
    """Counts the batches in a field of the memory."""

    noted_fields = ("batches",)

    def initial_memory(self, replica):
        return Counted(*super().initial_memory(replica), tf.zeros([]))

    def gather(self, params, state, memory, step, replica):
        state, made = super().gather(params, state, ppo.Memory(*memory[:2]), step, replica)
        return state, Counted(*made, memory.batches)

    def noted(self, params, state, memory, batch, step, replica):
        return [memory.batches + batch[2].shape[0]]


class Counted(NamedTuple):
    vector: tuple
    experience: tuple
    batches: tf.Tensor


def test_another_algorithm_may_note_what_a_batch_changes(monkeypatch):
    monkeypatch.setattr("tfpar.rl.trainer.PPO", Counting)
    trainer, _ = trained(steps=8)
    assert trainer.memory.export()[f"{MEMORY}/{len(trainer.memory.export()) - 1}"].tolist() == [8.0]


def test_a2c_learns_from_a_rollout_once():
    _, summary = trained(algorithm="a2c", minibatches=1, rollout_epochs=1, steps=4)
    assert summary["steps"] == 4
    assert summary.history["kl"][-1] < 0.1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"algorithm": "dqn", "clip_ratio": 0.5, "gae_lambda": 0.1},
            r"--algorithm=dqn does not use --gae_lambda=0.1 \(of ppo, a2c\), --clip_ratio=0.5 \(of ppo\)\. Leave",
        ),
        ({"replay_priority": 0.0}, r"--algorithm=ppo does not use --replay_priority=0.0 \(of dqn\)"),  # the default
        ({"algorithm": "a2c", "clip_ratio": 0.2}, r"--algorithm=a2c does not use --clip_ratio=0.2"),
        ({"algorithm": "dqn", "normalize_observations": False}, r"not use --normalize_observations=False"),
    ],
)
def test_options_of_another_algorithm_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        rl.ReinforcementTrainer(**(SMALL | {"steps": 20} | options))
    algorithm = {"algorithm": "ppo", "rollout_epochs": 1, "minibatches": 1} | options
    whole = ExperimentConfig.from_flat_dict({name: algorithm.pop(name) for name in list(algorithm)[:3]})
    with pytest.raises(ConfigError, match=said):
        with_options(whole, algorithm)


def test_presets_of_an_environment_are_no_given_options():
    assert with_options(None, {"env": "Acrobot-v1", "algorithm": "dqn"}).reinforcement.entropy_coef == 0.01


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"algorithm": "a2c"}, r"--algorithm=a2c learns from each transition once.*Give 1 for both"),
        ({"algorithm": "dqn", "replay_batch": 12}, r"--replay_batch=12 is not divisible by --environments=8"),
        ({"algorithm": "dqn", "n_step": 9}, r"--n_step=9: a rollout must be at least as long"),
        ({"algorithm": "dqn", "env": "Pendulum-v1"}, r"--algorithm=dqn values actions one by one, and Pendulum-v1"),
    ],
)
def test_what_cannot_work_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        rl.ReinforcementTrainer(**(SMALL | {"steps": 20} | options))
