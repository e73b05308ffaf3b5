"""Compressed exchange between real processes: the same bits everywhere, and nothing is lost."""

from __future__ import annotations

import functools
import pathlib

from tests.integration.scripts import own_loop
from tests.integration.scripts.exchange_sums import BAD_STEP, EARLY, RETUNED, SHAPES, STEPS, gradients
from tests.integration.test_multi_worker import launch
from tfpar.exchange import Exchange
from tfpar.exchange import spec as specs
from tfpar.exchange.algorithms import message_plans

import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.cluster

EARLY_SPECS = [
    "int4:bucket_bytes=20000",
    "int8:pattern=ring,bucket_bytes=20000",
    "topk:0.05,bucket_bytes=20000,pattern=all_gather",
    "sign:bucket_bytes=20000,sample_every=2",
    RETUNED,
]
SPECS = [
    "none",
    "bf16",
    "fp16",
    "fp8",
    "int8",
    "int4",
    "int4:block=64,rounding=stochastic,scale=float32",
    "int2",
    "sign",
    "topk:0.05,block=256",
    "int4:pattern=all_gather",
    "topk:0.05,pattern=all_gather",
    "int8:warmup_steps=2",
    "int4:bucket_bytes=20000",
    "int8:pattern=ring",
    "int4:pattern=binary_blocks,rounding=stochastic",
    "int4:pattern=hierarchical",
    "powersgd:4",
    "powersgd:2,start_after=2",
    "topk:0.05,block=256,ramp_steps=4",
    "topk:0.05,block=256,momentum=0.9",
    "auto",
    RETUNED,
    "int8:pattern=ring,bucket_bytes=20000",
    "topk:0.05,bucket_bytes=20000,pattern=all_gather",
    "sign:bucket_bytes=20000,sample_every=2",
    *(EARLY + spec for spec in EARLY_SPECS),
]
# Of each kind of pattern one, for every number of workers.
FEW = [
    "none",
    "int4",
    "topk:0.05,block=256",
    "sign:pattern=all_gather",
    "int4:pattern=ring",
    "topk:0.05,block=256,pattern=binary_blocks",
    "powersgd:2",
    "int4:bucket_bytes=20000",
    EARLY + "int4:bucket_bytes=20000",
]
# And some more kinds of codecs, for one; the proof has all.
MORE = [
    *("none", "fp8", "int8", "int2", "auto", "int4:pattern=ring", "topk:0.05,block=256,pattern=binary_blocks"),
    *("topk:0.05,block=256,momentum=0.9", "powersgd:2,start_after=2", RETUNED, "int4:pattern=hierarchical"),
    *("int4:bucket_bytes=20000", EARLY + "int4:bucket_bytes=20000"),
]
LARGE = [index for index, shape in enumerate(SHAPES) if len(shape) > 1 and np.prod(shape) >= 1024]


@functools.cache
def true_sums(replicas: int) -> list[np.ndarray]:
    """Per tensor, the float64 sum over replicas and finite steps."""
    total = [np.zeros(shape) for shape in SHAPES]
    for step in range(STEPS):
        for replica in range(replicas):
            for index, value in enumerate(gradients(replica, step)):
                total[index] += 0.0 if step == BAD_STEP else value.astype(np.float64)
    return total


def undelivered(states: list[dict[str, np.ndarray]]) -> np.ndarray:
    """What all workers together have kept back, over the large tensors laid end to end."""
    buckets = []
    while any(f"state/{len(buckets)}/worker" in state for state in states):
        name = f"state/{len(buckets)}"
        kept = np.sum([state[f"{name}/worker"] for state in states], axis=0, dtype=np.float64)
        if f"{name}/owner" in states[0]:
            kept += np.concatenate([state[f"{name}/owner"] for state in states])
        buckets.append(kept)
    return np.concatenate(buckets)


@pytest.mark.parametrize(("workers", "devices"), [(1, 2), (2, 1), (2, 2), (3, 1), (4, 1), (5, 1), (8, 1)])
def test_sums_over_workers(tmp_path, workers, devices):
    sums_over_workers(tmp_path, workers, devices, MORE if workers == 3 else FEW)


@pytest.mark.proof
def test_sums_by_every_codec_and_pattern(tmp_path):
    sums_over_workers(tmp_path, 3, 1, SPECS)


def sums_over_workers(tmp_path: pathlib.Path, workers: int, devices: int, chosen: list[str]) -> None:
    if workers & (workers - 1) == 0:
        chosen = [*chosen, "int8:pattern=halving_doubling"]
    if devices > 1:
        chosen = [*chosen, "int4:pattern=hierarchical"]
    arguments = ["-m", "tests.integration.scripts.exchange_sums", str(tmp_path), str(devices), *chosen]
    result = launch(workers, *arguments, timeout=300.0)
    assert result.returncode == 0, result.stdout + result.stderr
    results = {
        spec: [dict(np.load(tmp_path / f"{number}-{worker}.npz")) for worker in range(workers)]
        for number, spec in enumerate(chosen)
    }
    for spec, states in results.items():
        plain = spec.removeprefix(EARLY)
        check(plain, states, workers * devices, workers)
        if plain != spec:
            check_same(results[plain], states)


def test_the_loop_of_the_documentation_equals_one_worker(tmp_path):
    result = launch(2, "-m", "tests.integration.scripts.own_loop", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    expected = own_loop.trained(tf.distribute.OneDeviceStrategy("CPU:0"), "none")
    for worker in range(2):
        found = np.load(tmp_path / f"{worker}.npz")
        for name, value in zip(found.files, expected, strict=True):
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)


def check_same(plain: list[dict[str, np.ndarray]], early: list[dict[str, np.ndarray]]) -> None:
    """Buckets that leave early bring the same bits, and leave the same state."""
    for expected, state in zip(plain, early, strict=True):
        assert expected.keys() == state.keys()
        for name, value in expected.items():
            if not name.startswith(f"mean/{BAD_STEP}/"):
                np.testing.assert_array_equal(state[name], value, err_msg=name)


def check(spec: str, states: list[dict[str, np.ndarray]], replicas: int, workers: int) -> None:
    for name, value in states[0].items():
        if name.startswith("mean/"):
            for state in states[1:]:
                np.testing.assert_array_equal(state[name], value, err_msg=f"{spec} {name}")
    # A step that one replica found not finite is NaN for all, and leaves no trace.
    assert np.isnan(states[0][f"mean/{BAD_STEP}/2"]).any(), spec
    assert all(state["unchanged"] for state in states), spec
    finite = [step for step in range(STEPS) if step != BAD_STEP]
    delivered = [
        replicas * sum(states[0][f"mean/{step}/{index}"].astype(np.float64) for step in finite)
        for index in range(len(SHAPES))
    ]
    expected = true_sums(replicas)
    compressed = spec != "none" and workers > 1
    for index in range(len(SHAPES)):
        if not (compressed and index in LARGE):  # dense: exact to float32 rounding
            np.testing.assert_allclose(delivered[index], expected[index], rtol=1e-5, atol=1e-5 * 10.0 ** (index - 3))
    if compressed and "momentum" not in spec:  # there velocities are delivered
        total = np.concatenate([delivered[index].reshape(-1) for index in LARGE]) + undelivered(states)
        truth = np.concatenate([expected[index].reshape(-1) for index in LARGE])
        error = np.linalg.norm(total - truth) / np.linalg.norm(truth)
        assert error < 1e-5, f"{spec}: {error}"
    if compressed:
        check_traffic(spec, states[0]["traffic"], workers)


def large_bytes(text: str, workers: int, step: int | None = None) -> tuple[int, int]:
    """Bytes of the large tensors, payload and sent: in an exchange, or if all buckets are encoded."""
    options = specs.parse(text).options
    shapes = [tf.TensorSpec(SHAPES[index]) for index in LARGE]
    if step is not None and getattr(options, "ramp_steps", 0):
        assert text == "topk:0.05,block=256,ramp_steps=4"  # two exchanges with each of two larger shares
        return large_bytes(f"topk:{(0.25, 0.25, 0.0625, 0.0625, 0.05)[step]},block=256", workers)
    exchange, whole = Exchange(text), Exchange("none")
    for one in (exchange, whole):
        one.build(shapes, workers=workers)
    encoded, dense = (one.traffic(workers, 0) for one in (exchange, whole))
    if step is None:
        return encoded.payload_bytes, encoded.wire_bytes
    if step < options.warmup_steps:
        return dense.payload_bytes, dense.wire_bytes
    compares = step % options.sample_every == min(options.sample_every // 10, 100)
    return encoded.payload_bytes + compares * dense.payload_bytes, encoded.wire_bytes + compares * dense.wire_bytes


def check_traffic(text: str, traffic: np.ndarray, workers: int) -> None:
    spec = specs.parse(text)
    payload, sent, dense = traffic
    large = sum(int(np.prod(SHAPES[index])) for index in LARGE)
    small = 4 * (sum(int(np.prod(shape)) for shape in SHAPES) - large)
    assert dense == 2 * (workers - 1) * (4 * large + small) // workers
    share = (workers - 1) / workers
    if spec.name == "auto":
        assert sent <= dense
        return
    encoded = large_bytes(text, workers)
    every = [large_bytes(text, workers, step) for step in range(STEPS - 1)]  # without BAD_STEP
    ring = 2 * (workers - 1) * small // workers
    told = [round(sum(values) / len(every)) for values in zip(*every, strict=True)]
    assert (payload, sent) == (small + told[0], ring + told[1]), text
    payload, sent = small + encoded[0], ring + encoded[1]
    if spec.name == "powersgd":
        matrices = [(np.prod(SHAPES[index]) // SHAPES[index][-1], SHAPES[index][-1]) for index in LARGE]
        assert payload - small == 4 * spec.options.rank * sum(rows + columns for rows, columns in matrices)
        np.testing.assert_allclose(sent, 2 * share * payload, atol=1)
        return
    bits = 8 * (payload - small) / large
    expected = 8 * spec.options.codec.payload_bytes(1 << 20) / (1 << 20)
    assert expected <= bits < 1.5 * expected + 3  # headers and padding weigh on so short a vector
    shares = 2 * share
    if spec.options.pattern == "all_gather":
        shares = workers - 1
    elif spec.options.pattern == "binary_blocks":
        plan = message_plans.binary_blocks(workers)
        shares = plan.sent_shards(0) / plan.shards
    np.testing.assert_allclose(sent, shares * (payload - small) + 2 * share * small, atol=1)
