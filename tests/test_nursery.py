"""What the tests' own processes are like: as those that `subprocess` starts."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys

from tests import nursery

import pytest

pytestmark = pytest.mark.without_keras

TELLS = """
import json, os, sys
print(json.dumps([sys.argv, sys.path[0], os.getcwd(), os.getpid() == os.getsid(0), dict(os.environ), __name__]))
print(sys.stdin.read(), end="", file=sys.stderr)
"""


def told(start, command, **options):
    given = {"env": {**os.environ, "A": "b"}, "start_new_session": True, "stdin": subprocess.PIPE}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with start([sys.executable, *command, "--flag", "x y"], **given, **pipes, **options) as process:
        output, errors = process.communicate("on standard input\n", timeout=300)
    assert (errors, process.returncode) == ("on standard input\n", 0)
    return json.loads(output)


def without(found, *names):
    *rest, environ, name = found
    return [*rest, {key: value for key, value in environ.items() if key not in names}, name]


@pytest.mark.parametrize("kind", ["script", "module", "code"])
def test_a_program_finds_what_exec_gives_it(tmp_path, kind):
    (tmp_path / "tells.py").write_text(TELLS)
    command = {"script": [str(tmp_path / "tells.py")], "module": ["-m", "tells"], "code": ["-c", TELLS]}[kind]
    started = told(subprocess.Popen, command, cwd=tmp_path)
    forked = told(nursery.Popen, command, cwd=tmp_path)
    assert without(forked, "TF_CPP_MIN_LOG_LEVEL") == without(started, "TF_CPP_MIN_LOG_LEVEL")


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("pass", 0, ""),
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('gone wrong')", 1, "gone wrong\n"),
        ("import atexit; atexit.register(print, 'at exit', flush=True); print('first'); raise SystemExit", 0, ""),
        ("raise ValueError('no')", 1, "ValueError: no\n"),
        ("import sys\nsys.excepthook = lambda *_: sys.exit(65)\nraise ValueError", 65, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -2, ""),
        ("import os; print('lost'); os._exit(3)", 3, ""),
    ],
)
def test_its_end_is_the_same(code, exit_code, said):
    started, forked = (
        run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        for run in (subprocess.run, nursery.run)
    )
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    assert forked.returncode == exit_code
    assert started.stderr.endswith(said)
    assert forked.stderr.endswith(said)


def test_it_is_waited_for_and_signalled():
    with nursery.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"], text=True,
                       stdout=subprocess.PIPE) as process:  # fmt: skip
        assert process.stdout.readline() == "up\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == -signal.SIGTERM
    with pytest.raises(subprocess.CalledProcessError):
        nursery.run([sys.executable, "-c", "raise SystemExit(1)"], check=True)
    with pytest.raises(subprocess.TimeoutExpired):
        nursery.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.1)


LAUNCHED = """
import os, sys
import tensorflow as tf
assert "tests.nursery" in open("/proc/self/cmdline").read(), "not a fork"
print("worker", sys.argv[1:], os.getppid() != 1, tf.constant(1.0).device[-5:], flush=True)
"""


def test_workers_of_the_launcher_are_forked_and_initialise_tensorflow_themselves(tmp_path):
    (tmp_path / "launched.py").write_text(LAUNCHED)
    command = [sys.executable, "-m", "tfpar.launch", "--workers=2", "--", str(tmp_path / "launched.py"), "--flag"]
    done = nursery.run(command, cwd=nursery.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("] worker ['--flag'] True CPU:0\n") == 2


def test_the_nursery_ends_with_the_tests(tmp_path):
    code = (
        "import sys; from tests import nursery; "
        "nursery.run([sys.executable, '-c', 'import os; print(os.getppid(), flush=True)']); print(nursery._nursery())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=nursery.ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    pid, address = done.stdout.split()
    for _ in range(100):
        if not pathlib.Path(f"/proc/{pid}").exists() and not pathlib.Path(address).exists():
            break
        signal.sigtimedwait([], 0.1)
    else:
        pytest.fail("it is still there")
