"""Commands for several machines, from a host file."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

from tfpar.config import ConfigError
from tfpar.launch import cli, hosts

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALL_REDUCE = str(ROOT / "tests" / "integration" / "scripts" / "all_reduce.py")


def file(tmp_path: Path, content: str) -> Path:
    path = tmp_path / "hosts.txt"
    path.write_text(content)
    return path


def test_hosts_slots_and_ports(tmp_path):
    content = "# ours\n\nnode-a:5000 slots=2  # two GPUs\nnode-b\n[fd00::1]:7000\nnode-b slots=2\n10.0.0.9\tslots=1\n"
    assert hosts.read(file(tmp_path, content)) == [
        ["node-a:5000", "node-a:5001"],
        ["node-b:2222", "node-b:2223", "node-b:2224"],
        ["[fd00::1]:7000"],
        ["10.0.0.9:2222"],
    ]


def test_a_host_on_several_lines_has_one_command_and_divides_its_gpus(tmp_path):
    """As in the files of PBS, which name a host once for each of its workers."""
    named = hosts.read(file(tmp_path, "node-a\nnode-b\nnode-a\n"))
    assert named == [["node-a:2222", "node-a:2223"], ["node-b:2222"]]
    first, second = hosts.commands(named, ["train.py"])
    assert [f"CUDA_VISIBLE_DEVICES={number} " in first for number in range(3)] == [True, True, False]
    assert "TF_NUM_INTRAOP_THREADS" in first
    assert "CUDA_VISIBLE_DEVICES" not in second


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no host in it"),
        ("# nothing\n", "no host in it"),
        ("a b", r"line 1: 'a b' is not `host\[:port\] \[slots=N\]`"),
        ("a\nb slots=two", "line 2"),
        ("a:b", "is not `host"),
        ("a slots=0", "slots must be at least 1"),
        ("a:65535 slots=2", "needs ports 65535 to 65536"),
        ("a:0", "needs ports 0 to 0"),
        ("a:7\na:6 slots=2", "port 7 of a is used by a line above"),
        ("[fd00::zz]", "is no IPv6 address"),
    ],
)
def test_files_that_are_refused(tmp_path, content, message):
    with pytest.raises(ConfigError, match=message):
        hosts.read(file(tmp_path, content))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts=none.txt", "--", ALL_REDUCE], "error: --hosts=none.txt: cannot be read"),
        (["--hosts=h", "--workers=2", "--ps=1", "--", ALL_REDUCE], "leave out --workers, --ps."),
        (["--hosts=h"], "no script. Put it after --"),
    ],
)
def test_wrong_command_lines(capsys, arguments, message):
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.cluster
@pytest.mark.parametrize("slots", [1, 2])
def test_the_printed_commands_run(tmp_path, slots):
    """On this machine, each as a shell of its own: two hosts, or one with two workers."""
    ports = cli.free_ports(1) if slots == 2 else cli.free_ports(2)
    names = ("127.0.0.1", "localhost")
    path = file(tmp_path, "".join(f"{name}:{port} slots={slots}\n" for name, port in zip(names, ports, strict=False)))
    (tmp_path / "marker").touch()
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    environ |= {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    arguments = [f"--hosts={path}", "--", ALL_REDUCE, str(tmp_path / "marker")]
    launch = [sys.executable, "-m", "tfpar.launch", *arguments]
    printed = subprocess.run(launch, capture_output=True, text=True, check=True, env=environ).stdout
    commands = [line for line in printed.splitlines() if line and not line.startswith("#")]
    assert len(commands) == 3 - slots
    running = [
        subprocess.Popen(["sh", "-c", line], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)
        for line in commands
    ]
    try:
        output = "".join(process.communicate(timeout=240)[0] for process in running)
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * len(commands), output
    assert output.count("replicas=2 sum=3") == 2


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"OMP_NUM_THREADS": "60", "OMP_THREAD_LIMIT": "50"},  # which `nproc` follows
        {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1", "TF_NUM_INTRAOP_THREADS": "9"},
    ],
)
@pytest.mark.parametrize("slots", [1, 3])
def test_workers_get_huge_pages_and_their_part_of_the_threads(tmp_path, slots, given):
    names = ["GLIBC_TUNABLES", "TF_NUM_INTRAOP_THREADS"]
    script = tmp_path / "shows.py"
    line = f"' '.join(str(os.environ.get(name)) for name in {names})"
    script.write_text(f"import os; os.write(1, ({line} + '\\n').encode())")  # at once: other workers write, too
    environ = {name: value for name, value in os.environ.items() if name not in names}
    environ |= given | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    (command,) = hosts.commands([[f"127.0.0.1:{2222 + slot}" for slot in range(slots)]], [str(script)])
    shown = subprocess.run(["sh", "-c", command], env=environ, check=True, capture_output=True, text=True).stdout
    cores = len(os.sched_getaffinity(0))
    threads = -(-cores // slots) if slots > 1 else None
    expected = " ".join(given[name] for name in names if name in given) or f"glibc.malloc.hugetlb=1 {threads}"
    assert shown.splitlines() == [expected] * slots


@pytest.mark.cluster
def test_a_host_of_several_workers_reports_a_failure(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import os, sys; sys.exit(int('index\": 1' in os.environ['TF_CONFIG']) * 7)")
    (command,) = hosts.commands([["127.0.0.1:2222", "127.0.0.1:2223", "127.0.0.1:2224"]], [str(script)])
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    assert subprocess.run(["sh", "-c", command], env=environ, check=False).returncode == 7


@pytest.mark.cluster
@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize(
    ("number", "end", "code"),
    [
        (signal.SIGHUP, "sys.exit(85)", 85),
        (signal.SIGINT, "sys.exit(85)", 85),
        (signal.SIGTERM, "sys.exit(85)", 85),
        (signal.SIGTERM, "sys.exit(0)", 0),
        (signal.SIGTERM, "os.kill(os.getpid(), signal.SIGKILL)", 137),
    ],
)
def test_a_signal_ends_all_workers_of_a_host(tmp_path, number, end, code, shell):
    """Ctrl-C goes to the whole group, of which a shell without job control has background processes ignore it."""
    assert _end_of_workers(tmp_path, number, end, shell, workers=2) == code


@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_single_worker_of_a_host_may_save_too(tmp_path, number):
    assert _end_of_workers(tmp_path, number, "sys.exit(85)", "sh", workers=1) == 85


def _end_of_workers(tmp_path, number, end, shell, *, workers):
    """The exit code of a host's command, whose workers take a while to end after SIGTERM."""
    script = tmp_path / "waits.py"
    lines = [
        "import os, signal, sys, time",
        f"signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), {end}))",
    ]
    script.write_text("\n".join([*lines, "os.write(1, b'up\\n')", "time.sleep(60)"]))
    (command,) = hosts.commands([[f"127.0.0.1:{2222 + slot}" for slot in range(workers)]], [str(script)])
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    started = [shell, "-c", f"trap : HUP INT TERM; {command}"]  # as one in which somebody types, it survives
    # A shell cannot trap what was ignored when it began, as SIGHUP is under nohup.
    heard = functools.partial(signal.signal, number, signal.SIG_DFL)
    running = subprocess.Popen(started, env=environ, stdout=subprocess.PIPE, start_new_session=True, preexec_fn=heard)
    try:
        assert [running.stdout.readline() for _ in range(workers)] == [b"up\n"] * workers
        os.killpg(running.pid, number)
        assert running.stdout.read() == b""  # once no worker has it open
        return running.wait(30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
