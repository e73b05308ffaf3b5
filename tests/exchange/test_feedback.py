"""What error feedback and Deep Gradient Compression are for: on one worker their papers' formulas can be followed."""

from __future__ import annotations

from collections.abc import Callable

from tfpar.collectives.tensorflow import world_group
from tfpar.exchange import residuals
from tfpar.exchange import spec as specs
from tfpar.exchange.algorithms.deep_gradient import RAMP
from tfpar.exchange.buckets import Bucket
from tfpar.exchange.compressed import CompressedReducer
from tfpar_ops import Codec

import numpy as np
import pytest
import tensorflow as tf


def bucket(text: str, elements: int) -> Bucket:
    return specs.parse(text).build([tf.TensorShape([elements])], world_group(1, 0), 0, "bucket")


def compiled(one: Bucket) -> Callable[..., list[tf.Tensor]]:
    """`reduce` for many steps."""
    return tf.function(lambda gradients, step: one.reduce(gradients, step)[0], autograph=False)


def exchanged(one: Bucket, gradient: np.ndarray, step: int = 0) -> np.ndarray:
    sums, _ = one.reduce([tf.constant(gradient, tf.float32)], tf.constant(step, tf.int64))
    return sums[0].numpy()


def least_norm_loss(feedback: bool) -> tuple[float, float]:
    """SGD with signs on counter-example 3 of Karimireddy et al. (2019): e |x1 + x2| + |x1 - x2|, from (1, 1).

    Returns:
      x1 + x2 and the loss in the end.
    """
    small = 0.5
    one = bucket(f"sign:pattern=all_gather,error_feedback={str(feedback).lower()}", 2)
    reduce = compiled(one)
    x = np.array([1.0, 1.0])
    for step in range(600):
        # Of the subgradients at x1 = x2 one of those that are not 0, as the paper has it.
        gradient = small * np.sign(x.sum()) * np.ones(2) + (1.0 if x[0] >= x[1] else -1.0) * np.array([1.0, -1.0])
        [sums] = reduce([tf.constant(gradient, tf.float32)], tf.constant(step, tf.int64))
        x -= 0.05 / np.sqrt(step + 1.0) * sums.numpy()
    return x.sum(), small * abs(x.sum()) + abs(x[0] - x[1])


def test_signs_without_feedback_never_leave_the_line_they_start_on():
    total, loss = least_norm_loss(feedback=False)
    assert total == pytest.approx(2.0, abs=1e-6)
    assert loss > 0.99


def test_signs_with_feedback_converge():
    _, loss = least_norm_loss(feedback=True)
    assert loss < 0.05


UNEQUAL = [(40, 40), (30, 50), (33, 37), (64, 16)]  # the last elements of a tensor and the first of the next: one block


def unequal_gradients(step: int) -> list[np.ndarray]:
    """Every other tensor is 10^4 times larger."""
    generator = np.random.default_rng(step)
    factors = (1e4, 1.0, 1e4, 1.0)
    return [
        (factor * generator.standard_normal(shape)).astype(np.float32)
        for shape, factor in zip(UNEQUAL, factors, strict=True)
    ]


@pytest.mark.parametrize("spec", ["int8", "int4", "int2", "sign", "sign:block=64", "topk:0.01"])
def test_a_small_tensor_loses_nothing_beside_a_large_one(spec):
    """Sums and residual against the gradients: of the small tensors' own size."""
    separator = "," if ":" in spec else ":"
    text = f"{spec}{separator}pattern=all_gather"
    one = specs.parse(text).build([tf.TensorShape(shape) for shape in UNEQUAL], world_group(1, 0), 0, "bucket")
    given, sent = (np.zeros(one.elements) for _ in range(2))
    reduce = compiled(one)
    for step in range(100):
        gradients = unequal_gradients(step)
        sums = reduce([tf.constant(gradient) for gradient in gradients], tf.constant(step, tf.int64))
        given += np.concatenate([gradient.ravel() for gradient in gradients])
        sent += np.concatenate([part.numpy().ravel() for part in sums])
    lost = given - sent - residuals.pending_of([one], 0)
    begin = 0
    for shape in UNEQUAL:
        part = slice(begin, begin + np.prod(shape))
        begin = part.stop
        assert np.linalg.norm(lost[part]) < 1e-6 * np.linalg.norm(given[part]), (shape, spec)


def test_copies_that_fill_blocks_stay_copies():
    one = specs.parse("sign:pattern=all_gather").build([tf.TensorShape(s) for s in UNEQUAL], world_group(1, 0), 0, "b")
    for step in range(5):
        one.reduce([tf.constant(part) for part in unequal_gradients(step)], tf.constant(step, tf.int64))
    residual = one.state["worker"].numpy()
    originals, sources = one.padding.originals(), one.padding.sources()
    assert (residual.size, originals.sum()) == (2048 + 1536 + 1536 + 1024, one.elements)
    np.testing.assert_array_equal(residual, residual[originals][sources])
    assert one.wire_bytes().payload == Codec("sign").payload_bytes(residual.size)


def test_momentum_correction_and_factor_masking():
    """Algorithm 1 of Lin et al. (2018), step by step in NumPy."""
    elements, momentum = 640, 0.9
    one = bucket(f"topk:0.05,block=64,pattern=all_gather,momentum={momentum}", elements)
    keep = round(0.05 * 64)
    generator = np.random.default_rng(5)
    velocity, waiting = np.zeros(elements, np.float32), np.zeros(elements, np.float32)
    for step in range(8):
        gradient = generator.standard_normal(elements).astype(np.float32)
        velocity = np.float32(momentum) * velocity + gradient
        waiting = waiting + velocity
        blocks = waiting.reshape(-1, 64)
        chosen = np.zeros_like(blocks, bool)
        np.put_along_axis(chosen, np.argsort(-np.abs(blocks), axis=1, kind="stable")[:, :keep], True, axis=1)
        chosen = chosen.reshape(-1)
        sent = exchanged(one, gradient, step)
        np.testing.assert_array_equal(sent != 0.0, chosen)
        np.testing.assert_allclose(sent[chosen], waiting[chosen], rtol=2.0**-8)  # bfloat16
        waiting = waiting - sent
        velocity[chosen] = 0.0
        np.testing.assert_allclose(one.state["velocity"].numpy(), velocity, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(one.state["worker"].numpy(), waiting, rtol=1e-5, atol=1e-5)


def test_reported_bytes_are_the_mean_of_all_exchanges():
    """Two dense ones, a ramp of two stages of two, and comparisons in steps 3 and 6."""
    steps, elements, spec = 8, 64 * 64, specs.parse("topk:0.02,warmup_steps=2,ramp_steps=4,sample_every=3")
    reducer = CompressedReducer(spec, [tf.TensorShape([64, 64])], world_group(1, 0), "CPU:0", 0)
    before = reducer.bytes_per_step(1, 0).payload_bytes
    assert before == spec.options.codec.payload_bytes(elements)
    for _ in range(steps):
        reducer.reduce_on_device([tf.ones([64, 64])], tf.zeros([1]), lambda _: tf.constant(True))
    reducer.reduce_on_device([tf.ones([64, 64])], tf.zeros([1]), lambda _: tf.constant(False))
    ramp = [specs.plain("topk", share=share).options.codec.payload_bytes(elements) for share in RAMP[:2]]
    total = 4 * 4 * elements + 2 * sum(ramp) + 2 * before
    assert reducer.bytes_per_step(1, 0).payload_bytes == round(total / steps)


def test_ramp_keeps_less_and_less():
    elements, steps = 4096, 40
    reduce = compiled(bucket(f"topk:0.01,ramp_steps={steps}", elements))
    kept = []
    for step in range(steps + 5):
        gradient = tf.constant(np.random.default_rng(step).standard_normal(elements), tf.float32)
        kept.append(np.count_nonzero(reduce([gradient], tf.constant(step, tf.int64))[0]))
    stages = [share for share in RAMP if share > 0.01]
    for number, share in enumerate(stages):
        begin = number * steps // len(stages)
        assert kept[begin + 1] == pytest.approx(share * elements, rel=0.02)
    assert kept[-1] == pytest.approx(0.01 * elements, abs=1)
