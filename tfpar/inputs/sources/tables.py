"""`csv:PATTERN` and `parquet:PATTERN`: tables whose rows are examples, kept in memory by column.

pyarrow reads the files (`pip install 'tfpar[tables]'`). The part of `--dataset` after a question mark gives the roles
of the columns: `csv:/data/*.csv?label=price&columns=rooms,city&fill=rooms:0`.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import itertools
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from tfpar.config import ConfigError, InputConfig, unknown_name
from tfpar.inputs.source import Source
from tfpar.inputs.sources.arrays import from_arrays
from tfpar.inputs.sources.columns import tables as table_columns
from tfpar.inputs.sources.columns.tables import Columns

import numpy as np

_STRINGS = ("text", "index")
_LAYOUTS = ("dict", "vector")
_OPTIONS = ("label", "columns", "weight", "as", "strings", "fill", "validation", "delimiter")
_LISTS = ("label", "columns", "fill")
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def from_table(
    table: Any,
    *,
    label: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    weight: str | None = None,
    layout: str = "dict",
    strings: str = "text",
    fill: Mapping[str, Any] | None = None,
    categories: Mapping[str, Sequence[str]] | None = None,
    delimiter: str | None = None,
    split: str = "train",
    name: str = "table",
    on_bad_record: str = "fail",
) -> Source:
    """Returns a source over the rows of a table, kept in memory.

    Args:
      table: A path or pattern of CSV or Parquet files (by their suffix), several paths, a `pyarrow.Table`, or a data
        frame that pyarrow can read (pandas, polars).
      label: The column of the label: integers, booleans and strings are classes, floating-point numbers targets. Or
        several columns, for a dict of labels; None for no label.
      columns: Columns that are inputs; by default all others. The index of a pandas frame is none of them, unless it is
        named here.
      weight: The column of the sample weights, or None.
      layout: `"dict"` for a dict of one input per column, `"vector"` for one float vector of the numeric columns.
      strings: `"text"` gives columns of strings to the model as `tf.string`, `"index"` as positions among the sorted
        categories.
      fill: Values for missing entries, by column; missing entries of other columns are refused.
      categories: Categories of columns of strings, by column; by default those that occur, sorted.
      delimiter: The character between the fields of CSV files; by default a tab in `.tsv` files, a comma in others.
      split: `"train"` or `"validation"`, for reports.
      name: For reports and errors.
      on_bad_record: What to do with values that are NaN or infinite: `"fail"` or `"skip"`.

    Raises:
      ConfigError: A file is missing or is not a table, a column is missing or has an unsupported type, an entry is
        missing, a category is unknown, or pyarrow is not installed.
    """
    used = Columns(
        label=(label,) if isinstance(label, str) else tuple(label or ()),
        single_label=isinstance(label, str),
        inputs=None if columns is None else tuple(columns),
        weight=weight,
        layout=_checked("layout", layout, _LAYOUTS),
        strings=_checked("strings", strings, _STRINGS),
        fill=dict(fill or {}),
        categories=dict(categories or {}),
    )
    rows, files = _read(name, table, delimiter, used)
    return _source(name, rows, files, used, split, on_bad_record)


def build_csv(argument: str, config: InputConfig, split: str, seed: int) -> Source:
    """`--dataset=csv:PATTERN?label=COLUMN`: see `build`."""
    return build("csv", argument, config, split)


def build_parquet(argument: str, config: InputConfig, split: str, seed: int) -> Source:
    """`--dataset=parquet:PATTERN?label=COLUMN`: see `build`."""
    return build("parquet", argument, config, split)


def build(kind: str, argument: str, config: InputConfig, split: str) -> Source:
    """`--dataset=csv:PATTERN?OPTION=VALUE&...`, or `parquet:`.

    Options: `label=COLUMN[,COLUMN]`, `columns=COLUMN,...`, `weight=COLUMN`, `as=dict|vector`, `strings=text|index`,
    `fill=COLUMN:VALUE,...`, `validation=PATTERN` (files of validation examples; otherwise `--validation_fraction` of
    the rows is held out, by their hashed numbers), `delimiter=;`. In a value, write `%26` for an `&`, `%25` for a `%`,
    `%09` for a tab; in a name, `%2C` for a comma.

    Args:
      kind: `"csv"` or `"parquet"`.
      argument: The text after the colon.
      config: The input options; uses `validation_fraction` and `on_bad_record`.
      split: `"train"` or `"validation"`.

    Raises:
      ConfigError: An option is unknown; also for the reasons of `from_table`.
    """
    name = f"{kind}:{argument}"
    pattern, options = _parse(name, argument)
    used = _columns_of(name, options)
    delimiter = options.get("delimiter")
    read = functools.partial(_read_files, f"--dataset={name}", kind=kind, delimiter=delimiter, used=used)
    rows, files = read(_paths(f"--dataset={name}", pattern))
    if "validation" in options:
        other_rows, other_files = read(_paths(f"--dataset={name}", options["validation"]))
        rows, other_rows = table_columns.with_common_types(rows, other_rows, used)
    else:
        held = _held_out(rows.num_rows, round(rows.num_rows * config.validation_fraction))
        other_rows, other_files = _filtered(rows, files, held)
        rows, files = _filtered(rows, files, ~held)
    used = table_columns.with_categories(f"--dataset={name}", used, [rows, other_rows])
    chosen = (rows, files) if split == "train" else (other_rows, other_files)
    return _source(name, *chosen, used, split, config.on_bad_record)


@dataclasses.dataclass(frozen=True)
class _Files:
    """Paths and the number of rows of each."""

    paths: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()


def _source(name: str, rows: Any, files: _Files, used: Columns, split: str, on_bad_record: str) -> Source:
    used = table_columns.with_categories(name, used, [rows])
    arrays = table_columns.to_arrays(name, rows, used)
    source = from_arrays(
        arrays.x,
        arrays.y,
        sample_weight=arrays.weight,
        num_classes=arrays.num_classes,
        split=split,
        name=name,
        on_bad_record=on_bad_record,
    )
    info = dataclasses.replace(
        source.info, class_names=arrays.class_names, files=files.paths, records_per_file=files.rows
    )
    return dataclasses.replace(source, info=info)


def _parse(name: str, argument: str) -> tuple[str, dict[str, str]]:
    """Returns the pattern and the options after the last question mark, decoded but for lists: commas divide them."""
    pattern, mark, query = argument.rpartition("?")
    if not mark or "=" not in query:
        return argument, {}
    options = {}
    for part in query.split("&"):
        key, _, value = part.partition("=")
        if key not in _OPTIONS:
            raise unknown_name(f"--dataset={name}: option", key, _OPTIONS)
        options[key] = value if key in _LISTS else urllib.parse.unquote(value)
    return pattern, options


def _columns_of(name: str, options: Mapping[str, str]) -> Columns:
    names = {key: _names(options.get(key, "")) for key in ("label", "columns")}
    fill: dict[str, Any] = {}
    for part in filter(None, options.get("fill", "").split(",")):
        column, colon, value = part.partition(":")
        if not colon:
            raise ConfigError(f"--dataset={name}: fill={part} is not COLUMN:VALUE. Write e.g. fill=age:0,city:unknown.")
        fill[urllib.parse.unquote(column)] = urllib.parse.unquote(value)
    return Columns(
        label=names["label"],
        single_label=len(names["label"]) == 1,
        inputs=names["columns"] or None,
        weight=options.get("weight") or None,
        layout=_checked(f"--dataset={name}: as", options.get("as", "dict"), _LAYOUTS),
        strings=_checked(f"--dataset={name}: strings", options.get("strings", "text"), _STRINGS),
        fill=fill,
        categories={},
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(urllib.parse.unquote(part) for part in text.split(",") if part)


def _checked(what: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise unknown_name(what, value, allowed)
    return value


def _read(name: str, table: Any, delimiter: str | None, used: Columns) -> tuple[Any, _Files]:
    """Returns a `pyarrow.Table` and the files it comes from."""
    pyarrow = _pyarrow(name)
    if isinstance(table, pyarrow.Table):
        return table_columns.without_index(table, used), _Files()
    if isinstance(table, (str, os.PathLike)) or (
        isinstance(table, (list, tuple)) and table and all(isinstance(path, (str, os.PathLike)) for path in table)
    ):
        patterns = [table] if isinstance(table, (str, os.PathLike)) else table
        paths = [path for pattern in patterns for path in _paths(name, os.fspath(pattern))]
        kind = "csv" if all(path.lower().endswith((".csv", ".tsv", ".txt")) for path in paths) else "parquet"
        return _read_files(name, paths, kind=kind, delimiter=delimiter, used=used)
    try:
        return table_columns.without_index(pyarrow.table(table), used), _Files()
    except (TypeError, ValueError, pyarrow.ArrowInvalid) as error:
        raise ConfigError(
            f"{name}: {type(table).__name__} is not a table: {error}. Give paths of CSV or Parquet files, a "
            "pyarrow.Table or a data frame."
        ) from error


def _read_files(
    name: str, paths: Sequence[str], *, kind: str, delimiter: str | None, used: Columns
) -> tuple[Any, _Files]:
    pyarrow = _pyarrow(name)
    from pyarrow import csv, parquet  # type: ignore[import-untyped]

    if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii()):
        raise ConfigError(f"{name}: delimiter={delimiter!r} must be one ASCII character.")
    tables: list[Any] = []
    for path in paths:
        try:
            if kind == "csv":
                between = delimiter or ("\t" if path.lower().endswith(".tsv") else ",")
                tables.append(csv.read_csv(path, parse_options=csv.ParseOptions(delimiter=between)))
            else:
                tables.append(table_columns.without_index(parquet.read_table(path), used))
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise ConfigError(f"{name}: {path!r} cannot be read as {kind}: {error}") from error
        try:
            names = tables[-1].column_names
        except UnicodeDecodeError as error:
            raise ConfigError(f"{name}: {path!r} is not in UTF-8: {error}. Convert it, e.g. with iconv.") from error
        table_columns.check_names(f"{name}: {path!r}", names)  # they could not be joined
        if names != tables[0].column_names:
            raise ConfigError(
                f"{name}: {path!r} has the columns {names}, but {paths[0]!r} has "
                f"{tables[0].column_names}. All files need the same columns in the same order."
            )
    try:
        joined = pyarrow.concat_tables(tables, promote_options="permissive")
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
        raise ConfigError(f"{name}: the files have columns of different types: {error}") from error
    if kind == "csv":  # which cannot tell a missing string from an empty one
        joined = table_columns.with_empty_as_missing(joined, {*used.label, *used.fill})
    files = _Files(tuple(paths), tuple(table.num_rows for table in tables))
    table_columns.check_missing(name, joined, used, dict(zip(files.paths, files.rows, strict=True)))
    return joined, files


def _paths(name: str, pattern: str) -> list[str]:
    expanded = os.path.expanduser(pattern)
    paths = [expanded] if os.path.isfile(expanded) else sorted(glob.glob(expanded, recursive=True))
    paths = [path for path in paths if os.path.isfile(path)]
    if not pattern or not paths:
        raise ConfigError(f"{name}: no file matches {pattern!r}. Give a path or a pattern such as csv:/data/*.csv.")
    return paths


def _pyarrow(name: str) -> ModuleType:
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(f"{name}: tables need pyarrow. Install it: pip install 'tfpar[tables]'.") from error
    return pyarrow


def _held_out(count: int, held: int) -> np.ndarray:
    """Returns which rows are held out: the `held` rows whose numbers have the lowest hashes (SplitMix64), bool [n]."""
    with np.errstate(over="ignore"):
        hashed = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        hashed = (hashed ^ (hashed >> np.uint64(30))) * _MIX[0]
        hashed = (hashed ^ (hashed >> np.uint64(27))) * _MIX[1]
        hashed ^= hashed >> np.uint64(31)
    mask = np.zeros(count, bool)
    mask[np.argsort(hashed, kind="stable")[:held]] = True
    return mask


def _filtered(rows: Any, files: _Files, mask: np.ndarray) -> tuple[Any, _Files]:
    """Returns the rows of a table where the mask is True, and how many of them are in each file."""
    bounds = np.cumsum([0, *files.rows])
    counts = tuple(int(mask[low:high].sum()) for low, high in itertools.pairwise(bounds))
    return rows.take(np.flatnonzero(mask)), _Files(files.paths, counts)
