"""A cluster of several machines from a host file: what to run on each of them. Starts nothing."""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from tfpar.cluster.info import ClusterInfo, tf_config_json
from tfpar.config import ConfigError
from tfpar.process.heap import huge_pages

FIRST_PORT = 2222  # as in TensorFlow's own examples
# What the launcher gives its own workers, unless the host has a value of its own.
_HUGE_PAGES = " ".join(f"{name}=${{{name}:-{value}}}" for name, value in huge_pages({}).items())
_LINE = re.compile(r"(?P<host>\[[^\]\s]+\]|[^\s:\[\]]+)(?::(?P<port>\d+))?(?:\s+slots=(?P<slots>\d+))?")


def read(path: Path) -> list[list[str]]:
    """The addresses of a host file.

    Each line is `host[:port] [slots=N]`; `#` begins a comment. A host has N workers, by default one, on consecutive
    ports from the one given on, by default the first from 2222 that no line above uses. Lines of the same host add up,
    as in the files of PBS, which name a host once for each of its workers.

    Args:
      path: The file.

    Returns:
      For each host, in the order of their first lines, the addresses of its workers, `host:port`.

    Raises:
      ConfigError: The file cannot be read, is empty, or has a line that is none of these.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hosts={path}: cannot be read ({error}). Name a file with a host per line.") from error
    hosts: dict[str, list[str]] = {}
    used: set[tuple[str, int]] = set()
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        where = f"--hosts={path}, line {number}: {text!r}"
        match = _LINE.fullmatch(text)
        if match is None:
            raise ConfigError(f"{where} is not `host[:port] [slots=N]`, as in `10.0.0.1:2222 slots=2`.")
        host, slots = match["host"], int(match["slots"] or 1)
        _check_host(where, host)
        if slots < 1:
            raise ConfigError(f"{where}: slots must be at least 1. Leave the line out for a host without workers.")
        first = int(match["port"] or max((port for name, port in used if name == host), default=FIRST_PORT - 1) + 1)
        ports = range(first, first + slots)
        if not 0 < ports[0] <= ports[-1] < 65536:
            raise ConfigError(f"{where}: needs ports {ports[0]} to {ports[-1]}, which must lie within 1 to 65535.")
        taken = [port for port in ports if (host, port) in used]
        if taken:
            raise ConfigError(f"{where}: port {taken[0]} of {host} is used by a line above. Give each its own ports.")
        used |= {(host, port) for port in ports}
        hosts.setdefault(host, []).extend(f"{host}:{port}" for port in ports)
    if not hosts:
        raise ConfigError(f"--hosts={path}: no host in it. Write one per line, as in `10.0.0.1:2222 slots=2`.")
    return list(hosts.values())


def commands(hosts: Sequence[Sequence[str]], command: Sequence[str]) -> list[str]:
    """One shell command per host; it ends when all workers there have, with the exit code of one that failed.

    Worker i of a host with several gets GPU i, through CUDA_VISIBLE_DEVICES, and its part of the cores' number as
    TF_NUM_INTRAOP_THREADS. All get huge pages. Ctrl-C, a closed terminal, and SIGTERM to the processes of the command
    ask all of them to end, as SIGTERM does.

    Args:
      hosts: From `read`.
      command: The script or `-m module`, and its flags.
    """
    addresses = tuple(address for workers in hosts for address in workers)
    program = shlex.join(["python", "-u", *command])
    made, index = [], 0
    for workers in hosts:
        lines = []
        for slot in range(len(workers)):
            config = tf_config_json(ClusterInfo(f"--hosts, {workers[slot]}", {"worker": addresses}, "worker", index))
            gpu = f"CUDA_VISIBLE_DEVICES={slot} " if len(workers) > 1 else ""
            lines.append(f"TF_CONFIG={shlex.quote(config)} {gpu}{program}")
            index += 1
        made.append(_command_of_host(lines))
    return made


def _command_of_host(lines: Sequence[str]) -> str:
    """One shell command that runs the commands of the workers of a host at the same time."""
    started = " ".join(f"{line} & w{slot}=$!;" for slot, line in enumerate(lines))
    all_workers = " ".join(f"$w{slot}" for slot in range(len(lines)))
    # A shell without job control has background processes ignore Ctrl-C, and passes no signal on. They ignore SIGHUP as
    # well, which a closed terminal sends to all of them, and which would end them before they have saved. A signal ends
    # `wait` before the worker has ended, with a code above 128, as a worker's own may be: then another `wait` has the
    # worker's, or 127 if the shell has told it already.
    passed_on = f"trap 'kill {all_workers} 2>/dev/null' INT TERM HUP;"
    once_more = "wait $w; c=$?; [ $c = 127 ] || own=$c;"
    again = f"gone=; kill -0 $w 2>/dev/null || gone=1; {once_more} [ $gone ] && break;"
    one_ended = f"wait $w; own=$?; while [ $own -gt 128 ]; do {again} done; [ $own = 0 ] || code=$own;"
    ended = f"for w in {all_workers}; do {one_ended} done;"
    shared = f"export {_HUGE_PAGES}"
    if len(lines) > 1:  # in each worker TensorFlow would start a thread for every core
        # `nproc` counts the cores of the host, but follows the variables of OpenMP (GNU coreutils 9.1).
        threads = f"$(( ($(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) + {len(lines) - 1}) / {len(lines)} ))"
        shared += f" TF_NUM_INTRAOP_THREADS=${{TF_NUM_INTRAOP_THREADS:-{threads}}}"
    return f"( code=0; trap '' HUP; {shared}; {started} {passed_on} {ended} exit $code )"


def text(hosts: Sequence[Sequence[str]], command: Sequence[str]) -> str:
    """What `--hosts` prints: for each host a comment, and a command to copy."""
    workers = sum(map(len, hosts))
    where = "Run each command on its host, in a directory with the same content as this one, in tfpar's environment."
    parts = [f"# {workers} worker{'s' * (workers > 1)}. {where}"]
    first = 0
    for addresses, line in zip(hosts, commands(hosts, command), strict=True):
        last = first + len(addresses) - 1
        which = f"worker {first}" if last == first else f"workers {first} to {last}"
        parts.append(f"\n# {addresses[0].rpartition(':')[0]}: {which}\n{line}")
        first = last + 1
    return "\n".join(parts)


def _check_host(where: str, host: str) -> None:
    if host.startswith("["):
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError as error:
            raise ConfigError(f"{where}: {host} is no IPv6 address ({error}).") from error
