"""A Keras optimizer that exchanges gradients with the other workers before it applies them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tfpar.collectives.tensorflow import world_group
from tfpar.config import ConfigError
from tfpar.drop_in import workers
from tfpar.drop_in.comparing import compare, describe, digest, path_of, worker_names
from tfpar.drop_in.workers import Workers
from tfpar.exchange import Exchange
from tfpar.optim.exchanged_update import exchange_before_update, exchange_of, sum_rows_before_update
from tfpar.optim.keras_internals import trainable_variables, variable_index
from tfpar.process.exit_codes import install_exit_code_hook

import keras
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

_log = logging.getLogger(__name__)


def DistributedOptimizer(  # noqa: N802  the name that scripts know from elsewhere, and it stands where a class would
    optimizer: keras.optimizers.Optimizer, exchange: str = "none", *, seed: int = 0
) -> keras.optimizers.Optimizer:
    """Makes a Keras optimizer apply the mean of all workers' gradients.

    ```python
    tfpar.init_cluster()  # first thing in the script
    ...
    optimizer = tfpar.DistributedOptimizer(keras.optimizers.Adam(1e-3), exchange="int4")
    model.compile(optimizer, loss, jit_compile=False)
    model.fit(x, y, callbacks=[tfpar.BroadcastInitialWeights(), tfpar.AverageMetrics()])
    ```

    The optimizer stays what it was for Keras: its class, learning rate, schedule, state and configuration. A model
    saved with it loads where tfpar is not installed, with the plain optimizer. The optimizer's other operations follow
    the exchange and use the mean: clipping, weight decay, moving averages. With `gradient_accumulation_steps`,
    gradients add up locally and are exchanged once per step of the optimizer.

    Workers weigh the same, whatever the sizes of their batches. Residuals of the exchange are not saved. For embedding
    tables, whose gradients are `tf.IndexedSlices`, only the rows that a step has touched are sent if that takes fewer
    bytes than the table; accumulated gradients are dense. Rows of the same token are summed before the optimizer sees
    them, even with a single worker: Keras 3.15 squares and clips them one by one, so that its result depends on how the
    batch is divided.

    With float16, put Keras' loss scaling inside: `DistributedOptimizer(keras.optimizers.LossScaleOptimizer(...))`. If a
    step overflows on one worker, all workers skip it, and the residuals do not change.

    Args:
      optimizer: A Keras optimizer, new or with state. It is changed and returned.
      exchange: How gradients travel, see `tfpar.Exchange`.
      seed: Seed of stochastic rounding.

    Returns:
      The optimizer. Without a cluster, or with a single worker, nothing is exchanged.

    Raises:
      ConfigError: Here: not an optimizer, an unknown exchange, `tfpar.init_cluster()` not called, a tf.distribute
        strategy around it, an optimizer that cannot be distributed. At the first step, on every worker: other
        variables, optimizer, exchange or weights on one of the workers; a train step under XLA.
    """
    install_exit_code_hook()
    optimizer = _as_optimizer(optimizer)
    unbuilt = Exchange(exchange)
    if tf.distribute.has_strategy():
        raise workers.under_strategy("tfpar.DistributedOptimizer")
    if distribution_of(optimizer) is not None:
        raise ConfigError("tfpar.DistributedOptimizer: this optimizer is distributed already.")
    _refuse_inner_accumulation(optimizer)
    connected = workers.current()
    if connected is None:
        sum_rows_before_update(optimizer)
        return optimizer
    exchange_before_update(optimizer, Distribution(connected, unbuilt, seed))
    return optimizer


def _as_optimizer(given: Any) -> keras.optimizers.Optimizer:
    """The optimizer, or a new one by its name in Keras."""
    try:
        optimizer = keras.optimizers.get(given)
    except (TypeError, ValueError):  # an unknown name, or nothing that `get` knows
        optimizer = None
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return optimizer
    raise ConfigError(
        f"tfpar.DistributedOptimizer: {given!r} is not a Keras 3 optimizer. Pass e.g. keras.optimizers.Adam(1e-3)."
    )


def _refuse_inner_accumulation(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses accumulation in an optimizer inside of another, which exchanges before it calls the inner one."""
    # A LossScaleOptimizer has one, a MultiOptimizer several; of a function that selects them, it has them once built.
    inner = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())]
    if any(one is not None and one.gradient_accumulation_steps for one in inner):
        raise ConfigError(
            f"tfpar.DistributedOptimizer: {optimizer.__class__.__name__} with gradient_accumulation_steps would "
            "exchange at every step, not once per accumulated step. Use one of the two, or tfpar.Trainer, which "
            "accumulates beside a loss scale."
        )


def distribution_of(optimizer: keras.optimizers.Optimizer) -> Distribution | None:
    """The `Distribution` of an optimizer that `DistributedOptimizer` returned; None for any other."""
    return exchange_of(optimizer)


class Distribution:
    """How one optimizer's gradients become the mean over the workers.

    Args:
      workers: All workers.
      exchange: Not built yet.
      seed: Seed of stochastic rounding.
    """

    def __init__(self, workers: Workers, exchange: Exchange, seed: int) -> None:
        self.workers = workers
        self._exchange = exchange
        self._seed = seed
        self._variables: list[Any] = []
        self._checked = False
        self._sparse: list[int] = []
        self._trained: set[int] = set()
        self._late: list[int] = []
        self._specs: list[tf.TensorSpec] = []
        self._reduce: Any = None

    def start(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Compares the workers. Does nothing when called again.

        Args:
          optimizer: Is built.

        Raises:
          ConfigError: Workers differ; or variables, or optimizers within this one, that an exchange cannot serve.
        """
        if self._variables:
            return
        _refuse_inner_accumulation(optimizer)
        variables = trainable_variables(optimizer)
        if any(getattr(variable, "overwrite_with_gradient", False) for variable in variables):
            raise ConfigError(
                "tfpar.DistributedOptimizer: float8 layers replace variables by their gradients, each worker by its "
                "own. Use another dtype policy."
            )
        described = [
            f"{path_of(variable)} {tuple(variable.shape)} {keras.backend.standardize_dtype(variable.dtype)}"
            for variable in variables
        ]
        facts = {"exchange": self._exchange.spec} | describe(optimizer)
        compare(self.workers.gather("compare models", [facts, described]))
        if self.workers.rank == 0 and any(one.endswith(" float64") for one in described):
            _log.warning(
                "tfpar.DistributedOptimizer: gradients of float64 variables travel as float32, with exchange='none' "
                "too, which rounds them to 7 digits. Train on a single worker if you need more."
            )
        self._variables = variables

    def _build(self, sparse: set[int], present: set[int], accumulates: bool) -> None:
        """Builds the exchange, once.

        Args:
          sparse: Indices of the variables whose gradients came as IndexedSlices in the first step.
          present: Indices of all variables that had a gradient.
          accumulates: Whether Keras adds up gradients of several steps, and then brings all at once.
        """
        if self._reduce is not None:
            return
        rows, there = zip(*self.workers.gather("compare gradients", [sorted(sparse), sorted(present)]), strict=True)
        common = set(rows[0]).intersection(*rows)
        self._trained = set().union(*there)
        self._late = [index for index in range(len(self._variables)) if index not in self._trained]
        self._specs = [tf.TensorSpec(variable.shape, tf.float32) for variable in self._variables]
        if self._late:  # in every step, each worker says of which of them it has a gradient: `_refuse_lone`
            self._specs.append(tf.TensorSpec([len(self._late)], tf.float32))
        strategy = self.workers.strategy
        # A group, so that not the strategy reduces: its all-reduce fails inside a tf.cond (TensorFlow 2.21: "You must
        # feed a value for placeholder"), and Keras has one around the step (`steps_per_execution`) and the update
        # (accumulation).
        group = world_group(self.workers.size, self.workers.rank, strategy.extended.worker_devices[0])
        self._exchange.build(
            self._specs,
            strategy=strategy,
            group=group,
            seed=self._seed,
            sparse=sorted(common),
            overlap=not accumulates,  # Keras' step is not one XLA program: `_refuse`
        )
        self._sparse = self._exchange.sparse
        self._reduce = self._reduction()

    def completed(
        self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: keras.optimizers.Optimizer
    ) -> list[Any]:
        """Gradients that all workers have: zeros where only others may have one, since Keras updates no variable
        without a gradient, and its weights would no longer be the same on all workers. Others may have one of each
        variable of which any worker had one in the first step.

        Args:
          gradients: Tensors, IndexedSlices or None, one per variable.
          variables: All or some of those that the optimizer was built with.
          optimizer: The one that will apply them.

        Raises:
          ConfigError: The optimizer was not built with one of the variables; or see `start`.
        """
        self._refuse()
        indices = _indices(optimizer, variables)
        given = {index: one for index, one in zip(indices, gradients, strict=True) if one is not None}
        accumulates = bool(optimizer.gradient_accumulation_steps)  # then rows become tensors before the exchange
        sparse = {index for index, one in given.items() if isinstance(one, tf.IndexedSlices) and not accumulates}
        with tf.init_scope():
            self.start(optimizer)
            self._check_same_start(optimizer)
            self._build(sparse, {*given}, accumulates)
        self._refuse_left_out(indices)
        return [
            tf.zeros(variable.shape, variable.dtype) if one is None and index in self._trained else one
            for index, one, variable in zip(indices, gradients, variables, strict=True)
        ]

    def mean(
        self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: keras.optimizers.Optimizer
    ) -> list[Any]:
        """The mean of the workers' gradients, the same bits on each.

        Args:
          gradients: From `completed`, or sums of those.
          variables: As of `completed`.
          optimizer: As of `completed`.

        Returns:
          Dense tensors of the gradients' dtypes; None where there was none. Most of Keras' optimizers make rows dense
          anyhow (3.15).

        Raises:
          ConfigError: See `_refuse_lone`.
        """
        indices = _indices(optimizer, variables)
        by_variable: list[Any] = [None] * len(self._variables)
        for index, gradient in zip(indices, gradients, strict=True):
            by_variable[index] = gradient
        sent = [self._as_float32(index, gradient) for index, gradient in enumerate(by_variable)]
        if self._late:
            sent.append(tf.constant([float(by_variable[index] is not None) for index in self._late]))
        means = self._reduce(sent)
        if self._late:
            with tf.control_dependencies(self._refuse_lone(means.pop())):
                means = [tf.identity(mean) for mean in means]
        return [
            None if gradient is None else tf.cast(means[index], gradient.dtype)
            for gradient, index in zip(gradients, indices, strict=True)
        ]

    def _as_float32(self, index: int, gradient: Any) -> Any:
        """Float32, in the form that the exchange was built for: a tensor, or rows and their indices.

        Variables without a gradient take part with zeros: the layout of the exchange is fixed.
        """
        shape = tf.TensorShape(self._variables[index].shape)
        if index not in self._sparse:
            return tf.zeros(shape) if gradient is None else tf.cast(tf.convert_to_tensor(gradient), tf.float32)
        if gradient is None:
            return tf.zeros([0, *shape[1:]]), tf.zeros([0], tf.int64)
        if isinstance(gradient, tf.IndexedSlices):
            return tf.cast(gradient.values, tf.float32), tf.cast(gradient.indices, tf.int64)
        return tf.cast(gradient, tf.float32), tf.range(shape[0], dtype=tf.int64)

    def _refuse(self) -> None:
        if tf.distribute.has_strategy():
            raise workers.under_strategy("tfpar.DistributedOptimizer")
        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise xla_error()

    def _refuse_left_out(self, given: Sequence[int]) -> None:
        """Refuses a step without variables that have residuals: all of these are sent, and would arrive at nothing."""
        left_out = sorted(self._trained.difference(given))
        if left_out and self._exchange.state:
            path, spec = path_of(self._variables[left_out[0]]), str(self._exchange.spec)
            raise ConfigError(
                f"tfpar.DistributedOptimizer: apply was called without the variable {path}, and exchange={spec!r} "
                "keeps a residual of its gradients. Give every variable, zeros for a gradient that does not count, use "
                "an optimizer for each set of variables, or exchange='none'."
            )

    def _refuse_lone(self, shares: tf.Tensor) -> list[tf.Operation]:
        """Refuses a step in which some workers only have a gradient of a late variable: the others would not update it.

        The step itself tells: workers trace it at different times, so that none can ask the others then.

        Args:
          shares: Share of the workers that have a gradient of each variable of which none had one in the first step.

        Raises:
          ConfigError: Outside of a `tf.function`. In one, the returned operation raises an `InvalidArgumentError`.
        """
        lone = (shares > 0.0) & (shares < 1.0 - 0.5 / self.workers.size)
        paths = [path_of(self._variables[index]) for index in self._late]
        text = tf.strings.join(
            [
                "tfpar.DistributedOptimizer: only some workers have a gradient of these variables, and in the first "
                "step none had: ",
                tf.strings.reduce_join(tf.boolean_mask(paths, lone), separator=", "),
                ". Workers would no longer have the same weights. Give every worker a gradient, of zeros where it does "
                "not count, in this step or in the first one: add 0.0 * tf.reduce_sum(variable) to the loss.",
            ]
        )
        if not tf.executing_eagerly():
            return [tf.debugging.Assert(~tf.reduce_any(lone), [text])]
        if tf.reduce_any(lone):
            raise ConfigError(text.numpy().decode())
        return []

    def _check_same_start(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Refuses to train from different weights or optimizer variables. Once: the steps keep them the same."""
        if self._checked:
            return
        digests = self.workers.gather(
            "compare weights before the first step", [digest(self._variables), digest(optimizer.variables)]
        )
        for what, by_worker in zip(("weights", "optimizer variables"), zip(*digests, strict=True), strict=True):
            different = [worker for worker, value in enumerate(by_worker) if value != by_worker[0]]
            if different:
                raise ConfigError(
                    f"tfpar.DistributedOptimizer: {worker_names(different)} would start from other {what} than worker "
                    "0. Put tfpar.BroadcastInitialWeights() first in fit's callbacks on every worker."
                )
        self._checked = True

    def _reduction(self) -> Any:
        """The exchange as a separate function.

        It is traced once: TensorFlow's strategies number collectives as they trace them, and Keras traces a step again
        for another batch size, which may occur on one worker only.
        """
        device = self.workers.strategy.extended.worker_devices[0]
        signature: list[Any] = list(self._specs)
        for index in self._sparse:
            rows = tf.TensorSpec([None, *self._variables[index].shape[1:]], tf.float32)
            signature[index] = rows, tf.TensorSpec([None], tf.int64)

        @tf.function(input_signature=[signature], autograph=False)
        def mean(gradients: list[Any]) -> list[tf.Tensor]:
            with tf.device(device):
                return self._replica_mean(tf.nest.map_structure(tf.identity, gradients))

        mean.get_concrete_function()
        return mean

    def _replica_mean(self, gradients: list[Any]) -> list[tf.Tensor]:
        slices = [tf.IndexedSlices(*value) if isinstance(value, tuple) else value for value in gradients]
        # For the exchange, this process acts as one of the strategy's replicas.
        with tf.distribute.ReplicaContext(self.workers.strategy, replica_id_in_sync_group=self.workers.rank):
            means = self._exchange.reduce(slices)
        return [
            tf.ensure_shape(mean, spec.shape)
            for mean, spec in zip(map(tf.convert_to_tensor, means), self._specs, strict=True)
        ]


def _indices(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> list[int]:
    """The places of variables among those that the optimizer was built with, which the exchange has.

    Raises:
      ConfigError: The optimizer was built without one of them.
    """
    indices = []
    for variable in variables:
        try:
            indices.append(variable_index(optimizer, variable))
        except KeyError:
            name = optimizer.__class__.__name__
            raise ConfigError(
                f"tfpar.DistributedOptimizer: this {name} was built without the variable {path_of(variable)}: layers "
                f"were unfrozen since, or it has trained another model. Wrap a new one, tfpar.DistributedOptimizer("
                f"{name}(...)), and compile the model with it."
            ) from None
    return indices


def xla_error() -> ConfigError:
    """The error for a train step that XLA is to compile."""
    return ConfigError(
        "tfpar.DistributedOptimizer: the train step is to be compiled by XLA, which cannot run collectives. Write "
        "model.compile(..., jit_compile=False); Keras' default, 'auto', turns XLA on where there is a GPU."
    )
