"""A quiet start: real processes that import TensorFlow, and what must still be heard."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import signal
import subprocess
import sys

from tfpar.process import after_import, startup

import pytest

PROGRAM = """
import gc, importlib.util
from tfpar.process.startup import quiet_startup
quiet_startup()
for name in ("keras", "tensorflow"):  # as programs do that ask what is installed
    assert importlib.util.find_spec(name)
import keras
import tensorflow as tf
strategy = tf.distribute.MirroredStrategy(["CPU:0"])
tf.get_logger().warning("There are non-GPU devices in `tf.distribute.Strategy`, not using nccl allreduce.")
tf.get_logger().warning("5 out of the last 5 calls triggered tf.function retracing")
print(tf.reduce_sum(tf.ones([3])).numpy(), gc.isenabled(), gc.get_freeze_count() > 100_000)
"""


def _start(**environ):
    clean = {name: value for name, value in os.environ.items() if name not in ("TF_CPP_MIN_LOG_LEVEL", "TFPAR_VERBOSE")}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**clean, **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )


def test_start_up_is_silent_but_for_what_matters():
    result = _start()
    assert result.stdout == "3.0 True False\n"
    assert result.stderr.splitlines() == [
        "WARNING:tensorflow:5 out of the last 5 calls triggered tf.function retracing"
    ]


def test_the_collector_skips_tensorflow_in_processes_of_the_launcher():
    assert _start(TFPAR_RESTARTS="0").stdout == "3.0 True True\n"


def test_verbose_leaves_everything():
    result = _start(TFPAR_VERBOSE="1")
    assert re.search(r"^I\d{4} .*(oneDNN|cpu_feature_guard)", result.stderr, re.MULTILINE)
    assert "not using nccl" in result.stderr


def test_errors_on_standard_error_come_through(capfd):
    def work():
        with startup.filtered_stderr():
            os.write(2, b"I0000 00:00:1795247585.374341    4401 port.cc:153] oneDNN custom operations are on.\n")
            os.write(2, b"E0000 00:00:1795247585.374341    4401 driver.cc:1] the driver is too old\n")
            print("Traceback, say", file=sys.stderr)
            raise OSError("import failed")

    with pytest.raises(OSError, match="import failed"):
        work()
    print("after", file=sys.stderr)
    assert sorted(capfd.readouterr().err.splitlines()) == [
        "E0000 00:00:1795247585.374341    4401 driver.cc:1] the driver is too old",
        "Traceback, say",
        "after",
    ]


ABORTS = """
import os, sys
from tfpar.process.startup import filtered_stderr
with filtered_stderr():
    os.write(2, b"F0000 00:00:1795247585.374341 cpu_feature_guard.cc:1] compiled to use AVX instructions\\n")
    END
"""


@pytest.mark.parametrize(("end", "code"), [("os.abort()", -signal.SIGABRT), ("os._exit(3)", 3), ("sys.exit(4)", 4)])
def test_what_a_process_said_before_native_code_ended_it_comes_through(end, code):
    program = ABORTS.replace("END", end)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code
    assert done.stderr.count("compiled to use AVX instructions") == 1


@pytest.mark.parametrize(
    "change",
    [
        "tempfile._candidate_tempdir_list = lambda: ['/gone']",  # a container that is read-only
        "os.memfd_create = lambda _: os.open('/gone/file', 0)",
        "os.getpid = lambda: 1",  # the first process of a container, with which all others end
    ],
)
def test_whatever_the_machine_has_not_everything_comes_through(change):
    program = f"import os, tempfile\n{change}\n{ABORTS.replace('END', 'pass')}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr.count("compiled to use AVX instructions") == 1


def test_a_function_runs_after_an_import_though_somebody_asked_for_the_module_before(tmp_path, monkeypatch):
    (tmp_path / "tfpar_asked_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    after_import.after_import("tfpar_asked_for", lambda: seen.append(sys.modules["tfpar_asked_for"].value))
    for _ in range(2):
        assert importlib.util.find_spec("tfpar_asked_for")
    assert not seen
    finders = len(sys.meta_path)
    monkeypatch.delitem(sys.modules, "tfpar_asked_for", raising=False)
    importlib.import_module("tfpar_asked_for")
    assert (seen, len(sys.meta_path)) == ([1], finders - 1)


def test_user_settings_and_repeated_calls(monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    finders, logger = list(sys.meta_path), logging.getLogger("tensorflow")
    filters = list(logger.filters)
    try:
        for _ in range(2):
            startup.quiet_startup(False)
        assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "0"
        assert logger.filters.count(startup._hide_harmless) == 1
        assert sys.meta_path == finders  # TensorFlow is loaded already: nothing to wrap
        monkeypatch.setattr(sys, "argv", ["train.py", "--tensorflow_log"])
        startup.quiet_startup()
        assert startup._hide_harmless not in logger.filters
    finally:
        logger.filters[:] = filters
