"""Rows of an embedding table between real processes: the dense mean, the same bits everywhere, the formula's bytes."""

from __future__ import annotations

import re

from tests.integration.scripts.exchange_rows import BAD_STEP, SHAPES, STEPS, TABLE, gradients
from tests.integration.test_multi_worker import launch
from tfpar.exchange import Exchange

import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.cluster

SPECS = ["none", "int8:min_elements=100", "bf16", "int4:warmup_steps=3,pattern=all_gather", "powersgd:1"]


def dense_mean(replicas: int, step: int) -> tuple[np.ndarray, set[int]]:
    """The table's mean in float64, and the rows that anybody has touched."""
    total, touched = np.zeros(TABLE), set()
    for replica in range(replicas):
        _, values, numbers, _ = gradients(replica, step)
        np.add.at(total, numbers, values.astype(np.float64))
        touched |= set(numbers.tolist())
    return total / replicas, touched


@pytest.mark.parametrize(("workers", "devices"), [(1, 2), (2, 1), (2, 2), (3, 1)])
def test_rows_between_workers(tmp_path, workers, devices):
    specs = SPECS if workers > 1 else SPECS[:2]
    arguments = ["-m", "tests.integration.scripts.exchange_rows", str(tmp_path), str(devices), *specs]
    result = launch(workers, *arguments, timeout=300.0)
    assert result.returncode == 0, result.stdout + result.stderr
    for number, spec in enumerate(specs):
        states = [dict(np.load(tmp_path / f"{number}-{worker}.npz")) for worker in range(workers)]
        check(spec, states, workers * devices, workers)


def check(spec: str, states: list[dict[str, np.ndarray]], replicas: int, workers: int) -> None:
    first = states[0]
    for name, value in first.items():
        if name.startswith(("mean/", "sent/")):
            for state in states[1:]:
                np.testing.assert_array_equal(state[name], value, err_msg=f"{spec} {name}")
    for step in range(STEPS):
        mean, touched = dense_mean(replicas, step)
        values, numbers = first[f"mean/{step}/values"], first[f"mean/{step}/numbers"]
        assert len(set(numbers.tolist())) == len(numbers)
        if step == BAD_STEP:
            assert np.isnan(values).any()
            continue
        found = np.zeros(TABLE, np.float32)
        found[numbers] = values
        as_rows = workers > 1 and step not in (2, 5)
        assert set(numbers.tolist()) == (touched if as_rows else set(range(TABLE[0])))
        exact = (
            workers == 1 or spec == "none" or (as_rows and spec != "bf16") or ("warmup_steps=3" in spec and step == 2)
        )
        if exact:
            np.testing.assert_allclose(found, mean, rtol=1e-5, atol=1e-5, err_msg=f"{spec}, step {step}")
        elif spec != "powersgd:1":
            assert np.linalg.norm(found - mean) < 0.2 * np.linalg.norm(mean)
        np.testing.assert_allclose(
            first[f"mean/{step}/small"],
            np.mean([gradients(r, step)[3] for r in range(replicas)], 0),
            rtol=1e-5,
            atol=1e-6,
        )
    if workers > 1:
        check_bytes(spec, first, replicas, workers)


def check_bytes(spec: str, state: dict[str, np.ndarray], replicas: int, workers: int) -> None:
    """What a worker sends in a step with rows: the largest number of rows, padded by at most an eighth."""
    dense, others = Exchange(spec), Exchange(spec)
    specs = [tf.TensorSpec(shape) for shape in SHAPES]
    dense.build(specs, workers=workers, sparse=[1])
    others.build([specs[0], specs[2]], workers=workers)
    row = 4 * (TABLE[1] // (2 if spec == "bf16" else 1) + 1)
    local = replicas // workers
    warm = 3 if "warmup_steps=3" in spec else 0
    whole = [2 * (workers - 1) * 4 * int(np.prod(shape)) // workers for shape in SHAPES]
    for step in range(STEPS):
        if step == BAD_STEP and spec != "none":
            continue
        rest = whole[0] + whole[2] if step < warm else others.traffic(workers, 0).wire_bytes
        sent = int(state[f"sent/{step}"]) - rest - 4 * (workers - 1)
        most = max(
            len({int(n) for replica in range(w * local, (w + 1) * local) for n in gradients(replica, step)[2]})
            for w in range(workers)
        )
        if step in (2, 5):
            expected = whole[1] if step < warm else dense.traffic(replicas, 0).wire_bytes - rest
            assert sent == pytest.approx(expected, abs=STEPS)
        else:
            rows = sent / (row * (workers - 1))
            assert most - 0.5 <= rows <= max(16, 1.125 * most) + 0.5, f"{spec}, step {step}: {rows} for {most}"


def test_the_benchmark_shows_what_rows_save():
    arguments = ["--vocabulary=2000", "--width=8", "--tokens=64", "--steps=2", "--exchanges=none,int8"]
    result = launch(2, "experiments/benchmarks/embeddings.py", *arguments, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = re.findall(r"(none|int8) +(table|rows) +([\d,]+)", result.stdout)
    sent = {(spec, name): int(number.replace(",", "")) for spec, name, number in rows}
    assert sent["none", "table"] == 4 * 2000 * 8
    assert sent["none", "rows"] == sent["int8", "rows"] < 0.1 * sent["none", "table"]
