"""Evaluates a policy with its most likely actions: on the device, or on the host if the environment runs there."""

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

_SEED = (20, 26)  # fixed, so that every evaluation of every run starts from the same states


class PolicyEvaluator:
    """Evaluates a policy by playing episodes on the device.

    Every process plays the same episodes with the same weights, so all processes have the same results.

    Args:
      program: The policy under the strategy.
      environment: The environment in which it acts.
      episodes: Number of episodes, which are played at the same time.

    Attributes:
      confusion: None, see `tfpar.training.evaluation.Evaluator`.
    """

    confusion: np.ndarray | None = None

    def __init__(self, program: Program, environment: Environment, *, episodes: int) -> None:
        self._program, self._environment, self._episodes = program, environment, episodes
        self._play = tf.function(self._played, autograph=False, jit_compile=program.compiles_whole or None)
        self._play._omit_frequent_tracing_warning = True  # see `TrainStep`

    def __call__(self, source: inputs.AnySource, *, steps: int = 0, calls: BatchCalls | None = None) -> dict[str, Any]:
        """Plays the episodes.

        Args:
          source: Ignored.
          steps: Ignored.
          calls: Ignored, as there are no batches.

        Returns:
          `return` and `length`, the means over the episodes.
        """
        del source, steps, calls
        program = self._program
        params = program.first_copies(program.eval_weights())
        state = program.first_copies(program.model.non_trainable_variables)
        with activity(f"playing {self._episodes} episodes", shown=program.reports):
            returns, lengths = self._play(params, state)
        return {"return": float(np.mean(returns)), "length": float(np.mean(lengths))}

    def _played(self, params: Tensors, state: Tensors) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the return and the length of every episode, float32 `[episodes]`."""
        return play(self._environment, self._program.model, params, state, self._episodes)


class HostEvaluator:
    """Evaluates a policy by playing episodes on the host; each worker plays its share of them.

    Args:
      program: The policy under the strategy.
      environment: The environment in which it acts.
      episodes: Number of episodes of all workers together.

    Attributes:
      confusion: None, see `tfpar.training.evaluation.Evaluator`.
    """

    confusion: np.ndarray | None = None

    def __init__(self, program: Program, environment: HostEnvironment, *, episodes: int) -> None:
        self._program, self._environment, self._episodes = program, environment, episodes
        self._outputs = tf.function(self._called, autograph=False, jit_compile=program.compiles_whole or None)

    def __call__(self, source: inputs.AnySource, *, steps: int = 0, calls: BatchCalls | None = None) -> dict[str, Any]:
        """Plays the episodes; arguments and result are those of `PolicyEvaluator`, the same on every worker."""
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
      environment: The environment in which the policy acts.
      model: A policy, see `policy.build_policy`.
      params: Values of its trainable variables.
      state: Values of its non-trainable variables.
      episodes: Number of episodes.

    Returns:
      The return and the length of each episode, float32 `[episodes]`.
    """
    seed, index = tf.constant(_SEED), tf.range(episodes)

    def body(time: tf.Tensor, current: vector.Vector, returns: Any, lengths: Any) -> tuple[Any, ...]:
        observation = environment.observe(current.state)
        outputs = call_model(model, params, state, observation, training=False).outputs
        outcome = vector.step(environment, current, Distribution.of(outputs).mode(), seed, index, time)
        first = tf.equal(lengths, 0.0)  # only the first episode of each environment counts
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
