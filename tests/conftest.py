"""Shared test set-up: quiet start-up and four logical CPU devices, before TensorFlow initialises."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
# The tests must not see a real GPU: layouts are made of logical CPU devices everywhere.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.pop("TF_CONFIG", None)
# Some tests count tensors. The system's allocator, which runs with divided models choose, does not.
os.environ.setdefault("TF_ONEDNN_USE_SYSTEM_ALLOCATOR", "0")

from tests import nursery
from tests.repeats import repeats
from tfpar.training.program import Program

import keras
import pytest
import tensorflow as tf

LOGICAL_CPUS = 4
ALL_TESTS = 5000  # fewer are a selection
NEVER = 1 << 30  # collections of young objects before one of all
GARBAGE = 1 << 30  # bytes
COLLECTED = pytest.StashKey[int]()  # bytes of the process after the last collection of all objects
UNKNOWN = pytest.StashKey[set[str]]()
CHOOSES_XLA = {name: vars(Program)[name] for name in ("xla_disabled_reason", "compiles_update")}
OPTIMIZED = {"collectives", "exchange", "gpu", "tfpar_ops"}  # rooms of operations that Grappler must not change
WITHOUT_XLA = "a small run takes as long to compile as all the rest; mark tests of it xla"


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # As in what a shell starts in the background; every process of the tests would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # the 300,000 objects of TensorFlow and Keras, which every collection would go through
    gc.set_threshold(20_000, 20, NEVER)  # tracing makes millions of objects, few of them garbage
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(LOGICAL_CPUS)]
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what `make test` leaves out."""
    left = repeats()
    for item in items:
        if item.nodeid in left:
            item.add_marker(pytest.mark.proof)
            left.discard(item.nodeid)
    config.stash[UNKNOWN] = left if len(items) > ALL_TESTS else set()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What takes much of the time of a small run, and is left to some tests and to the processes that tests start.

    `--jit_compile=auto` chooses XLA in tests that are marked `xla` or `proof`. TensorFlow optimizes graphs (Grappler)
    in these, in those marked `grappler`, in the rooms of tfpar's own operations, and in the processes that these start.
    """
    chooses = item.get_closest_marker("xla") or item.get_closest_marker("proof")
    update = CHOOSES_XLA["compiles_update"]
    of_passes = property(lambda program: program.jit_compile and update.fget(program))
    without = {"xla_disabled_reason": WITHOUT_XLA, "compiles_update": of_passes}
    for name, chosen in (CHOOSES_XLA if chooses else without).items():
        setattr(Program, name, chosen)
    optimizes = chooses or item.get_closest_marker("grappler") or OPTIMIZED.intersection(item.nodeid.split("/"))
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not optimizes})
    os.environ[nursery.PLAIN_GRAPHS] = "0" if optimizes else "1"


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Collects graphs and models of earlier tests once they may take `GARBAGE`: a collection takes up to a second."""
    if _resident() > item.config.stash.get(COLLECTED, 0) + GARBAGE:
        gc.collect()
        item.config.stash[COLLECTED] = _resident()


def _resident() -> int:
    """The bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture
def unknown_repeats(request: pytest.FixtureRequest) -> set[str]:
    """What `tests/repeats.txt` names though there is no such test, if all tests were collected."""
    return request.config.stash[UNKNOWN]


@pytest.fixture(autouse=True)
def _sigterm_ends_the_process():
    """`tfpar.validate` makes SIGTERM a preemption for the rest of the process, as an earlier test may have done."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture
def messages():
    """The lines that tfpar logs during a test, as the terminal would show them."""
    from tfpar.process import logs

    lines: list[str] = []
    handler = logging.Handler()
    handler.setFormatter(logs.LevelFormatter())
    handler.emit = lambda record: lines.append(handler.format(record))
    logger = logging.getLogger("tfpar")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def _fresh_keras_state(request: pytest.FixtureRequest):
    """Names, seeds and dtype policy of one test must not depend on the tests before it."""
    if request.node.get_closest_marker("without_keras"):
        yield
        return
    keras.utils.clear_session(free_memory=False)  # a collection of all garbage would take 0.2 s and more, every time
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float32")
    yield
    keras.config.set_dtype_policy("float32")
