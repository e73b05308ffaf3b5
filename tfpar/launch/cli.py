"""Starts a local cluster: `python -m tfpar.launch --workers=2 -- SCRIPT FLAGS...`.

Every process runs the same script with its own TF_CONFIG on loopback. Each line of output is prefixed with the
process it came from. When one fails, all are ended, and started again on fresh ports if --max_restarts allows; with
--min_workers without the one that fails again and again. The exit code is that of the process that failed first,
128 + N if signal N killed it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tfpar.cluster.info import ClusterInfo, tf_config_json
from tfpar.config import ConfigError
from tfpar.launch import hosts, log_files
from tfpar.launch.console import Terminal
from tfpar.launch.gpu_slots import NO_GPU, Slots, visible_gpus
from tfpar.launch.guard import Guard
from tfpar.launch.interrupts import Interrupts
from tfpar.launch.parser import Parser, check_numbers, script_problem
from tfpar.launch.supervisor import Command, Process, Supervisor
from tfpar.process import exit_codes
from tfpar.process.cores import cores, listed, share_out
from tfpar.process.heap import huge_pages
from tfpar.process.writable import unwritable

_CHIEF = "chief 0"
_DRAIN_S = 2.0  # for workers to end by themselves after the chief, before they are ended like servers
_BIND_RETRIES = 3
_NOT_RETRIED = (*exit_codes.NOT_RETRYABLE, exit_codes.INTERRUPTED)
_COLLECTIVE_EXITS = (exit_codes.PEER_LOST, exit_codes.PREEMPTED)  # all other workers follow one that exits like this
_SETTLE_S = 5.0  # for workers that follow one that was lost or preempted, before they are asked to end
_SAME_FAILURE_WAIT_S = 1.5  # for workers that fail the same way: then no single one is to blame
_STABLE_RUN_S = 60.0  # a run of this length did not fail at its start
_LONGEST_DELAY_S = 60.0
# What TensorFlow 2.21 says when its port is taken.
_BIND_ERROR = "Could not start gRPC server"
_PROGRAM = "python -m tfpar.launch"

_EPILOG = """\
SCRIPT is a .py file, `-m module`, or `tfpar` with a command; everything after -- goes to Python as it is.

With --ps=K the cluster has a chief besides the N workers: the chief drives the training, the workers compute, the
K parameter servers hold the weights. Workers and parameter servers of TensorFlow serve forever, so the run is
over when the chief has ended. Without --ps it is over when all workers have ended.

Restarts: after a failure all processes are ended and started again on fresh ports, with TFPAR_RESTARTS=n in their
environment; training resumes from the newest checkpoint. Each further failure within a minute doubles the delay, up
to a minute. Exit codes 2, a usage error, 65, bad numbers, and 130, Ctrl-C, are never retried. With --min_workers=M,
which needs --max_restarts=2 or more, a worker that alone is the first to fail twice in a row, the second time within
ten minutes, is left out with its GPUs, as long as M others are left; a global batch that then does not divide is shared
out unevenly.

Preemption: SIGTERM to the launcher or to any worker makes all save a checkpoint and end; exit code 85. Allow for it
with --grace_period, and start again later. With --ps, send it to the launcher or to the chief: a worker or parameter
server that receives it ends at once, which is a failure. Exit code 75: a worker was lost, and --max_restarts is used
up.

Set for every process: TF_CONFIG; TFPAR_RESTARTS; TFPAR_LEFT_OUT, the number of workers left out;
TF_NUM_INTRAOP_THREADS, the cores divided by the processes, unless you set it. Each worker has cores of its own, which
TFPAR_WORKER_CORES lists, if there are enough; with --ps or --share_cores, all use all. GPUs are shared out evenly
over the workers through CUDA_VISIBLE_DEVICES; where there are fewer GPUs than workers, all train on the CPU. With
--share_gpus several workers use a GPU then, with TFPAR_SHARED_GPUS=1 and TF_FORCE_GPU_ALLOW_GROWTH=true, and their
data travels through the host, as NCCL takes each GPU once.

No process outlives the launcher, however that ends. Ctrl-C and SIGTERM are passed on; a second one kills at once. A
closed terminal (SIGHUP) counts as SIGTERM, except under nohup.

examples:
  python -m tfpar.launch --workers=2 -- experiments/image_classification.py --steps=100 --workdir=runs/a
  python -m tfpar.launch --workers=2 --ps=1 -- -m experiments.image_classification --strategy=parameter_server
  python -m tfpar.launch --workers=2 -- tfpar train image --flagfile=quickstart.flags
  python -m tfpar.launch --workers=2 -- tfpar doctor
  python -m tfpar.launch --hosts=hosts.txt -- experiments/image_classification.py --workdir=/shared/runs/a

With --hosts=FILE, whose lines are `host[:port] [slots=N]` (N workers there; default 1, ports from 2222), it prints a
command to run on each host, with its TF_CONFIG, and starts nothing.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What to start.

    Attributes:
      command: The arguments of Python: the script or `-m module`, and its flags.
      workers: Processes that train.
      ps: Parameter servers; more than 0 adds a chief.
      max_restarts: How often a failed cluster is started again.
      min_workers: Smallest number of workers with which to continue without those that keep failing; 0: only with all.
      restart_delay: Seconds before the first restart in a row.
      grace_period: Seconds between asking processes to end and killing them.
      share_cores: Whether every worker may use all cores, instead of its own.
      share_gpus: Whether several workers use a GPU where there are fewer GPUs than workers.
      log_dir: Directory for a copy of the output of every process, if any.
      hosts: A host file: prints the commands for its hosts, and starts nothing.
    """

    command: tuple[str, ...]
    workers: int
    ps: int = 0
    max_restarts: int = 0
    min_workers: int = 0
    restart_delay: float = 1.0
    grace_period: float = 30.0
    share_cores: bool = False
    share_gpus: bool = False
    log_dir: Path | None = None
    hosts: Path | None = None

    @property
    def jobs(self) -> dict[str, int]:
        """Job name to number of tasks."""
        return {"chief": 1, "worker": self.workers, "ps": self.ps} if self.ps else {"worker": self.workers}

    def log(self, label: str) -> Path | None:
        """The log file of a process."""
        return log_files.path_of(self.log_dir, label) if self.log_dir else None


def run(options: LaunchOptions) -> int:
    """Runs a cluster to its end.

    Args:
      options: What to start.

    Returns:
      0, or the exit code of the process that failed first, or 128 + the signal that ended the launcher.
    """
    is_tty = sys.stdout.isatty()
    terminal = Terminal(sys.stdout.buffer, is_tty=is_tty, colours=is_tty and "NO_COLOR" not in os.environ)
    if options.log_dir:
        log_files.begin(options.log_dir)
    with Interrupts() as interrupts, contextlib.closing(Guard()) as guard:
        code = _run_with_restarts(
            options, lambda: Supervisor(terminal, interrupts, guard), interrupts, lambda text: _say(terminal, text)
        )
    if terminal.broken:  # the reader has gone, as in `| head`: as if SIGPIPE had ended this program
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


def _say(terminal: Terminal, text: str) -> None:
    terminal.line("launch", text.encode())


def _run_with_restarts(
    options: LaunchOptions, new_supervisor: Callable[[], Supervisor], interrupts: Interrupts, say: Callable[[str], None]
) -> int:
    started, restarts, bind_failures, delays = time.monotonic(), 0, 0, Delays(options.restart_delay)
    gpus = visible_gpus(os.environ)
    slots = Slots(options.workers, gpus, least=options.min_workers, together=options.share_gpus)
    if slots.gpus[:1] == [NO_GPU]:
        say(
            f"fewer GPUs than workers ({options.workers}), and NCCL needs at least one each: training on the CPU "
            "(--share_gpus lets workers share GPUs)"
        )
    while True:
        options = dataclasses.replace(options, workers=slots.workers)
        environ = {**os.environ, "TFPAR_RESTARTS": str(restarts), exit_codes.LEFT_OUT: str(slots.left_out)}
        began = time.monotonic()
        supervisor = new_supervisor()
        failed = _run_once(options, supervisor, commands(options, environ, slots.gpus), interrupts, say)
        again = f" after {restarts} restart{'s' * (restarts > 1)}" if restarts else ""
        if failed and not interrupts.received:
            if bind_failures < _BIND_RETRIES and _lost_port(failed):
                bind_failures += 1
                say(f"{failed.label} lost its port to another program; starting again on other ports")
                continue
            if restarts < options.max_restarts and failed.exit_code not in _NOT_RETRIED:
                restarts += 1
                ran = time.monotonic() - began
                say(f"{failed.label} {failed.how_it_ended()}; restart {restarts} of {options.max_restarts}")
                if options.min_workers:
                    alone = failed.code not in _COLLECTIVE_EXITS and not supervisor.failed_the_same_way(failed)
                    if text := slots.failed(int(failed.label.split()[1]), ran, alone=alone):
                        say(text)
                interrupts.sleep(delays.next(ran))
                if not interrupts.received:
                    continue
        if interrupts.received:
            return _interrupted(options, interrupts, supervisor, say)
        if failed:
            where = f"; log: {failed.command.log}" if failed.command.log else ""
            say(f"{failed.label} {failed.how_it_ended()}{again}{where}")
            return failed.exit_code
        members = ", ".join(f"{count} {job}{'s' * (count > 1 and job != 'ps')}" for job, count in options.jobs.items())
        say(f"{members}: done in {time.monotonic() - started:.1f} s{again}")
        return 0


class Delays:
    """Seconds to wait before each restart: twice as long after each failure that follows soon on a start.

    Args:
      first: The first and shortest.
    """

    def __init__(self, first: float) -> None:
        self._first = self._next = first

    def next(self, ran: float) -> float:
        """The delay after a start that ran for this many seconds."""
        if ran >= _STABLE_RUN_S:
            self._next = self._first
        delay, self._next = self._next, min(2 * self._next, max(_LONGEST_DELAY_S, self._first))
        return delay


def _interrupted(
    options: LaunchOptions, interrupts: Interrupts, supervisor: Supervisor, say: Callable[[str], None]
) -> int:
    number = interrupts.received[0]
    name = signal.Signals(number).name
    # With parameter servers the chief alone saves; the others serve until they are ended.
    codes = {process.code for process in supervisor.processes if process.label == _CHIEF or not options.ps}
    # Besides those that said so: one that lost a peer which ended sooner, or was not far enough to handle the signal.
    allowed, preempted = {*_COLLECTIVE_EXITS, -signal.SIGTERM}, exit_codes.PREEMPTED
    if interrupts.to_pass_on == signal.SIGTERM and preempted in codes and codes <= allowed:
        say(f"ended by {name}; all processes were asked to end and did so (exit code {preempted})")
        return preempted
    say(f"ended by {name}; all processes have ended")
    return 128 + number


def _run_once(
    options: LaunchOptions,
    supervisor: Supervisor,
    members: Sequence[Command],
    interrupts: Interrupts,
    say: Callable[[str], None],
) -> Process | None:
    """Starts all processes and waits for the end of the run; returns the one that failed, if one did.

    That is the first one that did not end because of another.
    """
    everyone = [command.label for command in members]
    try:
        for command in members:
            supervisor.start(command)
        if options.ps:
            supervisor.wait([_CHIEF])
            supervisor.wait([f"worker {index}" for index in range(options.workers)], _DRAIN_S)
        else:
            supervisor.wait(everyone)
            if supervisor.failed and not interrupts.received:
                together = supervisor.failed.code in _COLLECTIVE_EXITS
                supervisor.settle(_SETTLE_S if together else _SAME_FAILURE_WAIT_S if options.min_workers else 0.0)
    finally:
        for label in supervisor.end_stopped():
            say(f"{label} was stopped (SIGSTOP) and did not answer: killed")
        # The chief needs the others to end its last steps and to save.
        first = [_CHIEF] if options.ps and not supervisor.failed else []
        supervisor.stop(interrupts.to_pass_on, options.grace_period, first=first)
    return supervisor.first_failure(consequences=(exit_codes.PEER_LOST,), final=_NOT_RETRIED)


def _lost_port(failed: Process) -> bool:
    return any(_BIND_ERROR in line for line in failed.channel.recent)


def commands(options: LaunchOptions, environ: Mapping[str, str], gpus: Sequence[str]) -> list[Command]:
    """The processes of a cluster, on ports that are free now.

    Args:
      options: Which cluster.
      environ: The environment variables that all share.
      gpus: CUDA_VISIBLE_DEVICES of every worker; empty where there is no GPU.
    """
    ports = iter(free_ports(sum(options.jobs.values())))
    addresses = {job: tuple(f"127.0.0.1:{next(ports)}" for _ in range(count)) for job, count in options.jobs.items()}
    # Every process would take all cores for itself. TensorFlow 2.21 reads this variable where the program sets no
    # number of threads (measured: it sizes the pool of each CPU device, which XLA's kernels run on too).
    threads = max(1, cores() // sum(options.jobs.values()))
    # Where there are parameter servers, not all processes compute at the same time.
    own_cores = [] if options.ps or options.share_cores else share_out(options.workers)
    shared = {"TF_NUM_INTRAOP_THREADS": str(threads), **environ, **huge_pages(environ), **listed(own_cores)}
    made = []
    for job, tasks in addresses.items():
        for index in range(len(tasks)):
            info, label = ClusterInfo("local", addresses, job, index), f"{job} {index}"
            own = {**shared, "TF_CONFIG": tf_config_json(info)}
            if gpus:
                own["CUDA_VISIBLE_DEVICES"] = gpus[index] if job == "worker" else NO_GPU
            if len(set(gpus)) < len(gpus) and gpus[0] != NO_GPU:
                own[exit_codes.SHARED_GPUS] = "1"
                own.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # by default a process takes all memory of a GPU
            arguments = [sys.executable, "-u", *options.command]
            made.append(
                Command(
                    label=label,
                    arguments=arguments,
                    environ=own,
                    log=options.log(label),
                    live=info.is_chief,
                    cores=own_cores[index] if own_cores else (),
                )
            )
    return made


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports that are currently free.

    They are below the range from which the system takes the ports of outgoing connections, so that a peer's connection
    cannot take one before TensorFlow binds it. (An open port cannot be passed on: TensorFlow's server binds without
    SO_REUSEPORT.)
    """
    try:
        first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        first_ephemeral = 32768
    generator = random.SystemRandom()  # not seeded: launchers started together must not draw the same
    ports: list[int] = []
    with contextlib.ExitStack() as sockets:
        while len(ports) < count:
            holder = sockets.enter_context(socket.socket())
            roomy = first_ephemeral >= 16384 and len(ports) < 4096
            with contextlib.suppress(OSError):
                holder.bind(("", generator.randrange(10240, first_ephemeral) if roomy else 0))
                ports.append(holder.getsockname()[1])
    return ports


def parse(argv: Sequence[str], program: str = _PROGRAM) -> LaunchOptions:
    """The options of a command line of the program; a wrong one is an error message and exit code 2."""
    parser = Parser(
        prog=program,
        usage=f"{program} --workers=N [--ps=K] [FLAGS] -- SCRIPT [SCRIPT FLAGS]",
        description=(__doc__ or "").partition("\n\n")[2],
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--workers", type=int, metavar="N", help="processes that train; required")
    add("--ps", type=int, default=0, metavar="K", help="parameter servers; adds a chief (default: 0)")
    add("--max_restarts", type=int, default=0, metavar="R", help="number of restarts after a failure (default: 0)")
    add("--min_workers", type=int, default=0, metavar="M", help="restart without failing workers, down to M (0: off)")
    add("--restart_delay", type=float, metavar="S", help="seconds before the first restart (default: 1)")
    add("--grace_period", type=float, default=30.0, metavar="S", help="seconds from SIGTERM to SIGKILL (default: 30)")
    add("--share_cores", action="store_true", help="let every worker use all cores (default: each has its own)")
    add("--share_gpus", action="store_true", help="let several workers use a GPU where there are fewer than workers")
    add("--log_dir", type=Path, metavar="DIR", help="also write the output of each process to DIR/worker_0.log, ...")
    add("--hosts", type=Path, metavar="FILE", help="print the command for each host in FILE, and start nothing")
    split = argv.index("--") if "--" in argv else len(argv)
    parser.arguments = argv[:split]
    values = parser.parse_args(argv[:split])
    if values.hosts:
        given = [name for name, value in vars(values).items() if value != parser.get_default(name) and name != "hosts"]
        if given:
            parser.error(f"--hosts starts nothing and counts workers from its file: leave out --{', --'.join(given)}.")
        values.workers = 1
    if values.workers is None:
        parser.error("how many processes? Give --workers=N, e.g. --workers=2.")
    check_numbers(parser, values)
    if values.restart_delay is None:
        values.restart_delay = LaunchOptions.restart_delay
    command = tuple(argv[split + 1 :])
    if not command:
        parser.error(f"no script. Put it after --, as in `{program} --workers=2 -- train.py --steps=100`.")
    if command[0] == "tfpar":  # the console command, which need not be on the PATH
        command = ("-m", *command)
    problem = script_problem(command) or (values.log_dir and unwritable("--log_dir", values.log_dir))
    if problem:
        parser.error(problem)
    return LaunchOptions(command=command, **vars(values))


def main(argv: Sequence[str] | None = None, program: str = _PROGRAM) -> int:
    """The command line; returns the exit code.

    Args:
      argv: What follows the program's name; by default from this process.
      program: How a user calls it.
    """
    options = parse(sys.argv[1:] if argv is None else argv, program)
    try:
        if options.hosts is None:
            return run(options)
        print(hosts.text(hosts.read(options.hosts), options.command))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_codes.USAGE_ERROR
    return 0
