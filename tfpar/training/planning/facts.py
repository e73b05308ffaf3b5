"""The facts about a model that a plan needs, determined in a separate process.

TensorFlow's devices and collectives can only be set up before its first operation, and building a Keras model runs one.
So a fork of this process builds the model, counts and measures it, and returns the result as plain data. If this
process has already run operations, it does so itself, and restores Keras' names and random numbers afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfpar import models, precision
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.optim import keras_calls
from tfpar.optim.keras_deferred import made_deferred
from tfpar.optim.optimizers import ELEMENTWISE, WHOLE_TENSORS, build_for_some
from tfpar.optim.pure_update import updates_each_alone
from tfpar.parallel.planner.costs import LayerCost, ModelCosts, Weight
from tfpar.process.cores import cores_of_host, cores_of_others
from tfpar.process.heap import keep_freed_memory
from tfpar.training.model.adapting import adapt_model
from tfpar.training.model.building import copied
from tfpar.training.model.recompute import BLOCKS, NONE
from tfpar.training.model.support import known_summary
from tfpar.training.model.xla import is_convolutional, xla_obstacle
from tfpar.training.optimizer_spec import OptimizerSpec
from tfpar.training.planning.counting import count_model, way_out_of
from tfpar.training.planning.machines import device_memory, threads
from tfpar.training.planning.measuring import Limits, Measured, assumed, measure

import keras
import tensorflow as tf
from tensorflow.python.eager import context

Build = Callable[[], keras.Model]
_MEMORY = 4 << 30  # of a machine that does not say what it has


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about a model and its optimizer.

    Attributes:
      costs: Costs of the model's layers, with the optimizer's state of their weights.
      elementwise: Whether the optimizer updates every element independently of the others.
      joins_parts: If not, whether the devices of a model axis put whole tensors together for it.
      synchronizes: Whether the model synchronises batch statistics between replicas.
      in_groups: Whether it updates weights in groups without XLA.
      clips_norms: Whether the optimizer clips by norms of gradients.
      own_objective: Whether the objective is the user's own, which calls the model.
      has_layout: Whether the user says how layers are divided.
      compiled: Whether XLA compiles passes.
      compiles_update: Whether XLA compiles the update.
      measured: Measured rates; None if they were not requested.
    """

    costs: ModelCosts
    elementwise: bool
    in_groups: bool
    compiled: bool
    compiles_update: bool
    joins_parts: bool = False
    synchronizes: bool = False
    clips_norms: bool = False
    own_objective: bool = False
    has_layout: bool = False
    measured: Measured | None = None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Facts:
        """The facts, from the JSON of `dataclasses.asdict(facts)`."""
        costs, measured = value["costs"], value["measured"]
        layers = {int(size): tuple(map(_layer, each)) for size, each in costs["layers"].items()}
        undivided = {int(size): reason for size, reason in costs["undivided"].items()}
        return cls(
            **{
                **value,
                "costs": ModelCosts(**{**costs, "layers": layers, "undivided": undivided}),
                "measured": measured and Measured.from_json(measured),
            }
        )


def _layer(value: dict[str, Any]) -> LayerCost:
    weights = tuple(Weight(**each) for each in value["weights"])
    sums = {name: tuple(value[name]) for name in ("sums", "forward_sums")}
    return LayerCost(**{**value, **sums, "weights": weights})


def find_facts(
    build: Build | keras.Model,
    config: ExperimentConfig,
    sizes: Sequence[int],
    *,
    optimizer: OptimizerSpec | None = None,
    layout: Mapping[str, str] | None = None,
    most_examples: int = 0,
    devices: int = 1,
    workers_here: int = 1,
    option: str = "--mesh=auto",
) -> Facts:
    """Counts a model, and measures it.

    Args:
      build: A function that builds the model, or the model.
      config: The experiment: optimizer, precision, XLA, and the length of sequences.
      sizes: Sizes of the model axis to count for, besides 1.
      optimizer: By default the one that the configuration names.
      layout: How layers are divided, see `find_layout`.
      most_examples: Examples of the largest micro-batch to time; 0: time nothing.
      devices: Devices of all workers.
      workers_here: Workers that share this machine. As many as have cores are busy while one is measured: they share
        the bandwidth of its memory.
      option: The option that needs the facts, see `count_model`.

    Raises:
      ConfigError: The model cannot be counted.
    """
    spec = optimizer or OptimizerSpec(None, False)
    busy = max(1, min(workers_here, cores_of_host() // threads())) if most_examples else 1

    def find(*, alone: bool = False) -> Facts:
        precision.set_policy(config.precision)
        memory = (device_memory("CPU", busy) or _MEMORY) // 2
        share = -(-most_examples // devices)
        model = _built(build, config, option)
        return _facts(model, config, sizes, spec, layout, (most_examples, share), memory, option, alone=alone)

    if context.context()._context_handle is None and hasattr(os, "fork"):
        with _beside(busy - 1, find):
            return _in_fork(functools.partial(find, alone=True), option)
    policy, state = keras.config.dtype_policy(), keras_calls.thread_state()
    try:
        own = {name: _in_own_collection(value) for name, value in state.items()}
        with keras_calls.in_thread_state(own), tf.device("CPU:0"):
            return find()
    finally:
        keras.config.set_dtype_policy(policy)


def _in_own_collection(value: object) -> object:
    """Of Keras' thread-local state, the counts of names and the list of variables without values change in place."""
    return copy.copy(value) if isinstance(value, dict | list) else value


def _built(build: Build | keras.Model, config: ExperimentConfig, option: str) -> keras.Model:
    """The model as it will be trained. A given one is left as it is: adapters cannot be taken away again."""
    model = build if isinstance(build, keras.Model) else build()
    if not isinstance(model, keras.Model) or not model.built:
        raise ConfigError(f"{option}: model() returned {model!r}; it must return a built Keras model.")
    if model is build and (config.train.lora or config.train.trainable):
        model = copied(model)
    adapt_model(model, config.train)
    return model


def _facts(
    model: keras.Model,
    config: ExperimentConfig,
    sizes: Sequence[int],
    spec: OptimizerSpec,
    layout: Mapping[str, str] | None,
    examples: tuple[int, int],
    memory: int,
    option: str,
    *,
    alone: bool,
) -> Facts:
    """`find_facts` in this process, which ends afterwards if it is `alone`, with so much memory for passes of
    `examples`: of the largest micro-batch, and of a batch on each of all devices."""
    costs = count_model(
        *(model, sizes, layout),
        length=config.input.sequence_length,
        recomputing=BLOCKS if config.train.recompute == NONE else config.train.recompute,
        state=_state_of(model.trainable_variables, spec, config),
        option=option,
    )
    compiled, compiles_update = _compiled(model, config)
    measured = None
    if examples[0]:
        limits = Limits(
            examples=examples[0],
            share=examples[1],
            length=config.input.sequence_length,
            memory=memory - 2 * costs.parameters,
            stages=bool(sizes),
            reports=alone,
        )
        compiles = {"compiled": compiled, "compiles_update": compiles_update}
        measured = measure(model, costs, spec.create(config), limits, **compiles)
        measured = measured or assumed(config.precision.precision)
    created = spec.create(config)
    return Facts(
        costs=costs,
        elementwise=type(created) in ELEMENTWISE,
        joins_parts=type(created) in WHOLE_TENSORS,
        synchronizes=models.uses_synchronized_statistics(model),
        clips_norms=bool(created.clipnorm or created.global_clipnorm),
        in_groups=updates_each_alone(created),
        compiled=compiled,
        compiles_update=compiles_update,
        measured=measured,
    )


def _state_of(weights: Sequence[keras.Variable], spec: OptimizerSpec, config: ExperimentConfig) -> dict[int, int]:
    """Bytes of the optimizer's state of each weight, by `id` of the weight: Muon's depends on its rank and path."""

    def built(weight: keras.Variable) -> tuple[keras.optimizers.Optimizer, int]:
        optimizer = spec.create(config)
        common = len(optimizer.variables)
        build_for_some(optimizer, [weight], weights)
        return optimizer, common

    def size(optimizer: keras.optimizers.Optimizer, common: int) -> int:
        return sum(tf.as_dtype(each.dtype).size * math.prod(each.shape) for each in optimizer.variables[common:])

    # Without values: the state of all weights together may be larger than the memory.
    every = made_deferred(
        lambda: [built(weight) for weight in weights],
        lambda optimizers: [variable for optimizer, _ in optimizers for variable in optimizer.variables],
    )
    sizes = itertools.starmap(size, every) if every is not None else (size(*built(weight)) for weight in weights)
    return dict(zip(map(id, weights), sizes, strict=True))


def _compiled(model: keras.Model, config: ExperimentConfig) -> tuple[bool, bool]:
    """Whether XLA will compile passes, and the update, where a plan allows it; as `Program` decides."""
    train = config.train
    if train.jit_compile != "auto":
        return (train.jit_compile == "true",) * 2
    on_gpu = bool(tf.config.list_physical_devices("GPU"))
    slower = not on_gpu and is_convolutional(model, lambda: known_summary(model))
    obstacle = xla_obstacle(model, replicas=2, deterministic=train.deterministic)
    return not (slower or obstacle), not slower


@contextlib.contextmanager
def _beside(number: int, find: Callable[[], Facts]) -> Iterator[None]:
    """In this context, so many forks of this process do the same, in silence: their results are not needed. If workers
    have cores of their own, they run on those of others."""

    def same(cores: Sequence[int]) -> None:
        if cores:
            os.sched_setaffinity(0, cores)
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        _attempt(find)

    children: list[int] = []
    try:
        for _, cores in zip(range(number), itertools.chain(cores_of_others(), itertools.repeat(())), strict=False):
            children.append(_fork(functools.partial(same, cores)))
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _fork(work: Callable[[], None]) -> int:
    """Calls a function in a fork of this process that sees no GPU; the CPU is enough for counting. Returns its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        tf.config.set_visible_devices([], "GPU")
        keep_freed_memory()  # page faults are not what is measured
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _in_fork(find: Callable[[], Facts], option: str) -> Facts:
    """Calls a function in a fork of this process."""
    receiving, sending = os.pipe()

    def answer() -> None:
        os.close(receiving)
        with os.fdopen(sending, "w") as stream:
            json.dump(_attempt(find), stream)

    child = _fork(answer)
    os.close(sending)
    with os.fdopen(receiving) as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    if not text:
        raise ConfigError(
            f"{option}: building and counting the model in a separate process failed (status {status}), perhaps for "
            f"lack of memory; see above. What to do: {way_out_of(option)}."
        )
    found = json.loads(text)
    if "refused" in found:
        raise ConfigError(found["refused"])
    if "failed" in found:
        raise RuntimeError(found["failed"])
    return Facts.from_json(found["facts"])


def _attempt(find: Callable[[], Facts]) -> dict[str, Any]:
    try:
        return {"facts": dataclasses.asdict(find())}
    except ConfigError as error:
        return {"refused": str(error)}
    except Exception as error:  # of the function that builds the model
        return {"failed": "".join(traceback.format_exception(error))}
