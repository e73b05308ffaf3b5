"""Playing episodes with the most likely actions: on the device, or in Gymnasium where the environment runs there."""

from __future__ import annotations

from typing import Any

from tfpar import inputs
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.tensorflow import world_group
from tfpar.process.activity import activity
from tfpar.rl import vector
from tfpar.rl.environments import Environment, HostEnvironment
from tfpar.rl.playing.episodes import play_outputs
from tfpar.rl.policy import Distribution
from tfpar.training.evaluation import BatchCalls
from tfpar.training.model.call import call_model
from tfpar.training.objective import Tensors
from tfpar.training.program import Program

import keras
import numpy as np
import tensorflow as tf

_SEED = (20, 26)  # the same episodes begin every evaluation of every run


class PolicyEvaluator:
    """Plays a number of episodes; the evaluation of a run of reinforcement learning.

    Every process plays the same episodes with the same weights, so they all have the same results.

    Args:
      program: The policy under the strategy.
      environment: What it acts in.
      episodes: How many are played side by side.

    Attributes:
      confusion: None, see `tfpar.training.evaluation.Evaluator`.
    """

    confusion: np.ndarray | None = None

    def __init__(self, program: Program, environment: Environment, *, episodes: int) -> None:
        self._program, self._environment, self._episodes = program, environment, episodes
        self._play = tf.function(self._played, autograph=False, jit_compile=program.compiles_whole or None)
        self._play._omit_frequent_tracing_warning = True  # see `TrainStep`

    def __call__(self, source: inputs.AnySource, *, steps: int = 0, calls: BatchCalls | None = None) -> dict[str, Any]:
        """Means over the episodes.

        Args:
          source: Not read.
          steps: Not read.
          calls: None is called: there are no batches.

        Returns:
          `return` and `length`.
        """
        del source, steps, calls
        program = self._program
        params = program.first_copies(program.eval_weights())
        state = program.first_copies(program.model.non_trainable_variables)
        with activity(f"playing {self._episodes} episodes", shown=program.reports):
            returns, lengths = self._play(params, state)
        return {"return": float(np.mean(returns)), "length": float(np.mean(lengths))}

    def _played(self, params: Tensors, state: Tensors) -> tuple[tf.Tensor, tf.Tensor]:
        """Return and length of every episode, float32 `[episodes]`."""
        return play(self._environment, self._program.model, params, state, self._episodes)


class HostEvaluator:
    """Plays a number of episodes on the host, each worker its share of them; else as `PolicyEvaluator`.

    Args:
      program: The policy under the strategy.
      environment: What it acts in.
      episodes: How many are played.

    Attributes:
      confusion: None.
    """

    confusion: np.ndarray | None = None

    def __init__(self, program: Program, environment: HostEnvironment, *, episodes: int) -> None:
        self._program, self._environment, self._episodes = program, environment, episodes
        self._outputs = tf.function(self._called, autograph=False, jit_compile=program.compiles_whole or None)

    def __call__(self, source: inputs.AnySource, *, steps: int = 0, calls: BatchCalls | None = None) -> dict[str, Any]:
        """Means over the episodes, the same on every worker; arguments and result as for `PolicyEvaluator`."""
        del source, steps, calls
        program, topology = self._program, self._program.topology
        params = program.first_copies(program.eval_weights())
        state = program.first_copies(program.model.non_trainable_variables)
        seeds = range(_SEED[0] + topology.worker, _SEED[0] + self._episodes, topology.workers)
        with activity(f"playing {self._episodes} episodes", shown=program.reports):
            played = play_outputs(
                lambda x: self._outputs(params, state, x),
                self._environment.observation_shape,
                self._environment,
                seeds,
            )
        agreement = WorkerAgreement(world_group(topology.workers, topology.worker))
        totals = agreement.sums([played.returns.sum(), played.lengths.sum(), float(len(played.returns))])
        return {"return": totals[0] / totals[2], "length": totals[1] / totals[2]}

    def _called(self, params: Tensors, state: Tensors, observation: tf.Tensor) -> Any:
        return call_model(self._program.model, params, state, observation, training=False).outputs


def play(
    environment: Environment, model: keras.Model, params: Tensors, state: Tensors, episodes: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Plays episodes to their end with the most likely actions.

    Args:
      environment: What is acted in.
      model: A policy, see `policy.build_policy`.
      params: Values of its trainable variables.
      state: Values of its non-trainable variables.
      episodes: How many.

    Returns:
      The return and the length of each, float32 `[episodes]`.
    """
    seed, index = tf.constant(_SEED), tf.range(episodes)

    def body(time: tf.Tensor, current: vector.Vector, returns: Any, lengths: Any) -> tuple[Any, ...]:
        observation = environment.observe(current.state)
        outputs = call_model(model, params, state, observation, training=False).outputs
        outcome = vector.step(environment, current, Distribution.of(outputs).mode(), seed, index, time)
        first = tf.equal(lengths, 0.0)  # of the episodes in one environment, the first counts
        returns = tf.where(first, outcome.episode_return, returns)
        return time + 1, outcome.vector, returns, tf.where(first, outcome.episode_length, lengths)

    zeros = tf.zeros([episodes])
    _, _, returns, lengths = tf.while_loop(
        lambda time, _, __, lengths: (time < environment.max_steps) & tf.reduce_any(tf.equal(lengths, 0.0)),
        body,
        (tf.constant(0), vector.reset(environment, seed, index), zeros, zeros),
        parallel_iterations=1,
    )
    return returns, lengths
