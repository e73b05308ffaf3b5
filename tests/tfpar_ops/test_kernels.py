"""The native operations as TensorFlow sees them: threads, variables, graphs, strategies, shapes, errors."""

from __future__ import annotations

import ctypes
import itertools
import os
import pathlib
import sys

import tfpar_ops
from tests import nursery
from tests.tfpar_ops import data
from tfpar_ops import Codec, reference
from tfpar_ops.library import OPERATIONS, library

import numpy as np
import pytest
import tensorflow as tf

ROOT = pathlib.Path(__file__).resolve().parents[2]
INT4 = Codec("int4")
TOPK = Codec("topk", block=64, keep=5)
CODECS = [
    Codec("bf16"),
    Codec("fp16"),
    Codec("fp8"),
    Codec("int8", scale="float32"),
    Codec("int4", rounding="stochastic"),
    Codec("int2", block=64),
    Codec("sign"),
    Codec("topk", keep=41),
]
# More than a unit of work, and no multiple of anything; parts end within blocks.
SHAPES = [(70_001,), (3, 5, 7), (0,), (), (40_000, 2)]
ELEMENTS = sum(int(np.prod(shape)) for shape in SHAPES)


# With a GPU, `make gpu-test`.
on_the_cpu = pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")), reason="a GPU gives NaN, as an error would mean waiting for it"
)


@pytest.fixture(autouse=True)
def _native() -> None:
    if not tfpar_ops.uses_library():
        pytest.skip(f"the native operations are not in use here: {tfpar_ops.library_status()}")


def seed_step(codec: Codec) -> tf.Tensor | None:
    return tf.constant([12, 34], tf.int64) if codec.rounding == "stochastic" else None


def tensors(seed: int = 0) -> list[tf.Tensor]:
    vector = data.values(ELEMENTS, "normal", seed)
    ends = np.cumsum([np.prod(shape, dtype=int) for shape in SHAPES])
    return [tf.constant(part.reshape(shape)) for part, shape in zip(np.split(vector, ends[:-1]), SHAPES, strict=True)]


def residual(seed: int = 1, elements: int = ELEMENTS) -> tf.Tensor:
    return tf.constant(data.values(elements, "normal", seed))


def assert_same(actual: tfpar_ops.Encoded, expected: tfpar_ops.Encoded) -> None:
    np.testing.assert_array_equal(actual.payload, expected.payload)
    np.testing.assert_allclose(actual.norms, expected.norms, rtol=1e-5)
    if actual.residual is not None:
        data.same_bits(actual.residual.numpy(), expected.residual.numpy())


def address(variable: tf.Variable) -> int:
    """Where a variable's values lie, on the CPU or on a GPU."""
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    capsule = tf.experimental.dlpack.to_dlpack(variable.read_value())
    tensor = pointer_of(capsule, b"dltensor")  # its first field is the address of the data
    return ctypes.c_void_p.from_address(tensor).value


def raw(name: str, codec: Codec = INT4, **arguments):
    """An operation without its Python wrapper, whose checks come first otherwise."""
    return getattr(library().operations, name)(kind=codec.kind, block=codec.block, keep=codec.keep, **arguments)


# Results


@pytest.mark.parametrize("codec", CODECS, ids=data.identifier)
def test_work_in_many_units_gives_the_references_bits(codec):
    """Long enough to be spread over threads, in parts that no unit of work ends with."""
    made = tfpar_ops.encode(tensors(), residual(), codec, shards=3, seed_step=seed_step(codec))
    expected = reference.encode(tensors(), residual(), codec, shards=3, seed_step=seed_step(codec))
    assert_same(made, expected)
    for actual, wanted in zip(
        tfpar_ops.decode(made.payload, codec, SHAPES, factor=0.3),
        reference.decode(made.payload, codec, SHAPES, factor=0.3),
        strict=True,
    ):
        assert actual.shape == wanted.shape
        data.same(actual.numpy(), wanted.numpy())

    size = ELEMENTS + 9
    peers = [
        tfpar_ops.encode(tensors(i), None, codec, shard_elements=size, seed_step=seed_step(codec)) for i in range(3)
    ]
    payloads = tf.concat([peer.payload for peer in peers], 0)
    data.same(
        tfpar_ops.decode_sum(payloads, codec, size, factor=1 / 3).numpy(),
        reference.decode_sum(payloads, codec, size, factor=1 / 3).numpy(),
    )
    options = {"factor": 1 / 3, "begin": 7 * codec.block, "valid": ELEMENTS, "seed_step": seed_step(codec)}
    assert_same(
        tfpar_ops.recode(payloads, residual(), codec, size, **options),
        reference.recode(payloads, residual(), codec, size, **options),
    )


_FINGERPRINT = """
import hashlib, sys
import tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(int(sys.argv[1]))
import numpy as np
import tfpar_ops
from tests.tfpar_ops.test_kernels import CODECS, ELEMENTS, INT4, residual, seed_step, tensors
digest = hashlib.sha256()
def add(*results):
    for result in results:
        digest.update(np.asarray(result).tobytes())
norm, finite = tfpar_ops.norm_squared(tensors())
add(norm, finite)
for codec in CODECS:
    made = tfpar_ops.encode(tensors(), residual(), codec, seed_step=seed_step(codec))
    payloads = tf.concat([made.payload] * 3, 0)
    again = tfpar_ops.recode(payloads, residual(2), codec, ELEMENTS, factor=0.3, seed_step=seed_step(codec))
    add(*made, *again, tfpar_ops.decode_sum(payloads, codec, ELEMENTS))
assert tfpar_ops.uses_library()
print(digest.hexdigest())
"""


def test_results_do_not_depend_on_the_number_of_threads():
    """The norms too, which are sums: bits of every operation with 1, 2 and 8 threads of TensorFlow's pool."""
    found = {}
    for threads in (1, 2, 8):
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
        result = nursery.run(
            [sys.executable, "-c", _FINGERPRINT, str(threads)],
            cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        found[threads] = result.stdout.strip()
    assert len(found[1]) == 64
    assert found[1] == found[2] == found[8]


def test_norms_are_exact_to_float32():
    made = tfpar_ops.encode(tensors(), residual(), INT4)
    x = np.concatenate([np.ravel(part) for part in tensors()]).astype(np.float64)
    left = made.residual.numpy().astype(np.float64)
    np.testing.assert_allclose(made.norms, [x @ x, left @ left], rtol=1e-6)
    assert tfpar_ops.encode(tensors(), None, INT4).norms[1] == 0
    norm, finite = tfpar_ops.norm_squared(tensors())
    np.testing.assert_allclose(norm, x @ x, rtol=1e-6)
    assert finite


@pytest.mark.parametrize(
    ("value", "norm", "finite"),
    [(np.nan, np.nan, False), (np.inf, np.inf, False), (-np.inf, np.inf, False), (3e38, np.inf, True)],
)
def test_finite_says_whether_every_element_is(value, norm, finite):
    """Also where the norm itself is beyond float32."""
    vector = np.zeros(100_000, np.float32)
    vector[77_777] = value
    result = tfpar_ops.norm_squared([tf.zeros([3]), tf.constant(vector)])
    np.testing.assert_equal(result[0].numpy(), np.float32(norm))
    assert bool(result[1]) is finite


def test_nothing_at_all():
    """No tensors, no elements: a payload that is a header."""
    for none in ([], [tf.zeros([0])]):
        made = tfpar_ops.encode(none, tf.zeros([0]), INT4)
        assert made.payload.shape == (1, 4)
        assert made.residual.shape == (0,)
        assert tfpar_ops.encode(none, None, INT4, shards=3).payload.shape == (3, 4)
        assert tfpar_ops.norm_squared(none)[0] == 0
    assert tfpar_ops.decode(made.payload, INT4, []) == []
    assert tfpar_ops.decode_sum(made.payload, INT4, 0).shape == (0,)
    assert tfpar_ops.recode(made.payload, None, INT4, 0).payload.shape == (1, 4)


# The residual in a variable


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


# Graphs and strategies


def test_in_a_function_with_static_shapes():
    variable = tf.Variable(tf.zeros([ELEMENTS]))
    traces = []

    @tf.function(autograph=False)
    def step(parts: list[tf.Tensor], seed: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        made = tfpar_ops.encode_into(variable, parts, CODECS[4], shards=2, seed_step=seed)
        decoded = tfpar_ops.decode(made.payload, CODECS[4], SHAPES)
        traces.append((made.payload.shape, [part.shape for part in decoded]))
        return made.payload, decoded

    expected = tf.zeros([ELEMENTS])
    for number in range(3):
        seed = tf.constant([5, number], tf.int64)
        payload, _ = step(tensors(number), seed)
        made = reference.encode(tensors(number), expected, CODECS[4], shards=2, seed_step=seed)
        np.testing.assert_array_equal(payload, made.payload)
        expected = made.residual
        data.same_bits(variable.numpy(), expected.numpy())
    shard = -(-ELEMENTS // 2 // 512) * 512
    words = CODECS[4].payload_bytes(shard) // 4
    assert traces == [((2, words), SHAPES)]


def test_two_updates_of_one_variable_run_in_their_order():
    """Nothing else connects the two: automatic control dependencies must see that they write."""
    variable = tf.Variable(tf.zeros([1000]))

    @tf.function(autograph=False)
    def twice(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return (
            tfpar_ops.encode_into(variable, [x], INT4).payload,
            tfpar_ops.encode_into(variable, [-2 * x], INT4).payload,
        )

    x = residual(elements=1000)
    first = tfpar_ops.encode([x], tf.zeros([1000]), INT4)
    second = tfpar_ops.encode([-2 * x], first.residual, INT4)
    made = twice(x)
    np.testing.assert_array_equal(made[0], first.payload)
    np.testing.assert_array_equal(made[1], second.payload)
    data.same_bits(variable.numpy(), second.residual.numpy())


def test_an_update_without_a_reader_is_not_pruned():
    variable = tf.Variable(tf.zeros([1000]))

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> None:
        tfpar_ops.encode_into(variable, [x], INT4)

    step(residual(elements=1000))
    assert np.any(variable.numpy())


def test_under_a_mirrored_strategy():
    """Each replica has its residual, updated in place, in threads of their own."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variable = tf.Variable(
            tf.zeros([ELEMENTS]),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )

    @tf.function(autograph=False)
    def step(parts: list[list[tf.Tensor]]):
        def replica_step() -> tf.Tensor:
            me = tf.distribute.get_replica_context().replica_id_in_sync_group
            mine = [tf.gather(tf.stack(both), me) for both in zip(*parts, strict=True)]
            return tfpar_ops.encode_into(variable, mine, INT4).payload

        return strategy.run(replica_step)

    expected = [tf.zeros([ELEMENTS])] * 2
    for number in range(2):
        parts = [tensors(2 * number), tensors(2 * number + 1)]
        payloads = strategy.experimental_local_results(step(parts))
        for i in range(2):
            made = tfpar_ops.encode(parts[i], expected[i], INT4)
            np.testing.assert_array_equal(payloads[i], made.payload)
            expected[i] = made.residual
            data.same_bits(variable.values[i].numpy(), made.residual.numpy())


def test_nothing_is_differentiable():
    x = residual()
    variable = tf.Variable(tf.zeros([ELEMENTS]))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        made = tfpar_ops.encode([x], x, INT4)
        results = [
            made.residual,
            made.norms,
            tfpar_ops.encode_into(variable, [x], INT4).norms,
            tfpar_ops.norm_squared([x])[0],
            tfpar_ops.decode_sum(made.payload, INT4, ELEMENTS, factor=x[0]),
            tfpar_ops.decode(made.payload, INT4, [[ELEMENTS]], factor=x[0])[0],
            tfpar_ops.recode(made.payload, x, INT4, ELEMENTS).residual,
        ]
    assert [tape.gradient(result, x) for result in results] == [None] * len(results)
    assert len(OPERATIONS) == 7


# Shapes that are found before anything runs


def shapes_of(build, *specs: tf.TensorSpec) -> list[tf.TensorShape]:
    return [
        output.shape
        for output in tf.nest.flatten(tf.function(build, autograph=False).get_concrete_function(*specs).outputs)
    ]


def test_unknown_shapes_stay_unknown_and_known_ones_are_known():
    seed = [0, 0]
    unknown, words = tf.TensorSpec([None]), INT4.payload_bytes(1024) // 4

    def encode(x: tf.Tensor, shard_elements: int):
        return raw("tfpar_encode", tensors=[x], residual=[], seed_step=seed, shards=2, shard_elements=shard_elements)

    assert [s.as_list() for s in shapes_of(lambda x: encode(x, 0), unknown)] == [[2, None], [0], [2]]
    assert [s.as_list() for s in shapes_of(lambda x: encode(x, 1024), unknown)] == [[2, words], [0], [2]]
    assert [s.as_list() for s in shapes_of(lambda x: encode(x, 0), tf.TensorSpec([2000]))] == [[2, words], [0], [2]]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "tfpar_encode",
            {"tensors": [(1000,)], "residual": (999,), "seed_step": [0, 0]},
            "999 elements, expected 1000",
        ),
        ("tfpar_encode", {"tensors": [(1000,)], "residual": (0,), "seed_step": [0]}, "1"),
        ("tfpar_encode", {"tensors": [(1000,)], "residual": (1, 1000), "seed_step": [0, 0]}, "rank 1"),
        ("tfpar_decode_sum", {"payloads": (2, 72), "factor": 1.0, "elements": 1025}, "72 words, expected 200"),
        ("tfpar_decode_sum", {"payloads": (72,), "factor": 1.0, "elements": 512}, "rank 2"),
        ("tfpar_decode", {"payloads": (1, 72), "factor": 1.0, "shapes": [[9]], "N": 2}, "1 of them for 2 outputs"),
        ("tfpar_decode", {"payloads": (1, 72), "factor": 1.0, "shapes": [[None]], "N": 1}, "not fully defined"),
        ("tfpar_decode", {"payloads": (2, 72), "factor": 1.0, "shapes": [[99]], "N": 1, "shard_elements": 9}, "hold"),
    ],
)
def test_shapes_that_do_not_fit_are_found_while_the_graph_is_built(name, arguments, message):
    def tensor(argument, key):
        if key == "tensors":
            return [tf.zeros(shape) for shape in argument]
        if isinstance(argument, tuple):
            return tf.zeros(argument, tf.int32 if key == "payloads" else tf.float32)
        return argument

    @tf.function(autograph=False)
    def build():
        return raw(name, **{key: tensor(argument, key) for key, argument in arguments.items()})

    with pytest.raises(ValueError, match=message):
        build.get_concrete_function()


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "quantize"}, "not in the list of allowed values"),
        ({"kind": "int4", "block": 100}, "block=100; allowed"),
        ({"kind": "sign", "block": 2**40}, "block=.* allowed"),
        ({"kind": "bf16", "block": 512}, "block=512"),
        ({"kind": "bf16", "block": 1024, "scale": "float32"}, "scale"),
        ({"kind": "fp8", "rounding": "stochastic"}, "rounding|stochastic"),
        ({"kind": "topk", "keep": 0}, "keep=0; allowed"),
        ({"kind": "topk", "keep": 513}, "keep=513; allowed"),
        ({"kind": "sign", "shards": 0}, "shards"),
        ({"kind": "sign", "shard_elements": -1}, "shard_elements"),
        (
            {"kind": "sign", "shards": 2, "shard_elements": 500},
            "shard_elements=500 is not a multiple of the block, 512",
        ),
        ({"kind": "sign", "shard_elements": 8}, "shard_elements=8: 1 shards of it do not hold the 9 elements"),
    ],
)
def test_attributes_that_are_not_allowed(options, message):
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        library().operations.tfpar_encode(
            **{"tensors": [tf.zeros([9])], "residual": [], "seed_step": [0, 0], "block": 512, **options}
        )


def corrupted(payload: tf.Tensor, position: int) -> tf.Tensor:
    """A payload with one byte changed."""
    content = bytearray(payload.numpy().tobytes())
    content[position] ^= 0xFF
    return tf.constant(np.frombuffer(bytes(content), np.int32).reshape(payload.shape))


def every_reader(payload: tf.Tensor, codec: Codec, elements: int):
    """Calls of the operations that read payloads, without the wrappers."""
    both = tf.concat([raw("tfpar_encode", codec, tensors=[tf.zeros([elements])], residual=[], seed_step=[0, 0])[0]], 0)
    payloads = tf.concat([both, payload], 0) if payload.shape[1] == both.shape[1] else payload
    again = {"begin": tf.constant(0, tf.int64), "seed_step": [0, 0], "elements": elements, "valid": elements}
    variable = tf.Variable(tf.zeros([elements]))
    yield lambda: raw("tfpar_decode", codec, payloads=payload, factor=1.0, shapes=[[elements]], N=1)
    yield lambda: raw("tfpar_decode_sum", codec, payloads=payloads, factor=1.0, elements=elements)
    yield lambda: raw("tfpar_recode", codec, payloads=payloads, factor=1.0, residual=[], **again)
    yield lambda: raw("tfpar_recode_resource", codec, payloads=payloads, factor=1.0, residual=variable.handle, **again)


@on_the_cpu
@pytest.mark.parametrize("position", [0, 3, 4, 5, 6, 8, 15])
def test_every_byte_of_a_foreign_header_is_noticed(position):
    payload = corrupted(tfpar_ops.encode([residual(elements=1000)], None, INT4).payload, position)
    for read in every_reader(payload, INT4, 1000):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"payloads\[\d\]: .*expected"):
            read()
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"payloads\[0\]: .*expected"):
        tfpar_ops.decode(payload, INT4, [[1000]])


def test_payloads_of_another_length():
    payload = tfpar_ops.encode([residual(elements=1000)], None, INT4).payload
    for wrong in (payload[:, :-4], payload[:, :2], payload[:, :0], tf.pad(payload, [[0, 0], [0, 4]])):
        for read in every_reader(wrong, INT4, 1000):
            with pytest.raises(tf.errors.InvalidArgumentError, match="expected"):
                read()
        with pytest.raises(ValueError, match=f"expected \\[peers >= 1, {payload.shape[1]}\\]"):
            tfpar_ops.decode_sum(wrong, INT4, 1000)
    for read in itertools.islice(every_reader(payload[:0], INT4, 1000), 1):
        with pytest.raises(tf.errors.InvalidArgumentError):
            read()


@on_the_cpu
def test_a_position_outside_of_its_block():
    """Anywhere in the payload: it must not be read as an address."""
    payload = tfpar_ops.encode([residual(elements=6400)], None, TOPK).payload
    for block in (0, 99):
        wrong = corrupted(payload, 16 + 20 * block + 1)  # the high byte of the block's first position
        for read in every_reader(wrong, TOPK, 6400):
            with pytest.raises(tf.errors.InvalidArgumentError, match=r"topk position \d+, in block \d+, is not"):
                read()


@pytest.mark.parametrize("begin", [-512, 1, 513])
def test_a_shard_that_begins_within_a_block(begin):
    payload = tfpar_ops.encode([residual(elements=1000)], None, INT4).payload
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"begin={begin} is not a multiple of the block, 512"):
        tfpar_ops.recode(payload, None, INT4, 1000, begin=tf.constant(begin))
    expected = "is not a multiple of the block size, 512" if begin > 0 else "; expected at least 0"
    with pytest.raises(ValueError, match=rf"begin={begin} ?{expected}"):
        tfpar_ops.recode(payload, None, INT4, 1000, begin=begin)


def test_more_valid_elements_than_elements():
    payload = tfpar_ops.encode([residual(elements=1000)], None, INT4).payload
    with pytest.raises(ValueError, match="valid=1001 is not between 0 and elements=1000"):
        tfpar_ops.recode(payload, None, INT4, 1000, valid=1001)
    with pytest.raises(tf.errors.InvalidArgumentError, match="valid=1001 is more than elements=1000"):
        raw("tfpar_recode", payloads=payload, factor=1.0, residual=[], begin=tf.constant(0, tf.int64),
            seed_step=[0, 0], elements=1000, valid=1001)  # fmt: skip


def test_as_many_shapes_as_outputs_also_where_no_shape_function_is_asked():
    codec = Codec("int4")
    payload = tfpar_ops.encode([tf.zeros([1000])], None, codec).payload
    attributes = {"kind": "int4", "block": codec.block, "keep": 0, "scale": "bf16"}
    for outputs, shapes in ((40, [[1000]]), (1, [[500], [500]])):
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="shapes"):
            library().operations.tfpar_decode(
                payloads=payload, factor=1.0, N=outputs, shapes=shapes, shard_elements=1000, **attributes
            )


def test_more_elements_than_can_be_counted():
    """Shapes that are whole numbers each, and not together: found before anything is allocated."""
    half = [2**62]
    for build in (raw, tf.function(raw, autograph=False)):
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="more elements together than can be"):
            build("tfpar_decode", payloads=tf.zeros([1, 8], tf.int32), factor=1.0, shapes=[half, half], N=2)

    @tf.function(input_signature=[tf.TensorSpec(half), tf.TensorSpec(half)])
    def encode(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return raw("tfpar_encode", tensors=[x, y], residual=[], seed_step=[0, 0])[0]

    with pytest.raises(ValueError, match="more elements together than can be counted"):
        encode.get_concrete_function()


def test_payloads_beyond_what_can_be_counted():
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
        tfpar_ops.encode([tf.zeros([512])], None, Codec("sign"), shards=1 << 40, shard_elements=1 << 40)
