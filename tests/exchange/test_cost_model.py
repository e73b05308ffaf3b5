"""The cost model against closed forms, and what `auto` would do on links that can be reasoned about."""

from __future__ import annotations

import re
from collections.abc import Callable

from tfpar.collectives.cost_model import Link, Speed
from tfpar.collectives.tensorflow import world_group
from tfpar.config import ConfigError
from tfpar.exchange import spec as specs
from tfpar.exchange.algorithms import rounds
from tfpar.exchange.spec import Spec
from tfpar.exchange.tuning import auto
from tfpar.exchange.tuning.measure import Measured

import pytest

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
        result = auto.choose(specs.parse(text), elements, world_group(workers, 0, device), device)
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
    assert choose(slow, speed, [ELEMENTS], workers=65, device=GPU, what=pattern_of)[0] in rounds.PLANS
