"""Python processes that start with TensorFlow imported.

A new interpreter takes three seconds of processor time to import TensorFlow and Keras, and these tests start hundreds.
`run` and `Popen` are those of `subprocess`, for programs of this interpreter, but fork them from a process that has
imported both and used neither. What they start, and what `tfpar.launch` starts in them, are processes as any other:
with their own number, session, environment, folder, output and signals. Tests of the start itself use `subprocess`, and
so do those of variables that are read as Python starts or packages are imported (PYTHONPATH, TFDS_DATA_DIR).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import inspect
import os
import pathlib
import pickle
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from typing import Any, NoReturn

ROOT = pathlib.Path(__file__).parents[1]
_DEFAULTS = (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGWINCH, signal.SIGUSR1, signal.SIGUSR2)
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_NUMBER = struct.Struct("<q")  # a length, a process, an exit code
_exec = subprocess.Popen
# With 1 in it, TensorFlow leaves graphs as they are (no Grappler), which takes a sixth of the time of a small run.
PLAIN_GRAPHS = "TFPAR_TEST_PLAIN_GRAPHS"
_kept: list[subprocess.Popen] = []  # for as long as its standard input is open, it goes on
_arguments_of = inspect.signature(_exec._execute_child).bind


class Popen(subprocess.Popen):
    """`subprocess.Popen` for `[sys.executable, ...]`."""

    def _execute_child(self, *args: Any) -> None:
        given = _arguments_of(self, *args).arguments
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(_nursery())
        request = pickle.dumps(_program(given))
        socket.send_fds(self._connection, [_NUMBER.pack(len(request))], _files(given))
        self._connection.sendall(request)
        self._child_created = True
        self.pid = _receive(self._connection)
        self._close_pipe_fds(*(given[name] for name in _PIPES))

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = _receive(self._connection)
            self._connection.close()
        return self.returncode

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode


def run(
    command: list[str],
    *,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess:
    """`subprocess.run`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def _program(given: dict[str, Any]) -> dict[str, Any]:
    """What `_become` is told, from the arguments of `_execute_child`."""
    return {
        "command": list(map(os.fspath, given["args"]))[1:],
        "environ": dict(os.environ if given["env"] is None else given["env"]),
        "folder": os.fspath(given["cwd"] or os.getcwd()),
        "session": given["start_new_session"],
    }


def _files(given: dict[str, Any]) -> list[int]:
    """Its standard input, output and errors; this process's own where it has none of its own."""
    return [
        number if given[name] == -1 else given[name] for number, name in enumerate(("p2cread", "c2pwrite", "errwrite"))
    ]


def _receive(connection: socket.socket) -> int:
    received = connection.recv(_NUMBER.size, socket.MSG_WAITALL)
    assert len(received) == _NUMBER.size, "the process that others are forked from has ended"
    return _NUMBER.unpack(received)[0]


@functools.cache
def _nursery() -> str:
    """Starts the process that others are forked from, for as long as this one lives; returns its address."""
    path = os.path.join(tempfile.mkdtemp(prefix="tfpar-nursery-"), "socket")
    environ = {key: value for key, value in os.environ.items() if key not in ("TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL")}
    # One thread: what forks may have no other. Its children read the variable anew, from their own environment.
    environ["OPENBLAS_NUM_THREADS"] = "1"
    process = _exec(
        [sys.executable, "-m", "tests.nursery", path],
        cwd=ROOT,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # signals to the tests' group are not for it: it ends once they have
    )
    _kept.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return path


class _Forked(subprocess.Popen):
    """`subprocess.Popen` in a process of the nursery: a Python program is forked, all else started as ever."""

    def _execute_child(self, *args: Any) -> None:
        given = _arguments_of(self, *args).arguments
        command = list(map(os.fspath, given["args"]))
        if (
            command[0] != sys.executable
            or len(command) < 2
            or (command[1].startswith("-") and command[1] not in ("-m", "-c", "-u"))
        ):
            return super()._execute_child(*args)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            _become(**_program(given), files=_files(given), prepare=given["preexec_fn"])
        self._close_pipe_fds(*(given[name] for name in _PIPES))
        return None


def _become(
    command: list[str],
    *,
    environ: dict[str, str],
    folder: str,
    session: bool,
    files: list[int],
    prepare: Any = None,
) -> NoReturn:
    """Makes of this fork what `exec` would make of it, and ends with the program."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in _DEFAULTS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        kept = [os.dup(file) for file in files]
        for number, file in enumerate(kept):
            os.dup2(file, number)
        if session:
            os.setsid()
        if prepare:
            prepare()
        os.closerange(3, 4096)
        os.chdir(folder)
        # TensorFlow read it when it was imported; tfpar sets it only before that.
        environ.setdefault("TF_CPP_MIN_LOG_LEVEL", os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0"))
        os.environ.clear()
        os.environ.update(environ)
        subprocess.Popen = _Forked  # type: ignore[misc]
        if environ.get(PLAIN_GRAPHS) == "1":
            import tensorflow as tf

            tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
        code = _main(command)
    except BaseException:
        traceback.print_exc()
    finally:
        # The end of the interpreter, with all that it does then, from the middle of what is no longer of interest.
        ctypes.pythonapi.Py_Exit(code)


def _main(command: list[str]) -> int:
    """Runs `-m MODULE ...`, `-c CODE ...` or `SCRIPT ...`; returns the exit code."""
    import numpy as np

    np.random.seed()  # Python's own generator is seeded anew in a fork
    unbuffered = command[0] == "-u" or bool(os.environ.get("PYTHONUNBUFFERED"))
    command = command[command[0] == "-u" :]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=-1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    if unbuffered or os.isatty(1):
        sys.stdout.reconfigure(line_buffering=True, write_through=unbuffered)
    try:
        sys.orig_argv[1:] = command
        if command[0] in ("-m", "-c"):
            sys.path[0] = "" if command[0] == "-c" else os.getcwd()
            sys.argv = [command[0], *command[2:]]
            if command[0] == "-m":
                runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            else:
                module = type(sys)("__main__")
                sys.modules["__main__"] = module
                exec(compile(command[1], "<string>", "exec"), module.__dict__)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        return _code_of(end)
    except KeyboardInterrupt:
        if sys.excepthook is not sys.__excepthook__:
            try:
                sys.excepthook(*sys.exc_info())
            except SystemExit as end:
                return _code_of(end)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        try:
            sys.excepthook(*sys.exc_info())
        except SystemExit as end:  # as in tfpar.process.exit_codes
            return _code_of(end)
        return 1
    return 0


def _code_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _request(connection: socket.socket) -> tuple[bytes, list[int]]:
    """What `Popen` sends, and its files; nothing where it ended meanwhile."""
    files: list[int] = []
    with contextlib.suppress(OSError, struct.error):
        head, files, *_ = socket.recv_fds(connection, _NUMBER.size, 3)
        length = _NUMBER.unpack(head)[0]
        request = connection.recv(length, socket.MSG_WAITALL)
        if len(request) == length:
            return request, files
    return b"", files


def _serve(path: str) -> None:
    """Forks a process for each request; ends when the tests have, which hold its standard input open."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                os.unlink(path)
                os.rmdir(os.path.dirname(path))
                return
            if key.fileobj is listener:
                connection, _ = listener.accept()
                request, files = _request(connection)
                pid = os.fork() if request else 0  # none where who asked is gone
                if request and pid == 0:
                    _become(**pickle.loads(request), files=files)
                for file in files:
                    os.close(file)
                if pid:
                    with contextlib.suppress(OSError):
                        connection.sendall(_NUMBER.pack(pid))
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
            else:
                pid, connection = key.data
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError):  # nobody waits for it any more
                    connection.sendall(_NUMBER.pack(code))
                connection.close()
                selector.unregister(key.fileobj)
                os.close(key.fileobj)


if __name__ == "__main__":
    import tfpar.training.trainer  # noqa: F401 - with all that it imports

    import sklearn.datasets  # noqa: F401
    import tensorflow_datasets  # noqa: F401

    gc.freeze()  # nor are pages copied because the collector writes to what the children share
    gc.set_threshold(20_000, 20, 50)  # as in conftest.py: tracing makes millions of objects, few of them garbage
    assert threading.active_count() == 1
    assert len(os.listdir("/proc/self/task")) == 1, "forks of a process with several threads can lock up"
    _serve(sys.argv[1])
