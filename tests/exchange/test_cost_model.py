"""The cost model against closed forms, and what `auto` would do on links that can be reasoned about."""

from __future__ import annotations

import re
from collections.abc import Callable

from tfpar.collectives import cost_model
from tfpar.collectives.cost_model import NOTHING, Cost, Link, Speed
from tfpar.collectives.tensorflow import world_group
from tfpar.config import ConfigError
from tfpar.exchange import spec as specs
from tfpar.exchange.algorithms import message_plans
from tfpar.exchange.compressed import CompressedReducer
from tfpar.exchange.spec import Spec
from tfpar.exchange.tuning import auto
from tfpar.exchange.tuning.forecast import buckets_of
from tfpar.exchange.tuning.measure import Measured

import pytest
import tensorflow as tf

FAST = Speed(encode=1e15, decode=1e15)
ELEMENTS = 25_557_032  # ResNet-50
CPU, GPU = "/job:worker/replica:0/task:0/device:CPU:0", "/job:worker/replica:0/task:0/device:GPU:0"


@pytest.mark.parametrize("workers", [2, 4, 8, 1024])
def test_dense_ring(workers):
    link = Link(latency=1e-3, bandwidth=125e6)
    cost = specs.parse("none").cost(ELEMENTS, workers, link)
    share = (workers - 1) / workers
    assert cost.sent == pytest.approx(2 * share * 4 * ELEMENTS, rel=1e-6)
    assert cost.transfer == pytest.approx(cost.sent / 125e6)
    assert cost.latency == pytest.approx(2e-3 * (workers - 1))


@pytest.mark.parametrize("pattern", ["two_phase", "ring", "binary_blocks"])
@pytest.mark.parametrize("workers", [2, 4, 8, 64])
def test_bytes_of_a_worker_do_not_grow_with_their_number(pattern, workers):
    cost = specs.parse(f"int4:pattern={pattern}").cost(ELEMENTS, workers, Link(0.0, 1e9), FAST)
    payload = specs.parse("int4").options.codec.payload_bytes(ELEMENTS)
    assert cost.sent == pytest.approx(2 * (workers - 1) / workers * payload, rel=1e-3)


def test_all_gather_grows():
    link = Link(0.0, 1e9)
    sent = [specs.parse("int8:pattern=all_gather").cost(ELEMENTS, n, link, FAST).sent for n in (2, 4, 8)]
    assert sent[1] == pytest.approx(3 * sent[0])
    assert sent[2] == pytest.approx(7 * sent[0])


def test_powersgd_waits_twice_and_sends_little():
    link = Link(1e-3, 125e6)
    cost = specs.parse("powersgd:4").cost(1 << 20, 4, link, FAST)
    assert cost.latency == pytest.approx(2 * 6e-3)
    assert cost.sent == pytest.approx(1.5 * 4 * 2 * 1024 * 4)


def test_one_worker_sends_nothing():
    assert specs.parse("int4").cost(ELEMENTS, 1, Link(1.0, 1.0)).seconds == 0.0


def pattern_of(spec: Spec) -> str:
    return spec.options.pattern


@pytest.fixture
def choose(monkeypatch):
    """`auto.choose` with the measurement given."""

    def call(
        link: Link,
        speed: Speed,
        elements: list[int],
        text: str = "auto",
        workers: int = 4,
        device: str = CPU,
        what: Callable[[Spec], str] = lambda spec: spec.name,
    ) -> list[str]:
        def measure(group, codecs, device):
            errors = {"bf16": 0.002, "fp8": 0.03, "int8": 0.007, "int4": 0.13, "int2": 0.8, "sign": 0.6}
            return Measured(link, [speed] * len(codecs), [errors.get(codec.kind, 1.0) for codec in codecs])

        monkeypatch.setattr(auto.measure, "measure", measure)
        spec, group = specs.parse(text), world_group(workers, 0, device)
        result = auto.choose(spec, elements, group, auto.measure_codecs(spec, group, device))
        assert all(f"bucket {number}" in result.table for number in range(len(elements)))
        return [what(spec) for spec in result.specs]

    return call


def test_slow_links_take_the_smallest_codec_of_the_budget(choose):
    slow, speed = Link(1e-3, 12.5e6), Speed(5e9, 5e9)
    assert choose(slow, speed, [ELEMENTS]) == ["fp8"]  # a byte less a block than int8
    assert choose(slow, speed, [ELEMENTS], "auto:max_error=0.01") == ["int8"]
    assert choose(slow, speed, [ELEMENTS], "auto:max_error=0.2") == ["int4"]
    assert choose(slow, speed, [ELEMENTS], "auto:max_error=0.005") == ["bf16"]
    assert choose(slow, speed, [ELEMENTS], "auto:max_error=1") == ["sign"]
    assert choose(slow, speed, [ELEMENTS], "auto:max_error=0") == ["none"]


def test_links_faster_than_the_codecs_stay_dense(choose):
    assert choose(Link(1e-6, 50e9), Speed(1e9, 1e9), [ELEMENTS]) == ["none"]


def test_each_bucket_for_itself(choose):
    # 100 us a message: the small bucket is all waiting, of which the dense ring has more than one all-gather.
    assert choose(Link(1e-4, 1.25e9), Speed(4e8, 1e12), [ELEMENTS, 256], workers=4)[0] == "none"


@pytest.mark.parametrize("text", ["int8", "int8:pattern=all_gather", "topk:pattern=hierarchical", "topk:momentum=0.9"])
def test_more_payloads_than_a_gpu_adds_up_are_refused_at_the_start(text):
    spec = specs.parse(text)
    spec.check_group(world_group(64, 0, GPU))
    spec.check_group(world_group(1024, 0, CPU))
    pattern = spec.options.pattern
    says = rf"--exchange={re.escape(text)}: {pattern} adds up the payloads of all 65 .* at most 64. Use pattern="
    with pytest.raises(ConfigError, match=says) as refusal:
        spec.check_group(world_group(65, 0, GPU))
    assert ("without momentum" in str(refusal.value)) == ("momentum" in text)


@pytest.mark.parametrize("text", ["none", "auto", "powersgd:4", "int8:pattern=ring", "int8:pattern=binary_blocks"])
def test_what_adds_up_two_at_a_time_works_for_any_number(text):
    specs.parse(text).check_group(world_group(1000, 0, GPU))


def test_auto_leaves_out_what_a_gpu_cannot_add_up(choose):
    slow, speed = Link(0.0, 12.5e6), Speed(5e9, 5e9)
    assert choose(slow, speed, [ELEMENTS], workers=65, device=CPU, what=pattern_of) == ["two_phase"]
    assert choose(slow, speed, [ELEMENTS], workers=65, device=GPU) == ["fp8"]
    assert choose(slow, speed, [ELEMENTS], workers=65, device=GPU, what=pattern_of)[0] in message_plans.PLANS


@pytest.mark.parametrize("pieces", [1, 3, 100])
def test_one_resource_alone_bounds_the_time(pieces):
    computed = Cost(0, 0.0, transfer=0.0, compute=2.0, pieces=pieces)  # an infinite link
    carried = Cost(0, 0.0, transfer=3.0, compute=0.0, pieces=pieces)  # nothing is encoded
    assert computed.seconds == pytest.approx(2.0)
    assert carried.seconds == pytest.approx(3.0)


def test_pieces_overlap_the_link_and_the_processors():
    seconds = [Cost(0, 0.5, transfer=3.0, compute=2.0, pieces=pieces).seconds for pieces in (1, 2, 4, 10**9)]
    assert seconds[0] == pytest.approx(0.5 + 5.0)  # one after the other
    assert seconds[1] == pytest.approx(0.5 + 3.0 + 1.0)  # half of the work before anything is sent
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == pytest.approx(0.5 + 3.0)  # the slower one


def test_bytes_that_the_processors_carry_cost_processor_time():
    # Over a link that only the processors limit, nothing overlaps, however many pieces there are.
    busy = [Cost(0, 0.0, transfer=3.0, compute=2.0, handling=3.0, pieces=pieces).seconds for pieces in (1, 10**9)]
    assert busy == pytest.approx([5.0, 5.0])
    # Over a slow link, carrying is hidden as long as there is time for it.
    slow = [Cost(0, 0.0, 10.0, 2.0, handling, pieces=10**9).seconds for handling in (0.0, 3.0, 8.0, 9.0)]
    assert slow == pytest.approx([10.0, 10.0, 10.0, 11.0])


def test_time_grows_with_all_that_costs():
    base = {"latency": 1.0, "transfer": 2.0, "compute": 3.0, "handling": 1.0}
    for name in base:
        seconds = [Cost(0, **{**base, name: value}, pieces=2).seconds for value in (1.0, 2.0, 4.0, 8.0)]
        assert seconds == sorted(seconds), name


@pytest.mark.parametrize("text", ["none", "int4", "int8:pattern=all_gather", "powersgd:2", "int4:pattern=ring"])
def test_predictions_fall_with_faster_links_and_codecs(text):
    spec = specs.parse(text)
    rates = [spec.cost(ELEMENTS, 4, Link(1e-4, rate, 1e-10, 512 << 10), FAST).seconds for rate in (1e7, 1e8, 1e9, 1e15)]
    speeds = [spec.cost(ELEMENTS, 4, Link(0.0, 1e15), Speed(rate, rate)).seconds for rate in (1e8, 1e9, 1e10)]
    latencies = [spec.cost(ELEMENTS, 4, Link(latency, 1e9), FAST).seconds for latency in (0.0, 1e-3, 1e-2)]
    assert rates == sorted(rates, reverse=True)
    assert speeds == sorted(speeds, reverse=True)
    assert latencies == sorted(latencies)


@pytest.mark.parametrize(
    ("text", "encoded", "read", "written"),
    [("int4", 1.25, 2, 1), ("int4:pattern=all_gather", 1, 4, 1), ("int4:pattern=ring", 1, 2, 2)],
)
def test_what_is_encoded_read_and_written(text, encoded, read, written):
    speed = Speed(encode=1e9, decode=2e9, write=3e9)
    gradient = 4 * ELEMENTS
    expected = encoded * gradient / 1e9 + read * gradient / 2e9 + written * gradient / 3e9
    assert specs.parse(text).cost(ELEMENTS, 4, Link(0.0, 1e15), speed).compute == pytest.approx(expected)


def test_a_transport_that_works_in_chunks_waits_less_and_overlaps():
    speed, tensorflow, gloo = Speed(1e9, 1e9), Link(1e-3, 1e9), Link(1e-3, 1e9, chunk_bytes=512 << 10)
    none, int8 = specs.parse("none"), specs.parse("int8")
    assert [none.cost(ELEMENTS, 4, link, speed).latency for link in (tensorflow, gloo)] == pytest.approx([6e-3, 2e-3])
    assert [int8.cost(ELEMENTS, 4, link, speed).latency for link in (tensorflow, gloo)] == pytest.approx([4e-3, 2e-3])
    whole, chunks = (int8.cost(ELEMENTS, 4, link, speed) for link in (tensorflow, gloo))
    assert (whole.pieces, chunks.pieces) == (1, 12)
    assert (whole.sent, whole.transfer, whole.compute) == (chunks.sent, chunks.transfer, chunks.compute)
    assert whole.seconds == pytest.approx(whole.latency + whole.transfer + whole.compute)
    assert chunks.seconds < whole.seconds
    assert specs.parse("int8:pipeline=false").cost(ELEMENTS, 4, gloo, speed).pieces == 1
    assert specs.parse("topk:0.01").cost(ELEMENTS, 4, gloo, speed).pieces == 1


def test_buckets_together_overlap_like_chunks():
    cost = Cost(100, 0.5, transfer=3.0, compute=3.0)
    assert cost_model.together([cost]) == cost
    assert cost_model.together([]).seconds == 0.0
    both = cost_model.together([cost, cost])
    assert (both.sent, both.latency, both.pieces) == (200, 0.5, 2)
    assert both.seconds == pytest.approx(0.5 + 6.0 + 3.0)
    assert both.seconds < 2 * cost.seconds


def test_what_a_backward_pass_hides():
    cost = Cost(100, 0.0, transfer=2.0, compute=0.5)
    after = cost_model.exposed_seconds([NOTHING, cost], [1.0, 0.0])
    assert after == pytest.approx(cost.seconds)  # all at the end: nothing is hidden
    assert cost_model.exposed_seconds([cost, NOTHING], [0.0, 1.0]) == pytest.approx(cost.seconds - 1.0)
    assert cost_model.exposed_seconds([cost, NOTHING], [0.0, 5.0]) == pytest.approx(0.5)  # the processors' work remains
    assert cost_model.exposed_seconds([NOTHING, NOTHING], [1.0, 2.0]) == 0.0
    halves = [Cost(50, 0.0, transfer=1.0, compute=0.25)] * 2
    assert cost_model.exposed_seconds(halves, [3.0, 3.0]) == pytest.approx(1.5)  # half of the link's time is hidden
    slow = [Cost(50, 0.0, transfer=10.0, compute=0.25)] * 2
    assert cost_model.exposed_seconds(slow, [1.0, 1.0]) == pytest.approx(0.25 + 20.0 - 1.0)


def test_delays_of_messages_overlap():
    costs = [Cost(50, latency=0.5, transfer=1.0, compute=0.0)] * 4
    assert cost_model.exposed_seconds(costs, [0.0] * 4) == pytest.approx(4.0 + 0.5)
    assert cost_model.exposed_seconds(costs, [1.0] * 4) == pytest.approx(1.0 + 0.5)


def test_more_pieces_of_a_backward_pass_never_expose_more():
    def exposed(parts: int) -> float:
        cost = Cost(1, 0.0, transfer=4.0 / parts, compute=1.0 / parts, handling=0.5 / parts)
        return cost_model.exposed_seconds([cost] * parts, [3.0 / parts] * parts)

    seconds = [exposed(parts) for parts in (1, 2, 3, 5, 10, 100)]
    assert seconds == sorted(seconds, reverse=True)


def test_buckets_of_a_forecast_are_those_of_the_exchange():
    shapes = [tf.TensorShape(shape) for shape in ([64, 64], [64], [64, 128], [128], [4, 4])]
    spec = specs.parse("int4:bucket_bytes=20000")
    sent = buckets_of(spec, shapes)
    assert [(one.indices, one.elements, one.spec.name) for one in sent] == [
        ((1, 3, 4), 64 + 128 + 16, "none"),
        ((0,), 4096, "int4"),
        ((2,), 8192, "int4"),
    ]
    reducer = CompressedReducer(spec, shapes, world_group(2, 0), "/device:CPU:0", 0)
    assert [list(one.indices) for one in sent[1:]] == reducer._indices
    assert [one.elements for one in buckets_of(specs.parse("none"), shapes)] == [64 * 64 + 64 + 64 * 128 + 128 + 16]


def test_fast_transports_stay_dense_where_slow_ones_encode(choose):
    """The same processors and codecs, and four workers: what the transport takes for a byte decides."""
    speed = Speed(2e9, 2e9)
    assert choose(Link(1e-3, 0.2e9, 3e-9), speed, [ELEMENTS] * 3) == ["fp8"] * 3
    assert choose(Link(1e-4, 5e9, 1e-10, 512 << 10), speed, [ELEMENTS] * 3) == ["none"] * 3
