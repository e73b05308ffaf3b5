"""The residual in a variable: updated where it lies, unless a value that was read before would change."""

from __future__ import annotations

import ctypes

import tfpar_ops
from tests.tfpar_ops import data
from tests.tfpar_ops.kernels.harness import ELEMENTS, INT4, assert_same, raw, residual, tensors

import numpy as np
import pytest
import tensorflow as tf


def address(variable: tf.Variable) -> int:
    """Where a variable's values lie, on the CPU or on a GPU."""
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    capsule = tf.experimental.dlpack.to_dlpack(variable.read_value())
    tensor = pointer_of(capsule, b"dltensor")  # its first field is the address of the data
    return ctypes.c_void_p.from_address(tensor).value


def test_a_variable_is_updated_where_it_lies():
    variable = tf.Variable(residual())
    expected = tfpar_ops.encode(tensors(), residual(), INT4)
    assert_same(tfpar_ops.encode_into(variable, tensors(), INT4), expected._replace(residual=None))
    data.same_bits(variable.numpy(), expected.residual.numpy())
    # The initial value may have been shared with the array it was made of; from here on the buffer is its own.
    before = address(variable)
    for _ in range(3):
        expected = tfpar_ops.encode(tensors(), expected.residual, INT4)
        assert_same(tfpar_ops.encode_into(variable, tensors(), INT4), expected._replace(residual=None))
        assert address(variable) == before
        data.same_bits(variable.numpy(), expected.residual.numpy())

        payload = expected.payload
        expected = tfpar_ops.recode(payload, expected.residual, INT4, ELEMENTS, factor=0.5)
        made = tfpar_ops.recode_into(variable, payload, INT4, ELEMENTS, factor=0.5)
        assert_same(made, expected._replace(residual=None))
        assert address(variable) == before
        data.same_bits(variable.numpy(), expected.residual.numpy())


def test_a_value_that_was_read_before_stays_as_it_was():
    variable = tf.Variable(residual())
    held = variable.read_value()
    before = address(variable)
    tfpar_ops.encode_into(variable, tensors(), INT4)
    assert address(variable) != before
    data.same_bits(held.numpy(), residual().numpy())
    data.same_bits(variable.numpy(), tfpar_ops.encode(tensors(), residual(), INT4).residual.numpy())


def test_a_variable_in_copy_on_read_mode():
    """Sparse access puts a variable in this mode: a read is a copy, an update may always be in place."""
    variable = tf.Variable(residual())
    variable.sparse_read([0])
    held = variable.read_value()
    tfpar_ops.encode_into(variable, tensors(), INT4)
    data.same_bits(held.numpy(), residual().numpy())
    data.same_bits(variable.numpy(), tfpar_ops.encode(tensors(), residual(), INT4).residual.numpy())


def test_reading_and_encoding_from_the_variable_itself():
    """The gradient is the variable's own value: nothing may be overwritten before it is read."""
    variable = tf.Variable(residual())
    made = tfpar_ops.encode_into(variable, [variable.read_value()], INT4)
    expected = tfpar_ops.encode([residual()], residual(), INT4)
    np.testing.assert_array_equal(made.payload, expected.payload)
    data.same_bits(variable.numpy(), expected.residual.numpy())


@pytest.mark.parametrize(
    ("variable", "error", "message"),
    [
        (lambda: tf.Variable(tf.zeros([ELEMENTS - 1])), ValueError, f"expected \\[{ELEMENTS}\\]"),
        (lambda: tf.Variable(tf.zeros([ELEMENTS], tf.float64)), TypeError, "float64; expected float32"),
    ],
)
def test_a_variable_that_does_not_fit(variable, error, message):
    with pytest.raises(error, match=message):
        tfpar_ops.encode_into(variable(), tensors(), INT4)


def test_the_kernel_itself_refuses_variables_that_do_not_fit():
    def encode_into(variable: tf.Variable) -> None:
        raw("tfpar_encode_resource", tensors=tensors(), residual=variable.handle, seed_step=[0, 0])

    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"residual: .*expected \[{ELEMENTS}\]"):
        encode_into(tf.Variable(tf.zeros([3])))
    with pytest.raises(tf.errors.InvalidArgumentError, match="variable of double, expected float32"):
        encode_into(tf.Variable(tf.zeros([ELEMENTS], tf.float64)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="residual"):
        encode_into(tf.Variable(tf.zeros([ELEMENTS, 1])))
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[ELEMENTS], shared_name="not_initialized")
    with pytest.raises(tf.errors.NotFoundError, match="not_initialized"):
        raw("tfpar_encode_resource", tensors=tensors(), residual=handle, seed_step=[0, 0])
