"""How many steps of environments a second: learning on the device against learning from Gymnasium, and acting alone.

Every case runs in a process of its own. Cases take turns, and the fastest turn of each counts; what is compiled before
the first step counts for none.

  python experiments/benchmarks/reinforcement.py

`device` and `gymnasium` are whole runs of PPO with the same options, `device_wide` with as many environments as suit
the device; `gymnasium_serial` is PPO that acts and learns by turns, in plain TensorFlow as one would write it by hand.
`device_acting` and `gymnasium_acting` step environments alone, the first with a policy of 64 units and sampling, the
second with fixed actions; `envpool_acting` is EnvPool (pip install envpool) likewise.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the modules of tfpar, when started as a script

import tfpar
from tfpar.config import flags
from tfpar.doctor import describe_machine

from absl import flags as absl_flags

flags.define(sections=[])
ENV = absl_flags.DEFINE_string("env", "CartPole-v1", "An environment that the device and Gymnasium have.")
ENVIRONMENTS = absl_flags.DEFINE_integer("environments", 64, "Environments side by side.", lower_bound=1)
WIDE = absl_flags.DEFINE_integer("wide", 8192, "Environments of the cases that suit the device.", lower_bound=1)
MICRO_BATCHES = absl_flags.DEFINE_integer(
    "micro_batches",
    16,
    "Micro-batches of a step with that many environments, so that its activations fit a cache.",
    lower_bound=1,
)
CASES = absl_flags.DEFINE_list(
    "cases",
    [
        *("device", "device_wide", "gymnasium", "gymnasium_serial"),
        *("device_acting", "gymnasium_acting", "envpool_acting"),
    ],
    "What to run; the first is what others are compared with.",
)
SECONDS = absl_flags.DEFINE_float("seconds", 4.0, "Length of a measurement, about.", lower_bound=0.1)
TURNS = absl_flags.DEFINE_integer("turns", 2, "Turns of each case.", lower_bound=1)
CHILD = absl_flags.DEFINE_string("child", "", "Internal: the case that this process measures.")

_ROLLOUT, _MINIBATCHES, _EPOCHS = 32, 4, 4


def learn(env: str, environments: int, *, micro_batches: int = 1) -> float:
    """Steps of all environments a second of PPO through `ReinforcementTrainer`."""
    from tfpar import rl

    marks: list[tuple[float, int]] = []

    def mark(state: tfpar.LoopState) -> tfpar.LoopState | None:
        marks.append((time.perf_counter(), state.step))
        over = len(marks) > 4 and marks[-1][0] - marks[2][0] > SECONDS.value
        return state.replace(stop=True, stopped_by="the benchmark") if over else None

    per_round = _MINIBATCHES * _EPOCHS
    trainer = rl.ReinforcementTrainer(
        env,
        environments=environments,
        rollout_steps=_ROLLOUT,
        minibatches=_MINIBATCHES,
        rollout_epochs=_EPOCHS,
        accumulate_steps=micro_batches,
        steps=100_000 * per_round,
        eval_every=100_000 * per_round,
        eval_episodes=1,
        stop_at_goal=False,
        optimizer="adamw",  # without clipping, like the hand-written loop; the presets clip
        clip_norm=0.0,
        verbose=0,
    )
    trainer.fit(hooks=[tfpar.Hook(4 * per_round, mark)])
    (begin, first), (end, last) = marks[2], marks[-1]
    return (last - first) / per_round * environments * _ROLLOUT / (end - begin)


def learn_by_turns(env: str, environments: int) -> float:
    """The same of PPO by hand: act in Gymnasium, then learn, in plain TensorFlow functions."""
    from tfpar.rl import build_policy
    from tfpar.rl import environments as known
    from tfpar.rl.environments.host import make_environments
    from tfpar.rl.policy import Distribution, value_of

    import keras
    import numpy as np
    import tensorflow as tf

    device = known.find(env)
    model = build_policy(device.observation_shape, device.actions)
    optimizer, envs = keras.optimizers.Adam(1e-3), make_environments(env, environments)
    optimizer.build(model.trainable_variables)
    index = tf.range(environments)

    @tf.function(jit_compile=True, autograph=False)
    def act(x: tf.Tensor, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        outputs = model(x)
        action = Distribution.of(outputs).sample(tf.constant([1, 2]), index, number)
        return action, Distribution.of(outputs).log_prob(action), value_of(outputs)

    @tf.function(jit_compile=True, autograph=False)
    def update(x: tf.Tensor, action: tf.Tensor, before: tf.Tensor, advantage: tf.Tensor, target: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            outputs = model(x)
            ratio = tf.exp(Distribution.of(outputs).log_prob(action) - before)
            advantage = (advantage - tf.reduce_mean(advantage)) / (tf.math.reduce_std(advantage) + 1e-8)
            gain = tf.minimum(ratio * advantage, tf.clip_by_value(ratio, 0.8, 1.2) * advantage)
            loss = tf.reduce_mean(0.25 * (value_of(outputs) - target) ** 2 - gain)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    random = np.random.default_rng(0)
    observation, _ = envs.reset(seed=0)

    def round_of(number: int) -> None:
        nonlocal observation
        rows: list[tuple[Any, ...]] = []
        for place in range(_ROLLOUT):
            action, before, value = (
                each.numpy() for each in act(observation.astype(np.float32), tf.constant(number * _ROLLOUT + place))
            )
            following, reward, terminated, truncated, _ = envs.step(action)
            rows.append((observation, action, before, value, reward, terminated | truncated))
            observation = following
        x, action, before, value, reward, done = (
            np.stack(column).astype(np.float32) for column in zip(*rows, strict=True)
        )
        after = act(observation.astype(np.float32), tf.constant(0))[2].numpy()
        advantage, later = np.zeros_like(value), np.zeros(environments, np.float32)
        for place in reversed(range(_ROLLOUT)):
            following_value = after if place == _ROLLOUT - 1 else value[place + 1]
            error = reward[place] + 0.99 * following_value * (1 - done[place]) - value[place]
            later = advantage[place] = error + 0.99 * 0.95 * (1 - done[place]) * later
        flat = [part.reshape([-1, *part.shape[2:]]) for part in (x, action, before, advantage, advantage + value)]
        flat[1] = flat[1].astype(device.actions.spec.dtype.as_numpy_dtype)
        for _ in range(_EPOCHS):
            for chosen in np.split(random.permutation(len(flat[0])), _MINIBATCHES):
                update(*(tf.constant(part[chosen]) for part in flat))

    return _rate(round_of, environments * _ROLLOUT)


def act_on_device(env: str, environments: int) -> float:
    """The same of acting alone, with a policy of one hidden layer of 64 units and sampling."""
    from tfpar.rl import build_policy, vector
    from tfpar.rl import environments as known
    from tfpar.rl.rollout import act_for, draw

    import tensorflow as tf

    environment = known.find(env)
    assert isinstance(environment, known.Environment)
    model = build_policy(environment.observation_shape, environment.actions, hidden=(64,), normalize=False)
    seed, index = tf.constant([1, 2]), tf.range(environments)

    @tf.function(jit_compile=True, autograph=False)
    def run(start: vector.Vector, number: tf.Tensor) -> tuple[vector.Vector, tf.Tensor]:
        end, record = act_for(
            environment,
            lambda x, at: draw(model(x), seed, index, at),
            start,
            steps=_ROLLOUT,
            seed=seed,
            index=index,
            time=number * _ROLLOUT,
            reward_scale=1.0,
        )
        return end, tf.reduce_sum(record.reward)

    current = vector.reset(environment, seed, index)

    def round_of(number: int) -> None:
        nonlocal current
        current, total = run(current, tf.constant(number))
        total.numpy()

    return _rate(round_of, environments * _ROLLOUT)


def act_in_gymnasium(env: str, environments: int) -> float:
    """The same of Gymnasium's synchronous vector environments with fixed actions."""
    from tfpar.rl.environments.host import make_environments

    envs = make_environments(env, environments)
    envs.reset(seed=0)
    actions = envs.action_space.sample()
    return _rate(lambda _: [envs.step(actions) for _ in range(_ROLLOUT)], environments * _ROLLOUT)


def act_in_envpool(env: str, environments: int) -> float:
    """The same of EnvPool, with a thread for each core."""
    import envpool
    import numpy as np

    envs = envpool.make(env, env_type="gymnasium", num_envs=environments)
    envs.reset()
    actions = np.zeros(environments, np.int32)
    return _rate(lambda _: [envs.step(actions) for _ in range(_ROLLOUT)], environments * _ROLLOUT)


def _rate(round_of: Callable[[int], Any], steps: int) -> float:
    """Steps a second of a function that makes `steps` of them; its first two calls do not count."""
    number = 0
    for number in range(2):
        round_of(number)
    begin, rounds = time.perf_counter(), 0
    while time.perf_counter() - begin < SECONDS.value:
        number, rounds = number + 1, rounds + 1
        round_of(number)
    return rounds * steps / (time.perf_counter() - begin)


_CASES: dict[str, Callable[[], float]] = {
    "device": lambda: learn(ENV.value, ENVIRONMENTS.value),
    "device_wide": lambda: learn(ENV.value, WIDE.value, micro_batches=MICRO_BATCHES.value),
    "gymnasium": lambda: learn(f"gym:{ENV.value}", ENVIRONMENTS.value),
    "gymnasium_serial": lambda: learn_by_turns(ENV.value, ENVIRONMENTS.value),
    "device_acting": lambda: act_on_device(ENV.value, WIDE.value),
    "gymnasium_acting": lambda: act_in_gymnasium(ENV.value, ENVIRONMENTS.value),
    "envpool_acting": lambda: act_in_envpool(ENV.value, 4 * ENVIRONMENTS.value),
}


def main(_: list[str]) -> None:
    unknown = [case for case in [*CASES.value, *filter(None, [CHILD.value])] if case not in _CASES]
    if unknown:
        raise tfpar.ConfigError(f"--cases={','.join(unknown)}: choose from {', '.join(_CASES)}.")
    if CHILD.value:
        print(json.dumps({"rate": _CASES[CHILD.value]()}))
        return
    rates: dict[str, float] = {}
    for turn in range(TURNS.value):
        for case in CASES.value:
            print(f"turn {turn + 1} of {TURNS.value}: {case}", file=sys.stderr)
            rate = _measured(case)
            if rate is not None:
                rates[case] = max(rate, rates.get(case, 0.0))
    print(f"{ENV.value}, {describe_machine()}\n")
    print("| case | steps a second | of the first |\n|---|---:|---:|")
    base = next(iter(rates.values()))
    for case, rate in rates.items():
        print(f"| {case} | {rate:,.0f} | {rate / base:.3g} |")


_OPTIONS = ("env", "environments", "wide", "micro_batches", "seconds")


def _measured(case: str) -> float | None:
    """Steps a second, from a process of its own; None where its package is missing."""
    options = [f"--{name}={absl_flags.FLAGS[name].value}" for name in _OPTIONS]
    ended = subprocess.run(
        [sys.executable, __file__, f"--child={case}", *options], capture_output=True, text=True, check=False
    )
    if ended.returncode:
        print(f"{case} could not run: {ended.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return float(json.loads(ended.stdout.splitlines()[-1])["rate"])


if __name__ == "__main__":
    flags.run(main)
