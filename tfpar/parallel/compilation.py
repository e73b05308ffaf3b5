"""Decides which parts of a training step are XLA programs, from the devices on which the step runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tfpar.parallel.planner.memory import UPDATE_GROUP_BYTES

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class CompilationPlan:
    """The division of a training step into XLA programs. If all are false, TensorFlow runs the step op by op.

    Attributes:
      single_xla_program: The whole step is one XLA program. Such a program can neither read the clock nor call
        collectives of TensorFlow's runtime, so it is for a single replica, and for TPUs.
      strategy_compiles: The strategy compiles the functions that it runs (TPUStrategy); nothing is compiled here.
      compiles_gradients: An XLA program computes loss, gradients and their sum over micro-batches.
      compiles_update: An XLA program computes new weights, optimizer state and model state, and changes the variables
        in place; with offloaded state, a program for each block, which returns them.
      prefetches_in_loop: The loop fetches the batch of the next step while a step runs, not between steps.
    """

    single_xla_program: bool
    strategy_compiles: bool
    compiles_gradients: bool
    compiles_update: bool
    prefetches_in_loop: bool

    @property
    def update_group_bytes(self) -> int:
        """Size of a group of weights that are updated at once, see `pure_apply`; 0 in an XLA program."""
        return 0 if self.single_xla_program or self.compiles_update else UPDATE_GROUP_BYTES


def compilation_plan(
    *,
    replicas: int,
    local_devices: Sequence[str],
    on_tpu: bool,
    jit_compile: bool,
    compiles_update: bool = False,
    waits_for_host: bool = False,
) -> CompilationPlan:
    """Returns the plan for a strategy.

    Args:
      replicas: Number of replicas of all workers.
      local_devices: Names of the devices on which this process runs replicas, one per replica.
      on_tpu: Whether the strategy is a TPUStrategy.
      jit_compile: Whether forward, backward and update are to be compiled with XLA.
      compiles_update: Whether the update is to be compiled even if forward and backward are not.
      waits_for_host: Whether a step waits for data from the host, which no XLA program can do.
    """
    single_program = on_tpu or (jit_compile and replicas == 1 and not waits_for_host)
    # XLA programs cannot contain an exchange, so a step with one is two programs around the exchange.
    two_programs = jit_compile and not single_program
    # Iterations of a loop do not overlap in TensorFlow 2.21: none starts before the stateful operations of the previous
    # one are done, hence the prefetching. The values that a loop carries are on one device, so batches for several GPUs
    # would be copied to the first of them: hence no prefetching there.
    prefetches = not on_tpu and (len(local_devices) == 1 or all("CPU" in device for device in local_devices))
    return CompilationPlan(
        single_xla_program=single_program,
        strategy_compiles=on_tpu,
        compiles_gradients=two_programs,
        compiles_update=two_programs or (compiles_update and not single_program),
        prefetches_in_loop=prefetches,
    )


def compiled(function: Callable[..., Any], compiles: bool, *, apart: bool = False) -> Callable[..., Any]:
    """Returns the function as an XLA program if `compiles`, else unchanged.

    Args:
      function: The function.
      compiles: Whether XLA compiles it.
      apart: Whether TensorFlow optimizes it without what is around it, if XLA does not compile it. Of replicas that
        compute the same in one graph, TensorFlow 2.21 (Grappler) merges what they have in common, and then reorders the
        products and sums of each in another way: results differ in the last bit.
    """
    if compiles:
        return tf.function(function, jit_compile=True, autograph=False)
    return tf.function(function, autograph=False, experimental_attributes={"_noinline": True}) if apart else function
