"""Which passes TensorFlow runs over the graphs of functions."""

from __future__ import annotations

import tensorflow as tf

# Private: `tf.config.optimizer.set_experimental_options` has no name for this pass.
from tensorflow.python.eager import context


def leave_sums_whole() -> None:
    """Turns off the memory pass for functions that are first called after this, in all threads.

    If a function is estimated to need more than 205 MB on a CPU, the pass replaces sums of more than two tensors by
    temporary variables. TensorFlow 2.21 creates such a variable once more after the last round of a loop, so that a
    loop within a loop, as with accumulated micro-batches, ends in `AlreadyExistsError: ... tmp_var` (TensorFlow's
    issue 23780).
    """
    settings = context.context()
    config = tf.compat.v1.ConfigProto()
    if settings._config is not None:
        config.CopyFrom(settings._config)
    rewriting = config.graph_options.rewrite_options
    if rewriting.memory_optimization != rewriting.NO_MEM_OPT:
        rewriting.memory_optimization = rewriting.NO_MEM_OPT
        settings._config = config
        settings.function_call_options = None  # this thread's, which has the old configuration
