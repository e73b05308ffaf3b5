"""PPO: what a rollout says, which minibatches are made of it, and what is minimised."""

from __future__ import annotations

from tfpar.collectives.replicas import sum_over_replicas
from tfpar.config import ReinforcementConfig
from tfpar.rl import environments, vector
from tfpar.rl.normalization import Statistics
from tfpar.rl.policy import Distribution, build_policy
from tfpar.rl.ppo import PPO
from tfpar.rl.rollout import roll_out
from tfpar.rl.sums import Scales
from tfpar.training.model.call import call_model
from tfpar.training.seeds import run_seed

import keras
import numpy as np
import pytest
import tensorflow as tf

OPTIONS = ReinforcementConfig(environments=6, rollout_steps=12, minibatches=3, rollout_epochs=2, hidden="8")


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(1)
    return build_policy((4,), environments.Discrete(2), hidden=(8,))


def algorithm(model, replicas=1, **options):
    return PPO(model, environments.find("CartPole-v1"), OPTIONS, 3, replicas=replicas, **options)


def weights(model):
    return tuple(
        [tf.convert_to_tensor(v.value) for v in part]
        for part in (model.trainable_variables, model.non_trainable_variables)
    )


def test_advantages_are_those_of_the_definition():
    """Generalised advantage estimation by the sum over all later errors, in plain Python."""
    environment, discount, decay = environments.find("MountainCar-v0"), 0.9, 0.8
    seed, index = run_seed(5), tf.range(3)
    values = lambda observation: 3.0 * observation[:, :1] + 1.0  # noqa: E731

    def apply(observation):
        return [tf.zeros([len(observation), 3]), values(observation)]

    start = vector.reset(environment, seed, index)
    # One is cut off by the time limit in the stretch, one arrives, one does neither.
    start = start._replace(
        state=(tf.constant([-0.5, 0.47, -0.5]), tf.constant([0.0, 0.07, 0.0])), steps=tf.constant([196, 10, 0])
    )
    end, past = roll_out(
        environment,
        apply,
        start,
        steps=8,
        seed=seed,
        index=index,
        time=tf.constant(40),
        discount=discount,
        gae_lambda=decay,
        reward_scale=2.0,
    )
    np.testing.assert_array_equal(np.argmax(past.ended, axis=0)[:2], [3, 0])
    assert past.episode_return[3, 0] == -4.0  # rewards before the stretch are not known to it
    assert past.episode_length[3, 0] == 200.0
    np.testing.assert_array_equal(end.steps[0:1], [4])

    observed, action = past.observation.numpy(), past.action.numpy()
    expected = np.zeros([8, 3])
    for env in range(3):
        errors, ends = [], []
        for time in range(8):
            moved = environment.step(
                tuple(tf.constant(observed[time, env, i : i + 1]) for i in (0, 1)), action[time, env : env + 1], []
            )
            following = float(values(environment.observe(moved.state))[0, 0]) * (not bool(moved.terminated[0]))
            errors.append(-2.0 + discount * following - float(values(observed[time, env : env + 1])[0, 0]))
            ends.append(bool(past.ended[time, env]))
        for time in range(8):
            for later in range(time, 8):
                expected[time, env] += (discount * decay) ** (later - time) * errors[later]
                if ends[later]:
                    break
    np.testing.assert_allclose(past.advantage, expected, atol=1e-4)
    np.testing.assert_allclose(past.target, expected + past.value, atol=1e-4)


def test_minibatches_have_every_transition_once_an_epoch_however_environments_are_split(model):
    whole = algorithm(model)
    memory = whole.initial_memory(0)
    numbered = tf.reshape(tf.range(72, dtype=tf.float32), [12, 6])
    memory = memory._replace(experience=memory.experience._replace(value=numbered))
    halves = []
    for replica in range(2):
        half = algorithm(model, replicas=2)
        part = half.initial_memory(replica)
        own = numbered[:, 3 * replica : 3 * replica + 3]
        halves.append((half, part._replace(experience=part.experience._replace(value=own))))
        np.testing.assert_array_equal(part.vector.state[0], memory.vector.state[0][3 * replica : 3 * replica + 3])
    seen = []
    for step in range(6):
        x, targets, weight = whole.batch(memory, tf.constant(step, tf.int64), 0)
        chosen = np.sort(targets.experience.value.numpy().ravel())
        split = [
            half.batch(part, tf.constant(step, tf.int64), replica)[1].experience.value.numpy().ravel()
            for replica, (half, part) in enumerate(halves)
        ]
        np.testing.assert_array_equal(chosen, np.sort(np.concatenate(split)))
        np.testing.assert_array_equal(np.bincount(chosen.astype(int) % 6), [4] * 6)  # of each environment
        assert x.shape == (1, 24, 4)
        assert float(tf.reduce_sum(weight)) == 24.0
        assert float(tf.reduce_sum(targets.share)) == pytest.approx(1 / 3 if step < 3 else 0.0)
        seen.append(chosen)
    for epoch in (seen[:3], seen[3:]):
        np.testing.assert_array_equal(np.sort(np.concatenate(epoch)), np.arange(72))
    assert not np.array_equal(seen[0], seen[3])


def test_the_objective_is_equation_9_of_the_paper(model):
    ppo = algorithm(model, accumulate_steps=1)
    params, state = weights(model)
    state, memory = ppo.gather(params, state, ppo.initial_memory(0), tf.constant(0, tf.int64), 0)
    batch = ppo.batch(memory, tf.constant(1, tf.int64), 0)
    x, targets, weight = tf.nest.map_structure(lambda part: part[0], batch)
    # Another policy than the one that acted.
    shifted = [param + 1.5 * tf.cast(tf.random.stateless_normal(param.shape, [1, 2]), tf.float32) for param in params]
    sums = ppo.objective(shifted, state, (x, targets, weight), training=True, scales=ppo.scales(batch, tf.identity))
    loss = sums.loss / sums.count

    outputs = [np.asarray(part, np.float64) for part in call_model(model, shifted, state, x, training=True).outputs]
    past = targets.experience
    odds = np.exp(outputs[0]) / np.exp(outputs[0]).sum(axis=1, keepdims=True)
    ratio = odds[np.arange(24), past.action] / np.exp(past.log_prob)
    advantage = (past.advantage - np.mean(past.advantage)) / np.std(past.advantage)
    surrogate = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
    assert np.any(ratio > 1.2)
    assert np.any(ratio < 0.8)
    expected = np.mean(0.5 * 0.5 * (outputs[1][:, 0] - past.target) ** 2 - surrogate)
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    explained = 1.0 - np.var(past.target - past.value) / np.var(past.target)
    assert ppo.objective.totals.results(sums.metrics)["explained_variance"] == pytest.approx(explained, rel=1e-4)


@pytest.mark.parametrize("replicas", [1, 2])
def test_advantages_are_normalised_however_large_their_mean_is(replicas):
    """In float32, of the difference of mean square and squared mean no digit is left."""
    random = np.random.default_rng(0)
    advantage = (20_000.0 + random.normal(size=[2, 300])).astype(np.float32)
    target = (-5_000.0 + random.normal(size=[2, 300])).astype(np.float32)
    missed, weight = np.zeros_like(target), np.ones_like(target)
    weight[:, 7] = 0.0
    strategy = tf.distribute.MirroredStrategy([f"CPU:{place}" for place in range(replicas)])

    @tf.function(autograph=False)
    def scaled():
        def of_replica(replica):
            parts = (tf.split(part, replicas, axis=1) for part in (advantage, target, missed, weight))
            own = [tf.stack(part)[replica] for part in parts]
            scales = Scales.of(*own, sum_over_replicas)
            return (own[0] - scales.advantage) * scales.factor, scales.target

        index = strategy.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
        return [*map(strategy.experimental_local_results, strategy.run(of_replica, [index]))]

    normalised, mean = scaled()
    kept = np.delete(advantage.astype(np.float64), 7, axis=1)
    found = np.delete(np.concatenate(normalised, axis=1), 7, axis=1)
    np.testing.assert_allclose(found, (kept - kept.mean()) / kept.std(), atol=5e-3)
    np.testing.assert_allclose(mean, np.delete(target.astype(np.float64), 7, axis=1).mean(), rtol=1e-6)


def test_observations_are_scaled_by_what_was_seen_before(model):
    statistics = Statistics(model)
    assert len(statistics.variables) == 6
    _, state = weights(model)
    random = np.random.default_rng(0)
    seen = []
    for count in (40, 60, 20):
        x = random.normal(3.0, 0.3, [count, 4]).astype(np.float32)
        seen.append(x)
        for part in np.split(x, 4):  # minibatches
            state = statistics.collected(list(state), tf.constant(part), tf.fill([len(part)], 1.0 / count))
        state = statistics.taken_over(state, count)
    every = np.concatenate(seen)
    mean, variance, observations = (state[place].numpy() for place in statistics.variables[:3])
    np.testing.assert_allclose(mean, every.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(variance, every.var(axis=0), rtol=1e-3)
    assert observations == 120
    np.testing.assert_array_equal(statistics.taken_over(state, 20)[statistics.variables[0]], mean)  # nothing new
    layer = model.get_layer("observation_normalization")
    scaled, _ = layer.stateless_call([], [state[place] for place in statistics.variables], every)
    np.testing.assert_allclose(scaled.numpy().std(axis=0), 1.0, rtol=1e-2)


def test_a_part_of_a_rollout_counts_as_the_observations_that_it_has(model):
    """Steps that are skipped collect nothing, as at the beginning of mixed_float16."""
    statistics = Statistics(model)
    _, state = weights(model)
    x = np.random.default_rng(0).normal(10.0, 1.0, [40, 4]).astype(np.float32)
    state = statistics.collected(list(state), tf.constant(x[:30]), tf.fill([30], 1.0 / 40))
    state = statistics.taken_over(state, 40)
    mean, variance, observations = (state[place].numpy() for place in statistics.variables[:3])
    np.testing.assert_allclose(mean, x[:30].mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(variance, x[:30].var(axis=0), rtol=1e-3)
    assert observations == pytest.approx(30)


@pytest.mark.parametrize("number", [np.inf, -1e30])
def test_an_infinite_observation_does_not_spoil_the_statistics(model, number):
    """As of a sensor that measures no distance. The policy clips it, so the step is applied."""
    statistics = Statistics(model)
    _, state = weights(model)
    x = np.random.default_rng(0).normal(3.0, 1.0, [1000, 4]).astype(np.float32)
    expected = statistics.taken_over(statistics.collected(list(state), tf.constant(x), tf.fill([1000], 1e-3)), 1000)
    x[7, 2] = number
    state = statistics.taken_over(statistics.collected(list(state), tf.constant(x), tf.fill([1000], 1e-3)), 1000)
    for place in statistics.variables:
        np.testing.assert_allclose(state[place], expected[place], atol=0.02)


@pytest.mark.parametrize("actions", [environments.Discrete(3), environments.Continuous((-1.0,) * 2, (1.0,) * 2)])
def test_distributions(actions):
    policy = build_policy((5,), actions, hidden=(4,))
    observation = np.random.default_rng(1).normal(size=[20000, 5]).astype(np.float32)[:1].repeat(20000, axis=0)
    outputs = policy(observation)
    distribution = Distribution.of([outputs[0] + tf.constant([0.3, -0.8, 0.1][: outputs[0].shape[1]]), *outputs[1:]])
    drawn = distribution.sample(run_seed(1), tf.range(20000), tf.constant(5)).numpy()
    log_prob, entropy = distribution.log_prob(drawn).numpy(), distribution.entropy().numpy()
    assert -log_prob.mean() == pytest.approx(entropy[0], abs=0.03)  # the definition of entropy
    if distribution.discrete:
        odds = np.exp(distribution.parameters[0][0]) / np.exp(distribution.parameters[0][0]).sum()
        np.testing.assert_allclose(np.bincount(drawn) / 20000, odds, atol=0.015)
        np.testing.assert_allclose(np.exp(log_prob[:9]), odds[drawn[:9]], rtol=1e-5)
        np.testing.assert_array_equal(distribution.mode()[:2], [0, 0])
    else:
        np.testing.assert_allclose(drawn.mean(axis=0), distribution.parameters[0][0], atol=0.03)
        np.testing.assert_allclose(drawn.std(axis=0), 1.0, atol=0.03)
        assert drawn.shape == (20000, 2)


def test_observations_of_bytes_are_scaled_once():
    """The memory of a game, for example, is no picture: its statistics are those of the raw observations."""
    policy = build_policy((8,), environments.Discrete(2), hidden=(4,), scale=1.0 / 255.0)
    normalization = policy.get_layer("observation_normalization")
    normalization.mean.assign(np.full(8, 100.0))
    normalization.variance.assign(np.full(8, 400.0))
    read = keras.Model(policy.input, policy.get_layer("policy_hidden_0").input)
    np.testing.assert_allclose(read(np.full([1, 8], 120.0)), np.ones([1, 8]), rtol=1e-6)
    plain = build_policy((8,), environments.Discrete(2), normalize=False, scale=0.5)
    assert plain.layers[1].name == "rescaling"
