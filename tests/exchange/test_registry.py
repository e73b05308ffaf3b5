"""An algorithm that only this test knows: registered by name, it works like the others."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence

from tests import nursery
from tfpar.collectives import cost_model
from tfpar.collectives import group as groups
from tfpar.collectives.cost_model import Link, Speed
from tfpar.collectives.group import Group, allocate_instance_keys
from tfpar.collectives.tensorflow import new_group, world_group
from tfpar.config import ConfigError
from tfpar.exchange import Exchange, buckets, registry
from tfpar.exchange import spec as specs
from tfpar.exchange.buckets import PendingAssigns, WireBytes
from tfpar.exchange.options import Options, whole
from tfpar.exchange.tuning import auto
from tfpar.exchange.tuning.measure import Measured

import numpy as np
import pytest
import tensorflow as tf

WORKERS = 2
SHAPES = [(40, 30), (7,), (64, 32)]  # the second is too small to be encoded
ENCODED = 40 * 30 + 64 * 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class StridedOptions(Options):
    """Options of `strided`."""

    stride: int = whole(4, "Every which element is sent in a step.", minimum=1)


class Strided:
    """Sends every n-th element, another set in each step, and keeps the others in the residual."""

    factor_rank = 0

    def __init__(
        self, options: StridedOptions, shapes: Sequence[tf.TensorShape], group: Group, seed: int, name: str
    ) -> None:
        self.shapes = list(shapes)
        self.elements = self.shard_elements = sum(shape.num_elements() for shape in shapes)
        self.stride, self.group = options.stride, group
        self.instance = allocate_instance_keys(1)[0]
        self.state = buckets.residual_variables({"worker": self.elements}, name, error_feedback=True)

    def reduce(self, tensors, step, pending: PendingAssigns | None = None):
        flat = buckets.concatenated(tensors) + self.state["worker"].read_value()
        is_sent = tf.range(self.elements, dtype=tf.int64) % self.stride == step % self.stride
        sent = tf.where(is_sent, flat, 0.0)
        buckets.assign_or_defer(self.state["worker"], flat - sent, pending)
        sums = self.group.all_reduce(sent, self.instance)
        return buckets.split(sums, self.shapes), tf.stack([tf.nn.l2_loss(flat), tf.nn.l2_loss(flat - sent)])

    def wire_bytes(self) -> WireBytes:
        payload = 4 * self.elements // self.stride
        return WireBytes(payload, payload)


def strided_cost(options: StridedOptions, elements: int, workers: int, link: Link, speed: Speed):
    return cost_model.messages(4 * elements // options.stride, 1, link, 0.0)


def candidates(common: Mapping[str, object], group: Group) -> list[StridedOptions]:
    return [StridedOptions(**common)]


@pytest.fixture(autouse=True)
def strided() -> Iterator[None]:
    registry.register(
        "strided",
        StridedOptions,
        Strided,
        cost=strided_cost,
        candidates=candidates,
        summary="every n-th element",
        example="stride=8",
    )
    yield
    registry.unregister("strided")


def traced(exchange: Exchange, strategy: tf.distribute.Strategy):
    signature = [[tf.TensorSpec(shape) for shape in SHAPES]]

    @tf.function(input_signature=signature, autograph=False)
    def mean(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        return strategy.run(lambda: exchange.reduce([tf.identity(gradient) for gradient in gradients]))

    return mean


def gradients(rank: int, step: int) -> list[np.ndarray]:
    generator = np.random.default_rng([rank, step])
    return [generator.standard_normal(shape).astype(np.float32) for shape in SHAPES]


@pytest.mark.parametrize("overlap", [False, True])
def test_it_exchanges_and_loses_nothing(monkeypatch, overlap):
    """Logical devices stand for workers, each in a thread, as workers are processes."""
    steps, stride = 5, 4
    members = (2000, 2001) if overlap else (3000, 3001)  # the runtime remembers groups while the process lives
    exchanges, functions = [], []
    for rank in range(WORKERS):
        monkeypatch.setattr(groups, "_instance_keys", groups.InstanceKeys())  # as if alone in its process
        strategy = tf.distribute.OneDeviceStrategy(f"CPU:{rank}")
        exchange = Exchange(f"strided:stride={stride},bucket_bytes=4800")
        exchange.build(
            [tf.TensorSpec(shape) for shape in SHAPES],
            strategy=strategy,
            group=new_group(members, members[rank]),
            overlap=overlap,
        )
        exchanges.append(exchange)
        functions.append(traced(exchange, strategy))
    assert all(exchange.overlaps_backward == overlap for exchange in exchanges)
    assert all(exchange.first_ready_indices == [2] * overlap for exchange in exchanges)
    applied = [np.zeros(shape) for shape in SHAPES]
    for step in range(steps):
        with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
            results = list(
                pool.map(
                    lambda function, rank, step=step: function([tf.constant(one) for one in gradients(rank, step)]),
                    functions,
                    range(WORKERS),
                )
            )
        for mine, other in zip(*results, strict=True):
            np.testing.assert_array_equal(mine, other)
        assert np.count_nonzero(results[0][0]) == 40 * 30 // stride
        applied = [total + WORKERS * mean.numpy() for total, mean in zip(applied, results[0], strict=True)]
    expected = [sum(gradients(r, s)[i] for r in range(WORKERS) for s in range(steps)) for i in range(len(SHAPES))]
    np.testing.assert_allclose(applied[1], expected[1], rtol=1e-5, atol=1e-5)
    pending = sum(np.concatenate([one.export()[f"{n}/worker"] for n in range(2)]) for one in exchanges)
    large = np.concatenate([applied[0].ravel(), applied[2].ravel()])
    np.testing.assert_allclose(
        large + pending, np.concatenate([expected[0].ravel(), expected[2].ravel()]), rtol=1e-4, atol=1e-4
    )
    traffic = exchanges[0].traffic(WORKERS, 3)
    assert (traffic.codec, traffic.pattern) == ("strided", "all_reduce")
    assert traffic.payload_bytes == 4 * (7 + 3) + 4 * ENCODED // stride


def test_errors_and_reports_know_it():
    with pytest.raises(ConfigError, match=r"--exchange='stridde' is not known\. Did you mean 'strided'"):
        specs.parse("stridde")
    with pytest.raises(ConfigError, match=r"strided:strid=2: option='strid' is not known\. Did you mean 'stride'"):
        specs.parse("strided:strid=2")
    with pytest.raises(ConfigError, match=r"strided:stride=0: stride=0 is not a whole number of at least 1\."):
        specs.parse("strided:stride=0")
    with pytest.raises(ConfigError, match=r"Write e\.g\. --exchange=strided:stride=8\."):
        specs.parse("strided:x")
    assert specs.parse("strided:warmup_steps=3").describe() == (
        "strided:warmup_steps=3 (all_reduce, error feedback, dense for the first 3 steps)"
    )
    assert "strided: every n-th element\n  stride: Every which" in registry.help_text()


def test_auto_considers_it(monkeypatch):
    link, speed = Link(0.0, 12.5e6), Speed(5e9, 5e9)
    monkeypatch.setattr(
        auto.measure,
        "measure",
        lambda group, codecs, device: Measured(link, [speed] * len(codecs), [1.0] * len(codecs)),
    )
    spec, group = specs.parse("auto"), world_group(4, 0)
    result = auto.choose(spec, [1 << 20], group, auto.measure_codecs(spec, group, "CPU:0"))
    assert [spec.name for spec in result.specs] == ["strided"]
    assert specs.parse("strided").cost(1 << 20, 4, link).sent == 1 << 20


@pytest.mark.parametrize("name", ["int4", "", "a:b"])
def test_a_name_that_is_taken_or_ambiguous_is_refused(name):
    with pytest.raises(ValueError, match="taken, empty, or contains a colon"):
        registry.register(name, StridedOptions, Strided, cost=strided_cost)


def test_the_command_lists_every_algorithm():
    listed = nursery.run(
        [sys.executable, "-m", "tfpar.exchange"], capture_output=True, text=True, check=True, timeout=300
    ).stdout
    for name in registry.names():
        assert (f"{name}: " in listed or f"{name}[:" in listed) == (name != "strided")
    assert "start_after" in listed
