"""One job at a time writes a workdir: a lock with its owner's name.

`WORKDIR/.lock` is locked with flock(2) for as long as `fit` runs, by the chief. The kernel gives the lock back when the
process ends, however it ends, so that none is ever left behind; the file stays, and says who holds it. On a file
system without locks the owner's sign of life stands in: its process on the same machine, or else the time at which the
file was last touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import getpass
import hashlib
import json
import os
import pathlib
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfpar import cluster
from tfpar.config import ConfigError
from tfpar.process.safe_write import shortened

NAME = ".lock"
# A process that was killed may take a moment to end, above all one whose gradients are still on their way to the disk.
WAIT_SECONDS = 5.0
# A file server gives back the locks of a machine that died when their lease ends: of NFSv4, after 90 s by default.
WAIT_FOR_ANOTHER_MACHINE_SECONDS = 120.0
_POLL_SECONDS = 0.1
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
_UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_TOUCH_SECONDS = 10.0
_SILENT_SECONDS = 60.0  # without locks, and on another machine: longer than any pause of a process that lives
_SIZE = 1 << 13  # bytes of the file
_LONGEST_COMMAND = 500  # characters, of up to 12 bytes each


@dataclasses.dataclass(frozen=True)
class Owner:
    """Who holds a workdir.

    Attributes:
      host: Name of the machine.
      pid: Number of the process there.
      began: When that process began, in clock ticks since the machine's start; tells it from a later one of that pid.
      user: Who runs it.
      since: When it took the lock, local time.
      command: Its command line.
      scheduler: Its number in Slurm or Kubernetes, if any.
      job: The same for all processes of one start of one job; empty where it is unknown.
    """

    host: str = "unknown"
    pid: int = 0
    began: int = 0
    user: str = ""
    since: str = ""
    command: str = ""
    scheduler: str = ""
    job: str = ""

    def __str__(self) -> str:
        text = f"process {self.pid} on {self.host}"
        text += f", user {self.user}" if self.user else ""
        text += f", since {self.since}" if self.since else ""
        text += f", {self.scheduler}" if self.scheduler else ""
        return text + (f": {shortened(self.command)}" if self.command else "")


def _say(text: str) -> None:
    print(text, flush=True)


@contextlib.contextmanager
def held(workdir: str, say: Callable[[str], None] = _say, *, wait: float | None = None) -> Iterator[None]:
    """Holds the lock of a workdir; makes the directory where there is none.

    Args:
      workdir: The directory; empty: nothing is locked.
      say: Called with one line where a lock is taken over from a process that died, or where there can be none.
      wait: Seconds for which another owner is waited for; None for `WAIT_SECONDS`, or where the owner's machine is
        another, `WAIT_FOR_ANOTHER_MACHINE_SECONDS`.

    Raises:
      ConfigError: Another job holds it.
    """
    if not workdir:
        yield
        return
    path = pathlib.Path(workdir) / NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise ConfigError(
                f"--workdir={workdir}: {path} cannot be opened ({error.strerror}), so this job cannot keep others off. "
                "Correct its owner and permissions, or give another --workdir."
            ) from error
        say(f"WARNING: --workdir={workdir} cannot be locked ({error.strerror}); nothing keeps another job from it")
        yield
        return
    with contextlib.closing(_Lock(descriptor, path, workdir, say)) as lock:
        lock.take(wait)
        yield


def check_free(workdir: str, *, wait: float | None = None) -> None:
    """Refuses a workdir that another job holds; takes and writes nothing.

    The other processes of the job that asks may hold it. `wait` is that of `held`.

    Raises:
      ConfigError: Another job holds it.
    """
    path = pathlib.Path(workdir) / NAME
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # there is none yet; what else may be wrong shows when it is to be written
        return
    job = _job(os.environ)
    try:
        patience = _Patience(workdir, _say, wait)
        while not _is_free(descriptor, path):
            owner = _read(path)
            if job and owner is not None and owner.job == job:
                return
            if patience.ends(owner):
                if job and owner is None:  # on a full disk it has no name; the chief finds out whether it is its own
                    return
                raise _refusal(workdir, owner)
            time.sleep(_POLL_SECONDS)
    finally:
        os.close(descriptor)


class _Patience:
    """How long an owner is waited for."""

    def __init__(self, workdir: str, say: Callable[[str], None], wait: float | None) -> None:
        self._workdir, self._say, self._wait = workdir, say, wait
        self._began = time.monotonic()
        self._said = False

    def ends(self, owner: Owner | None) -> bool:
        """Whether this owner has been waited for long enough."""
        elsewhere = owner is not None and owner.host != socket.gethostname()
        limit = self._wait
        if limit is None:
            limit = WAIT_FOR_ANOTHER_MACHINE_SECONDS if elsewhere else WAIT_SECONDS
        if time.monotonic() - self._began >= limit:
            return True
        if elsewhere and not self._said:
            self._said = True
            self._say(f"--workdir={self._workdir} is in use by {owner}; waiting up to {limit:.0f} s for it to end")
        return False


class _Lock:
    """An open lock file."""

    def __init__(self, descriptor: int, path: pathlib.Path, workdir: str, say: Callable[[str], None]) -> None:
        self._descriptor = descriptor
        self._path = path
        self._workdir = workdir
        self._say = say
        self._taken = False
        self._closed = threading.Event()
        self._toucher: threading.Thread | None = None

    def take(self, wait: float | None) -> None:
        """Takes the lock, or raises ConfigError; see `held`."""
        patience = _Patience(self._workdir, self._say, wait)
        while not self._try():
            owner = _read(self._path)
            if patience.ends(owner):
                raise _refusal(self._workdir, owner)
            time.sleep(_POLL_SECONDS)
        before = _read(self._path)
        self._taken = True
        self._write(myself())
        if before is not None:
            self._say(f"--workdir={self._workdir}: taken over from {before}, which ended without giving it back")

    def close(self) -> None:
        """Gives the lock back."""
        self._closed.set()
        if self._toucher:
            self._toucher.join()
        if self._taken:
            self._write(None)
        os.close(self._descriptor)  # and with it the lock

    def _try(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        owner = _read(self._path)
        if owner is not None and _shows_life(owner, self._path):
            return False
        self._say(
            f"WARNING: the file system of --workdir={self._workdir} has no locks; other jobs are told to keep off by "
            f"{self._path}, which is touched every {_TOUCH_SECONDS:.0f} s. Start no two jobs there at the same time."
        )
        self._toucher = threading.Thread(target=self._touch, name="workdir lock", daemon=True)
        self._toucher.start()
        return True

    def _touch(self) -> None:
        while not self._closed.wait(_TOUCH_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self._descriptor)

    def _write(self, owner: Owner | None) -> None:
        content = json.dumps(dataclasses.asdict(owner), indent=1).encode() if owner else b""
        with contextlib.suppress(OSError):  # a full disk: the lock holds, only without a name
            # Always of the same size, in place: on a disk that has become full since, the name can still change.
            os.pwrite(self._descriptor, content.ljust(_SIZE - 1) + b"\n", 0)


def myself() -> Owner:
    """This process as an owner."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container whose user has no name
        user = str(os.getuid())
    return Owner(
        host=socket.gethostname(),
        pid=os.getpid(),
        began=_began(os.getpid()) or 0,
        user=user,
        since=datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        command=" ".join(shlex.join(sys.orig_argv).split())[:_LONGEST_COMMAND],
        scheduler=_scheduler(os.environ),
        job=_job(os.environ),
    )


def _scheduler(environ: Mapping[str, str]) -> str:
    if environ.get("SLURM_JOB_ID"):
        return f"Slurm job {environ['SLURM_JOB_ID']}"
    return f"pod {socket.gethostname()}" if environ.get("KUBERNETES_SERVICE_HOST") else ""


def _job(environ: Mapping[str, str]) -> str:
    """What all processes of one start of one job have in common, and no other job has."""
    try:
        found = cluster.detect(environ)
    except ConfigError:  # is reported where the cluster is needed
        found = None
    if found is None or not found.cluster:
        return ""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "TFPAR_RESTARTS")
    parts = [{job: list(tasks) for job, tasks in sorted(found.cluster.items())}, *map(environ.get, names)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _refusal(workdir: str, owner: Owner | None) -> ConfigError:
    who = str(owner) if owner else "another job, which could not write down its name"
    return ConfigError(
        f"--workdir={workdir} is in use by {who}. Only one job may write there: wait until it has ended, end it, or "
        "give another --workdir."
    )


def _read(path: pathlib.Path) -> Owner | None:
    """The owner that a lock file names; None where it names none."""
    try:
        with open(path, "rb") as file:
            values = json.loads(file.read(_SIZE))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    kinds = {field.name: type(field.default) for field in dataclasses.fields(Owner)}
    known: dict[str, Any] = {name: values[name] for name, kind in kinds.items() if type(values.get(name)) is kind}
    return Owner(**known)


def _is_free(descriptor: int, path: pathlib.Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            return True  # what is wrong shows when it is to be taken
        owner = _read(path)
        return owner is None or not _shows_life(owner, path)
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


def _shows_life(owner: Owner, path: pathlib.Path) -> bool:
    """Whether an owner is there still, as far as that can be told without a lock."""
    if owner.host == socket.gethostname():
        return _began(owner.pid) == owner.began != 0
    try:
        touched = path.stat().st_mtime
        probe = path.with_name(f"{path.name}.{os.getpid()}")  # what time is it there? clocks differ
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
    except OSError:
        return True
    return now - touched < _SILENT_SECONDS


def _began(pid: int) -> int | None:
    """When a process of this machine began, in clock ticks since the machine's start; None where there is none."""
    try:
        # proc(5): the 22nd field; the second is a name in brackets, which may hold anything.
        return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
