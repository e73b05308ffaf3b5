"""Messages through `logging`: what the terminal shows, and how a user sets a level, redirects and silences them."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import subprocess
import sys
import time

from tests.integration.test_multi_worker import ROOT
from tfpar.monitor.progress import Progress
from tfpar.process import logs
from tfpar.process.activity import activity

import pytest

pytestmark = pytest.mark.without_keras

LOG = logging.getLogger("tfpar.some.module")
PROGRAM = """
import logging
import tfpar
log = logging.getLogger("tfpar.some.module")
for number in range(3):
    log.warning("x" * 9000)
log.error("worker 1 is lost")
"""

CONFIGURED = """
import logging.config
import tfpar
handlers = {"plain": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}}
loggers = {"tfpar": {"handlers": ["plain"], "level": "WARNING"}}
logging.config.dictConfig({"version": 1, "handlers": handlers, "loggers": loggers})
log = logging.getLogger("tfpar.some.module")
log.info("step 1")
log.warning("the disk is full")
log.error("worker 1 is lost")
"""


@pytest.fixture(autouse=True)
def logger():
    """The logger of the package, as importing it leaves it."""
    logs.install()
    logger = logging.getLogger("tfpar")
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    logger.handlers[:] = [handler for handler in handlers if isinstance(handler, logs.ConsoleHandler)]  # not pytest's
    yield logger
    logger.setLevel(level)
    logger.propagate, logger.handlers[:] = propagate, handlers


def log_all() -> None:
    LOG.debug("a detail")
    LOG.info("step 100%% of %d", 3)
    LOG.info("a text with a % sign\nof two lines")
    LOG.log(logs.NOTE, "the port is open")
    LOG.warning("the disk is full")
    LOG.error("worker 1 is lost")


def test_the_terminal_shows_bare_messages_and_prefixes_by_level(capsys):
    log_all()
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "step 100% of 3",
        "a text with a % sign",
        "of two lines",
        "note: the port is open",
        "WARNING: the disk is full",
    ]
    assert shown.err == "error: worker 1 is lost\n"


def test_a_level_hides_what_is_below_it(capsys, logger):
    logger.setLevel(logging.WARNING)
    log_all()
    assert capsys.readouterr() == ("WARNING: the disk is full\n", "error: worker 1 is lost\n")
    logger.setLevel(logging.DEBUG)
    log_all()
    assert capsys.readouterr().out.startswith("a detail\n")


def test_it_can_be_redirected(capsys, logger, tmp_path):
    handler = logging.FileHandler(tmp_path / "train.log")
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    logger.addHandler(handler)
    LOG.info("to both")
    assert capsys.readouterr() == ("to both\n", "")
    logger.handlers[:] = [handler]
    log_all()
    handler.close()
    assert capsys.readouterr() == ("", "")
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert "NOTE tfpar.some.module the port is open" in lines
    assert "ERROR tfpar.some.module worker 1 is lost" in lines


def test_it_can_be_silenced(capsys, logger):
    logger.handlers[:] = [logging.NullHandler()]
    log_all()
    assert capsys.readouterr() == ("", "")


def test_dict_config_replaces_the_default_handlers():
    result = subprocess.run([sys.executable, "-c", CONFIGURED], capture_output=True, text=True, cwd=ROOT, check=True)
    assert (result.stdout, result.stderr) == ("the disk is full\nworker 1 is lost\n", "")


def test_the_root_logger_gets_messages_only_when_asked(capsys, logger):
    root, lines = logging.Handler(), []
    root.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger().addHandler(root)
    try:
        LOG.info("once")
        logger.propagate = True
        LOG.info("twice")
    finally:
        logging.getLogger().removeHandler(root)
    assert lines == ["twice"]
    assert capsys.readouterr().out == "once\ntwice\n"


@pytest.mark.parametrize("configured", [False, True])
def test_installing_respects_what_the_user_has_set(logger, configured):
    own = logging.NullHandler()
    logger.handlers[:] = [own] if configured else []
    logger.setLevel(logging.ERROR if configured else logging.NOTSET)
    logger.propagate = True
    for _ in range(2):
        logs.install()
    assert logger.level == (logging.ERROR if configured else logging.INFO)
    assert logger.propagate == configured
    assert len(logger.handlers) == (1 if configured else 2)


@pytest.mark.parametrize(
    ("verbosity", "level"),
    [(1, logging.DEBUG), (0, logging.INFO), (-1, logging.WARNING), (-2, logging.ERROR), (-3, logging.CRITICAL)],
)
def test_verbosity_of_absl(logger, verbosity, level):
    logs.set_absl_verbosity(verbosity)
    assert logger.level == level


def test_a_live_line_is_cleared_before_a_message_and_drawn_again(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    progress = Progress(10, live=True)
    progress.update(5, {"loss": "0.5"})
    line = terminal.getvalue().removeprefix("\r")
    assert line.startswith("step  5/10")
    LOG.warning("the disk is full")
    expected = f"\r{line}\r{' ' * len(line)}\rWARNING: the disk is full\n\r{line}"
    assert terminal.getvalue() == expected
    with contextlib.redirect_stdout(io.StringIO()) as elsewhere:
        LOG.info("not on the terminal")
    assert (elsewhere.getvalue(), terminal.getvalue()) == ("not on the terminal\n", expected)
    progress.close()
    LOG.info("done")
    assert terminal.getvalue() == f"{expected}\ndone\n"


@pytest.mark.parametrize("live", [False, True])
def test_a_level_hides_the_progress_too(capsys, logger, live):
    logger.setLevel(logging.WARNING)
    progress = Progress(10, live=live)
    progress.update(10, {"loss": "0.5"})
    progress.close()
    assert capsys.readouterr().out == ""
    logger.setLevel(logging.INFO)
    Progress(10, live=live).update(10, {"loss": "0.5"})
    assert capsys.readouterr().out.strip().startswith("step 10/10")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("handlers", ["default", "others"])
def test_without_the_handlers_of_the_terminal_no_live_line_is_drawn(monkeypatch, logger, handlers):
    monkeypatch.setattr(sys, "stdout", _Terminal())
    if handlers == "others":
        logger.handlers[:] = [logging.NullHandler()]
    Progress(10).update(10, {"loss": "0.5"})
    with activity("thinking", shown=True):
        time.sleep(0.8)  # the first sign comes after half a second
    assert [word in sys.stdout.getvalue() for word in ("step", "thinking")] == 2 * [handlers == "default"]


def test_another_line_stays_attached_when_an_older_one_ends(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    first, second = Progress(10, live=True), Progress(10, live=True)
    first.update(5, {})
    second.update(5, {})
    first.close()
    assert logs.live_line() is second._terminal
    second.close()
    assert logs.live_line() is None


def test_a_full_disk_ends_no_program():
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
        )
    assert (result.returncode, result.stderr) == (0, "error: worker 1 is lost\n")


def test_a_reader_that_has_gone_ends_no_program():
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "error: worker 1 is lost\n")
