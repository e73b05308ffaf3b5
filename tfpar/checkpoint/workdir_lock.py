"""One job at a time writes a workdir: a lock that names its owner.

The chief locks `WORKDIR/.lock` while `fit` runs, with flock(2) through the library filelock. The kernel releases the
lock when the process ends, however it ends, so no stale lock remains; the file stays, and holds the name of the owner.
On a file system without locks a warning says so; there only a living owner on the same machine is noticed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import getpass
import hashlib
import json
import logging
import os
import pathlib
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tfpar import cluster
from tfpar.config import ConfigError
from tfpar.process.safe_write import shortened

import filelock

_log = logging.getLogger(__name__)

NAME = ".lock"
# A process that was killed may take a moment to end, above all while its gradients are still being written to the disk.
WAIT_SECONDS = 5.0
# A file server releases the locks of a machine that died when their lease ends: for NFSv4, after 90 s by default.
WAIT_FOR_ANOTHER_MACHINE_SECONDS = 120.0
_POLL_SECONDS = 0.1
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
_UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_SIZE = 1 << 13  # bytes of the file
_LONGEST_COMMAND = 500  # characters, of up to 12 bytes each


@dataclasses.dataclass(frozen=True)
class Owner:
    """The process that holds a workdir.

    Attributes:
      host: Name of the machine.
      pid: Its process number there.
      began: When the process started, in clock ticks since the machine's start; distinguishes it from a later process
        with the same pid.
      user: The user that runs it.
      since: When it took the lock, local time.
      command: Its command line.
      scheduler: Its job in Slurm or pod in Kubernetes, if any.
      job: The same for all processes of one start of one job; empty if unknown.
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


@contextlib.contextmanager
def lock_workdir(workdir: str, *, wait: float | None = None) -> Iterator[None]:
    """Holds the lock of a workdir; creates the directory if there is none.

    Args:
      workdir: The directory; empty: nothing is locked.
      wait: Seconds to wait for another owner; None for `WAIT_SECONDS`, or `WAIT_FOR_ANOTHER_MACHINE_SECONDS` if the
        owner runs on another machine.

    Raises:
      ConfigError: Another job holds the lock, or the lock file cannot be opened.
    """
    if not workdir:
        yield
        return
    path = pathlib.Path(workdir) / NAME
    lock = _file_lock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _wait_for(lock, path, _Deadline(workdir, wait))
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise ConfigError(
                f"--workdir={workdir}: {path} cannot be opened ({error.strerror}), so this job cannot lock it against "
                "other jobs. Correct its owner and permissions, or give another --workdir."
            ) from error
        _log.warning(
            "--workdir=%s cannot be locked (%s); nothing prevents another job from using it", workdir, error.strerror
        )
        yield
        return
    _report_previous(workdir, _read(path), locked=lock.is_locked)
    _write(path, current_owner())
    try:
        yield
    finally:
        _write(path, None)
        lock.release()


def check_free(workdir: str, *, wait: float | None = None) -> None:
    """Refuses a workdir that another job holds; writes nothing.

    Other processes of the same job may hold it. `wait` is that of `lock_workdir`.

    Raises:
      ConfigError: Another job holds it.
    """
    path = pathlib.Path(workdir) / NAME
    if not path.exists():
        return
    lock = _file_lock(path)
    with contextlib.suppress(OSError):  # other problems show when the workdir is locked
        _wait_for(lock, path, _Deadline(workdir, wait), job=_job(os.environ))
    lock.release()


def _file_lock(path: pathlib.Path) -> filelock.FileLock:
    # Its soft lock, the mere existence of a file, would outlive a killed process.
    return filelock.FileLock(path, fallback_to_soft=False, thread_local=False)


def _wait_for(lock: filelock.FileLock, path: pathlib.Path, deadline: _Deadline, job: str = "") -> None:
    """Takes a lock, unless its owner belongs to `job`.

    Raises:
      ConfigError: It still has another owner at the deadline.
      OSError: The file cannot be opened.
    """
    while True:
        owner = _read(path)
        if job and owner is not None and owner.job == job:
            return
        if _try(lock, path):
            return
        if deadline.has_passed(owner):
            if job and owner is None:  # on a full disk the lock has no name; the chief checks whether it is its own
                return
            raise _in_use_error(deadline.workdir, owner)
        time.sleep(_POLL_SECONDS)


def _try(lock: filelock.FileLock, path: pathlib.Path) -> bool:
    """Takes a lock if it is free. On a file system without locks, only checks for a living owner on this machine."""
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        owner = _read(path)
        return owner is None or not _is_alive(owner)
    return True


class _Deadline:
    """How long to wait for an owner."""

    def __init__(self, workdir: str, wait: float | None) -> None:
        self.workdir, self._wait = workdir, wait
        self._began = time.monotonic()
        self._logged = False

    def has_passed(self, owner: Owner | None) -> bool:
        """Whether the wait for this owner has been long enough; logs a line if the wait may be long."""
        elsewhere = owner is not None and owner.host != socket.gethostname()
        limit = self._wait
        if limit is None:
            limit = WAIT_FOR_ANOTHER_MACHINE_SECONDS if elsewhere else WAIT_SECONDS
        if time.monotonic() - self._began >= limit:
            return True
        if elsewhere and not self._logged:
            self._logged = True
            _log.info("--workdir=%s is in use by %s; waiting up to %.0f s for it to end", self.workdir, owner, limit)
        return False


def _report_previous(workdir: str, previous: Owner | None, *, locked: bool) -> None:
    """Logs the owner in a lock file that was not released, and that the file system has no locks."""
    if not locked:
        _log.warning(
            "the file system of --workdir=%s has no locks, so this job cannot lock it against other jobs. Do not "
            "start two jobs there at the same time.",
            workdir,
        )
    if previous is not None and not locked and previous.host != socket.gethostname():
        _log.warning("--workdir=%s may still be in use by %s; end it if it runs", workdir, previous)
    elif previous is not None:
        _log.info("--workdir=%s: took over a stale lock left by %s", workdir, previous)


def _write(path: pathlib.Path, owner: Owner | None) -> None:
    content = json.dumps(dataclasses.asdict(owner), indent=1).encode() if owner else b""
    with contextlib.suppress(OSError):  # a full disk: the lock holds, only without a name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # Always of the same size, in place: on a disk that has become full since, the name can still change.
            os.pwrite(descriptor, content.ljust(_SIZE - 1) + b"\n", 0)
        finally:
            os.close(descriptor)


def current_owner() -> Owner:
    """This process as an owner."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container whose user has no name
        user = str(os.getuid())
    return Owner(
        host=socket.gethostname(),
        pid=os.getpid(),
        began=_process_start_time(os.getpid()) or 0,
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
    """An identifier that all processes of one start of one job share, and no other job has."""
    try:
        info = cluster.detect(environ)
    except ConfigError:  # reported where the cluster is needed
        info = None
    if info is None or not info.cluster:
        return ""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "TFPAR_RESTARTS")
    parts = [{job: list(tasks) for job, tasks in sorted(info.cluster.items())}, *map(environ.get, names)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _in_use_error(workdir: str, owner: Owner | None) -> ConfigError:
    who = str(owner) if owner else "another job, which could not write its name"
    return ConfigError(
        f"--workdir={workdir} is in use by {who}. Only one job may write there: wait until it has ended, end it, or "
        "give another --workdir."
    )


def _read(path: pathlib.Path) -> Owner | None:
    """The owner that a lock file names, or None."""
    try:
        with open(path, "rb") as file:
            values = json.loads(file.read(_SIZE))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    types = {field.name: type(field.default) for field in dataclasses.fields(Owner)}
    known: dict[str, Any] = {name: values[name] for name, kind in types.items() if type(values.get(name)) is kind}
    return Owner(**known)


def _is_alive(owner: Owner) -> bool:
    """Whether an owner on this machine still runs; False for other machines, which cannot be asked."""
    return owner.host == socket.gethostname() and _process_start_time(owner.pid) == owner.began != 0


def _process_start_time(pid: int) -> int | None:
    """When a process of this machine started, in clock ticks since the machine's start; None if there is none."""
    try:
        # proc(5): the 22nd field; the second is a name in brackets, which may hold anything.
        return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
