"""A process of a test cluster that does as it is told, without TensorFlow.

    actor.py worker0=say:hello,sleep:30 worker1=exit:3

Each argument names a task and what it does, in order; other tasks do nothing. Every task first writes
`PID.TASK.pid` into $ACTOR_DIR, so that the test can look for processes left behind.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tfpar import cluster

info = cluster.detect()
assert info is not None
TASK = f"{info.task_type}{info.task_index}"
FOLDER = Path(os.environ.get("ACTOR_DIR", "."))


def note_pid(pid: int, name: str) -> None:
    (FOLDER / f"{pid}.{name}.pid").touch()


def describe(_: str) -> None:
    """Prints what the launcher gave this process."""
    print(f"{info.describe()} rank={info.worker_rank} chief={info.is_chief} at={info.address}")
    for name in ("TFPAR_RESTARTS", "TF_NUM_INTRAOP_THREADS", "GLIBC_TUNABLES", "CUDA_VISIBLE_DEVICES"):
        print(f"{name}={os.environ.get(name)}")
    print(f"cores: {sorted(os.sched_getaffinity(0))} of {os.environ.get('TFPAR_WORKER_CORES')}")


def write_in_pieces(count: str) -> None:
    """Numbered lines, cut into writes that ignore where lines end."""
    text = "".join(f"{TASK} line {n} {'x' * (n % 70)}\n" for n in range(int(count))).encode()
    for start in range(0, len(text), 37):
        os.write(1 + start % 2, text[start : start + 37])  # standard output and standard error in turn


def progress(count: str) -> None:
    """A live line that is overwritten, then ended."""
    columns = os.get_terminal_size(1).columns if os.isatty(1) else 0
    for step in range(int(count)):
        os.write(1, f"\rstep {step} of {count}, {columns} columns".encode())
        time.sleep(0.05)
    os.write(1, b"\rtrained\x1b[K\n")


def catch(number: str) -> None:
    """Says which signal came, and exits with 0."""

    def handler(received: int, _: object) -> None:
        print(f"caught {signal.Signals(received).name}", flush=True)
        sys.exit(0)

    signal.signal(getattr(signal, number), handler)


def exit_when_told(code: str) -> None:
    """Exits with this code when SIGTERM comes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(code)))


def save_when_told(code: str) -> None:
    """Takes a while to save when SIGTERM comes, says which of the others run then, and exits with this code."""

    def save(*_: object) -> None:
        time.sleep(0.5)
        pids = {path.name.split(".")[1]: int(path.name.split(".")[0]) for path in FOLDER.glob("*.pid")}
        running = sorted(task for task, pid in pids.items() if pid != os.getpid() and Path(f"/proc/{pid}").exists())
        print(f"saved beside {' '.join(running)}", flush=True)
        sys.exit(int(code))

    signal.signal(signal.SIGTERM, save)


def ignore(number: str) -> None:
    signal.signal(getattr(signal, number), signal.SIG_IGN)


def spawn(seconds: str) -> None:
    """A child of its own, which stays when this process ends."""
    child = subprocess.Popen([sys.executable, "-S", "-c", f"import time; time.sleep({seconds})"])
    note_pid(child.pid, f"{TASK}-child")


def kill(number: str) -> None:
    os.kill(os.getpid(), getattr(signal, number))


def fail_on_gpu(number: str) -> None:
    """Exits where this process has that GPU; else waits until the one that has it is gone, or left out."""
    if os.environ["CUDA_VISIBLE_DEVICES"] == number:
        sys.exit(9)
    if os.environ["TFPAR_LEFT_OUT"] == "0":
        time.sleep(30)


def fail_until(restarts: str) -> None:
    if int(os.environ["TFPAR_RESTARTS"]) < int(restarts):
        raise ValueError(f"failing in start {os.environ['TFPAR_RESTARTS']}")


def touch(name: str) -> None:
    """Makes a file that another task may wait for; # in its name stands for the number of restarts."""
    (FOLDER / name.replace("#", os.environ["TFPAR_RESTARTS"])).touch()


def wait_for(name: str) -> None:
    """Waits for a file, so that the test decides on the order of events."""
    while not (FOLDER / name.replace("#", os.environ["TFPAR_RESTARTS"])).exists():
        time.sleep(0.01)


ACTIONS = {
    "describe": describe,
    "write_in_pieces": write_in_pieces,
    "progress": progress,
    "catch": catch,
    "exit_when_told": exit_when_told,
    "save_when_told": save_when_told,
    "ignore": ignore,
    "spawn": spawn,
    "kill": kill,
    "fail_until": fail_until,
    "fail_on_gpu": fail_on_gpu,
    "show": lambda name: print(f"{name}={os.environ[name]}"),
    "wait_for": wait_for,
    "touch": touch,
    "say": lambda text: print(text),
    "sleep": lambda seconds: time.sleep(float(seconds)),
    "exit": lambda code: sys.exit(int(code)),
}

note_pid(os.getpid(), TASK)
for argument in sys.argv[1:]:
    task, _, script = argument.partition("=")
    if task in (TASK, "all", info.task_type):
        for step in script.split(","):
            action, _, value = step.partition(":")
            ACTIONS[action](value)
