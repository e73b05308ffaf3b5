"""`metrics.csv`: the points of TensorBoard as a table, for those who read it with a spreadsheet or pandas."""

from __future__ import annotations

import csv
import io
import itertools
import logging
import os
import pathlib
import time
from collections.abc import Mapping

from tfpar.process.whole_files import replace_file

FILE = "metrics.csv"
_FIRST = ("step", "run", "seconds")
_log = logging.getLogger(__name__)


class MetricsTable:
    """Appends a row per point: `step`, `run` (`train` or `eval`), `seconds` since 1970, and a column per chart.

    A column that is new needs another header: the file is then written again, and put in place of the old one at once.
    A cell is empty where a point has no such value. What cannot be written is lost, with one warning. A file that is no
    such table, such as one that a spreadsheet has saved with semicolons, is moved aside.

    Args:
      workdir: The run's directory.
      name: The name of the file.

    Attributes:
      failures: Why rows could not be written; empty or one line.
    """

    def __init__(self, workdir: str | os.PathLike[str], name: str = FILE) -> None:
        self.failures: list[str] = []
        self._path = pathlib.Path(workdir) / name
        self._columns: list[str] = []

    def begin(self, step: int) -> None:
        """Continues the table of a run that is resumed at `step`: later rows, which are made again, are removed."""
        try:
            rows = self._read() if step > 0 else []  # at the beginning nothing of an earlier run counts
            kept = [row for row in rows if row["step"].isdecimal() and int(row["step"]) <= step]
            if self._path.exists():
                self._write(kept)
        except (OSError, ValueError) as error:
            self._report(error)

    def append(self, run: str, step: int, values: Mapping[str, float]) -> None:
        """Adds a row.

        Args:
          run: `train` or `eval`.
          step: Finished steps.
          values: By name of the chart.
        """
        if self.failures:
            return
        row = {"step": str(step), "run": run, "seconds": f"{time.time():.3f}"}
        row |= {name: repr(float(value)) for name, value in values.items()}
        try:
            if not row.keys() <= set(self._columns):
                rows = self._read()
                self._columns += [name for name in row if name not in self._columns]
                self._write([*rows, row])
            else:
                with self._path.open("a", encoding="utf-8", newline="") as file:
                    file.write(self._lines([row]))
        except OSError as error:
            self._report(error)

    def _read(self) -> list[dict[str, str]]:
        """The rows of the file, without a last one that is not whole; takes over its columns."""
        if not self._path.exists():
            return []
        try:
            text = self._path.read_text(encoding="utf-8-sig")  # spreadsheets put a byte order mark before the header
            whole = text[: text.rfind("\n") + 1]
            rows = list(csv.DictReader(io.StringIO(whole)))
        except (csv.Error, UnicodeDecodeError) as error:
            self._move_aside(str(error))
            return []
        if rows and "step" not in rows[0]:
            self._move_aside("its header has no `step`; a spreadsheet may have saved it with other separators")
            return []
        self._columns += [name for name in (rows[0] if rows else ()) if name not in self._columns]
        # Cells beyond the header have no name.
        return [{name: value or "" for name, value in row.items() if name in self._columns} for row in rows]

    def _move_aside(self, reason: str) -> None:
        numbers = itertools.count(1)
        aside = next(path for n in numbers if not (path := self._path.with_name(f"{self._path.name}.{n}")).exists())
        self._path.rename(aside)
        _log.warning(
            "%s is no table of this run (%s): moved to %s, and a new table begins", self._path.name, reason, aside.name
        )

    def _write(self, rows: list[dict[str, str]]) -> None:
        columns = [*_FIRST, *(name for name in self._columns if name not in _FIRST)]
        self._columns = columns
        self._path.parent.mkdir(parents=True, exist_ok=True)
        header = dict(zip(columns, columns, strict=True))
        replace_file(self._path, self._lines([header, *rows]).encode())

    def _lines(self, rows: list[dict[str, str]]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self._columns, restval="", lineterminator="\n").writerows(rows)
        return text.getvalue()

    def _report(self, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        self.failures.append(f"{self._path.name}: {reason}")
        _log.warning("%s cannot be written (%s); training continues without it", self._path.name, reason)
