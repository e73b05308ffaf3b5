"""The passes of a stage as two programs (`tfpar/training/pipeline/passes.py`)."""

from tfpar.training.pipeline.passes import CompiledPasses, TapedPasses

import keras
import numpy as np
import pytest
import tensorflow as tf

WIDTH, HIDDEN = 6, 10


def of(*shape: int, seed: int = 0) -> tf.Tensor:
    return tf.random.stateless_normal(shape, (seed, len(shape)))


def perceptron(x: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor, other: tf.Tensor) -> list[tf.Tensor]:
    """As Keras computes `Dense` layers with inputs of rank 3."""
    hidden = keras.activations.gelu(tf.tensordot(x, kernel, 1) + bias, approximate=True)
    return [tf.tensordot(hidden, other, 1)]


def dropout(x: tf.Tensor, kernel: tf.Tensor) -> list[tf.Tensor]:
    y = tf.matmul(x, kernel)
    return [y * tf.cast(tf.random.stateless_uniform(tf.shape(y), (3, 4)) > 0.5, y.dtype)]


def table(indices: tf.Tensor, rows: tf.Tensor, unused: tf.Tensor) -> list[tf.Tensor]:
    """Also has a result that is not a floating-point number."""
    del unused
    return [tf.square(tf.gather(rows, indices)), indices > 1]


def loop(x: tf.Tensor, kernel: tf.Tensor) -> list[tf.Tensor]:
    outputs = tf.scan(lambda state, step: tf.tanh(tf.matmul(state + step, kernel)), x)
    return [tf.reduce_sum(outputs, 0)]


def branch(x: tf.Tensor, kernel: tf.Tensor) -> list[tf.Tensor]:
    y = tf.matmul(x, kernel)
    return [tf.cond(tf.reduce_sum(y) > 0.0, lambda: tf.tanh(y) * 2.0, lambda: tf.exp(y))]


def constant(x: tf.Tensor, kernel: tf.Tensor) -> list[tf.Tensor]:
    """Reads a tensor beside its arguments. The result is also what the backward pass needs."""
    return [tf.tanh(tf.matmul(x, kernel) + POSITIONS)]


POSITIONS = of(300, WIDTH, seed=7)
ARGUMENTS = {
    perceptron: [of(2, 3, WIDTH), of(WIDTH, HIDDEN), of(HIDDEN), of(HIDDEN, WIDTH)],
    dropout: [of(4, WIDTH), of(WIDTH, WIDTH, seed=1)],
    table: [tf.constant([0, 2, 2]), of(5, WIDTH), of(3)],
    loop: [of(3, 2, WIDTH), of(WIDTH, WIDTH)],
    branch: [of(4, WIDTH), of(WIDTH, WIDTH, seed=1)],
    constant: [of(300, WIDTH), of(WIDTH, WIDTH, seed=1)],
}


def taped(body, *, recompute: bool = False) -> TapedPasses:
    """Passes whose random numbers are those of XLA too, if there are any: loops and branches cannot be taped so."""
    compiled = tf.function(body, autograph=False, jit_compile=body is dropout)
    return TapedPasses(lambda tensors: compiled(*tensors), recompute=recompute)


def ran(passes, arguments) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
    """Results and gradients, from passes that are part of a function."""
    missing = []

    @tf.function(autograph=False)
    def run(*given):
        results, kept = passes.forward(given)
        upstream = [tf.ones_like(each) for each in results if each.dtype.is_floating]
        gradients = passes.backward(given, kept, upstream)
        missing[:] = [each is None for each in gradients]
        return results, [tf.zeros([]) if each is None else tf.convert_to_tensor(each) for each in gradients]

    results, gradients = run(*arguments)
    numbers = [None if none else each.numpy() for none, each in zip(missing, gradients, strict=True)]
    return [each.numpy() for each in results], numbers


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("body", ARGUMENTS)
def test_two_programs_compute_what_a_tape_does(body, recompute):
    arguments = ARGUMENTS[body]
    compiled = CompiledPasses(body, arguments, recompute=recompute)
    assert compiled.can_run
    found, expected = ran(compiled, arguments), ran(taped(body, recompute=recompute), arguments)
    for own, other in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)


def test_the_forward_pass_keeps_no_weights_and_nothing_that_is_cheap_to_compute():
    """Of a GELU, two tensors remain: what it is of, and the hyperbolic tangent."""
    compiled = CompiledPasses(perceptron, ARGUMENTS[perceptron], recompute=False)
    assert sorted(each.op.type for each in compiled.kept) == ["AddV2", "Tanh"]
    assert {tuple(each.shape) for each in compiled.kept} == {(2, 3, HIDDEN)}
    (mask,) = CompiledPasses(dropout, ARGUMENTS[dropout], recompute=False).kept
    assert mask.op.type not in ("MatMul", "ReadVariableOp")
    assert CompiledPasses(perceptron, ARGUMENTS[perceptron], recompute=True).kept == []


@pytest.mark.parametrize("watched", [[2], [0, 3], []])
def test_only_watched_arguments_have_gradients(watched):
    arguments, function = ARGUMENTS[perceptron], tf.function(perceptron, autograph=False)
    compiled = CompiledPasses(perceptron, arguments, recompute=False, watched=watched)
    passes = TapedPasses(lambda tensors: function(*tensors), recompute=False, watched=watched)
    of_all = ran(taped(perceptron), arguments)[1]
    for found in (ran(compiled, arguments)[1], ran(passes, arguments)[1]):
        for gradient, place in zip(found, watched, strict=True):
            np.testing.assert_allclose(gradient, of_all[place], rtol=1e-4, atol=1e-5)


def test_programs_of_one_shape_serve_other_values():
    compiled = CompiledPasses(perceptron, ARGUMENTS[perceptron], recompute=False)
    doubled = [2 * each for each in ARGUMENTS[perceptron]]
    for own, other in zip(ran(compiled, doubled)[1], ran(taped(perceptron), doubled)[1], strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-3, atol=1e-5)


def test_a_result_that_is_kept_is_returned_once():
    compiled = CompiledPasses(constant, ARGUMENTS[constant], recompute=False)
    (kept,) = compiled.kept
    assert kept.op.type == "Tanh"
    (result,), (again,) = compiled.forward(ARGUMENTS[constant])
    assert again is result


def test_what_loops_and_branches_compute_is_computed_again():
    assert CompiledPasses(loop, ARGUMENTS[loop], recompute=False).kept == []
    noisy = CompiledPasses(lambda x, k: [loop(x, k)[0] * tf.random.uniform([WIDTH])], ARGUMENTS[loop], recompute=False)
    assert not noisy.can_run  # other random numbers in the backward pass


def test_variables_and_effects_are_left_to_the_tape():
    outside = tf.Variable([2.0])
    captures = CompiledPasses(lambda x: [x * outside], [of(4)], recompute=False)
    assert not captures.can_run
    assert [each.dtype for each in captures.captured] == [tf.resource]

    def printing(x: tf.Tensor) -> list[tf.Tensor]:
        tf.print(x)
        tf.debugging.assert_positive(x)
        return [x * x]

    def asserting(x: tf.Tensor) -> list[tf.Tensor]:
        tf.debugging.assert_positive(x)
        return [x * x]

    assert not CompiledPasses(printing, [of(4)], recompute=False).can_run
    assert CompiledPasses(asserting, [of(4)], recompute=False).can_run
