"""Columns of a table as arrays: types, missing entries, categories."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tfpar.config import ConfigError, unknown_name
from tfpar.inputs.structures import Structure

import numpy as np

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Columns:
    """The roles of a table's columns.

    Attributes:
      label: Columns of labels.
      single_label: Whether the label is one array rather than a dict.
      inputs: Columns that are inputs; None for all others.
      weight: The column of sample weights, or None.
      layout: `"dict"` or `"vector"`.
      strings: `"text"` or `"index"`, for columns of strings among the inputs.
      fill: Values for missing entries, by column.
      categories: Categories of columns of strings, by column.
      num_classes: Number of classes of an integer label, or None if it follows from the labels.
    """

    label: tuple[str, ...]
    single_label: bool
    inputs: tuple[str, ...] | None
    weight: str | None
    layout: str
    strings: str
    fill: Mapping[str, Any]
    categories: Mapping[str, Sequence[str]]
    num_classes: int | None = None


@dataclasses.dataclass(frozen=True)
class TableArrays:
    """A table as the arguments of `from_arrays`."""

    x: Structure
    y: Structure | None
    weight: np.ndarray | None
    num_classes: int | None
    class_names: tuple[str, ...]


def without_index(table: Any, used: Columns) -> Any:
    """Returns a table without the index of a data frame of pandas, unless a role names it.

    pyarrow keeps an index that is not a range as a column, e.g. after `sample`; the metadata say which one it is.
    The numbers of the rows would be an input that predicts nothing.

    Args:
      table: A `pyarrow.Table`.
      used: The roles of its columns.
    """
    index = (table.schema.pandas_metadata or {}).get("index_columns", ())
    named = {*used.label, used.weight, *(used.inputs or ())}
    # A range is not a column: the metadata describes it with a dict.
    left_out = [each for each in index if isinstance(each, str) and each in table.column_names and each not in named]
    return table.drop_columns(left_out) if left_out else table


def with_empty_as_missing(table: Any, columns: Collection[str]) -> Any:
    """Returns a table in which empty strings of some columns, which need not exist, are missing entries."""
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import compute

    for place, column in enumerate(table.column_names):
        values = table.column(place)
        if column in columns and _is_string(values) and not pyarrow.types.is_null(values.type):
            missing = pyarrow.scalar(None, values.type)
            table = table.set_column(place, column, compute.if_else(compute.equal(values, ""), missing, values))
    return table


def with_common_types(rows: Any, other_rows: Any, used: Columns) -> tuple[Any, Any]:
    """Returns two tables in which columns of one name have one type, where a type holds the values of both.

    A column of a CSV file that happens to have whole numbers alone is one of integers. The type of an integer label
    stays: it makes the label a class.

    Args:
      rows: The training examples (`pyarrow.Table`).
      other_rows: The validation examples.
      used: The roles of their columns.
    """
    import pyarrow

    for column in rows.column_names:
        if column not in other_rows.column_names:
            continue
        if column in used.label and pyarrow.types.is_integer(rows.column(column).type):
            continue
        both = [table.select([column]) for table in (rows, other_rows)]
        try:
            schema = pyarrow.unify_schemas([each.schema for each in both], promote_options="permissive")
            cast = [each.column(column).cast(schema.field(column).type) for each in both]
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError):
            continue  # an input whose types differ is refused when the specs of both splits are compared
        rows, other_rows = (
            table.set_column(table.column_names.index(column), column, values)
            for table, values in zip((rows, other_rows), cast, strict=True)
        )
    return rows, other_rows


def check_names(name: str, columns: Sequence[str]) -> None:
    """Refuses names that several columns have; `name` is the data set, for errors.

    Raises:
      ConfigError: Lists them.
    """
    if len(set(columns)) < len(columns):
        twice = sorted({column for column in columns if columns.count(column) > 1})
        raise ConfigError(f"{_title(name)}: the columns {twice} occur twice. Rename them.")


def check_missing(name: str, table: Any, used: Columns, files: Mapping[str, int]) -> None:
    """Refuses missing entries that have no fill value.

    Args:
      name: The data set, for errors.
      table: A `pyarrow.Table` of all rows of some files, in their order.
      used: The roles of its columns.
      files: The number of rows of each file by its path.

    Raises:
      ConfigError: An entry is missing, or a column.
    """
    inputs = _inputs(name, table, used)
    if used.layout == "vector":
        inputs = _numeric(table, inputs)
    for column in (*used.label, *filter(None, [used.weight]), *inputs):
        values = table.column(column)
        if values.null_count and column not in used.fill:
            raise _missing(name, column, values.combine_chunks(), files)


def with_categories(name: str, used: Columns, tables: Sequence[Any]) -> Columns:
    """Returns the columns with the categories, and the number of classes, that occur in some tables.

    Categories are sorted; columns that have some already keep them.

    Args:
      name: The data set, for errors.
      used: The columns.
      tables: Every table in which categories may occur (`pyarrow.Table`).

    Raises:
      ConfigError: A column is missing.
    """
    inputs = _inputs(name, tables[0], used)
    wanted = [*used.label, *(inputs if used.strings == "index" and used.layout == "dict" else ())]
    categories = dict(used.categories)
    for column in wanted:
        if column in categories or not _is_string(tables[0].column(column)):
            continue
        found: set[str] = set()
        for table in tables:
            values = _filled(name, table, column, used)
            found.update(values.unique().to_pylist())
        categories[column] = sorted(found)
    return dataclasses.replace(used, categories=categories, num_classes=_count_classes(used, tables))


def _count_classes(used: Columns, tables: Sequence[Any]) -> int | None:
    """Returns the largest integer label of all tables plus one, so that a class may be missing in one of them."""
    import pyarrow
    from pyarrow import compute

    if used.num_classes is not None or not used.single_label:
        return used.num_classes
    labels = [table.column(used.label[0]) for table in tables]
    if not all(pyarrow.types.is_integer(values.type) for values in labels):
        return None
    largest = [compute.max(values).as_py() for values in labels]
    return max([0, *(value for value in largest if value is not None)]) + 1


def to_arrays(name: str, table: Any, used: Columns) -> TableArrays:
    """Returns the inputs, labels and weights of a table.

    Args:
      name: The data set, for errors.
      table: A `pyarrow.Table`.
      used: The roles of its columns, with categories.

    Raises:
      ConfigError: A column is missing or has a type that is not supported, an entry is missing, or a category is
        unknown.
    """
    inputs = _inputs(name, table, used)
    labels = {column: _label(name, table, column, used) for column in used.label}
    weight = None if used.weight is None else _numbers(name, table, used.weight, used)
    class_names: tuple[str, ...] = ()
    num_classes = used.num_classes
    y: Structure | None = labels or None
    if used.single_label:
        y = labels[used.label[0]]
        class_names = tuple(used.categories.get(used.label[0], ()))
        num_classes = len(class_names) or num_classes
    x = _vector(name, table, inputs, used) if used.layout == "vector" else _features(name, table, inputs, used)
    return TableArrays(x, y, weight, num_classes, class_names)


def _inputs(name: str, table: Any, used: Columns) -> list[str]:
    """Returns the columns that are inputs; refuses names that the table does not have."""
    available = table.column_names
    check_names(name, available)
    named = [*used.label, *([used.weight] if used.weight else ()), *(used.inputs or ()), *used.fill]
    for column in named:
        if column not in available:
            raise unknown_name(f"{_title(name)}: column", column, available)
    taken = {*used.label, used.weight}
    inputs = [column for column in (used.inputs or available) if column not in taken]
    if not inputs:
        raise ConfigError(f"{_title(name)}: no column is left for the inputs. Columns: {', '.join(available)}.")
    return inputs


def _features(name: str, table: Any, inputs: Sequence[str], used: Columns) -> dict[str, np.ndarray]:
    features = {}
    for column in inputs:
        if not _is_string(table.column(column)):
            features[column] = _numbers(name, table, column, used)
        elif used.strings == "index":
            features[column] = _indices(name, table, column, used)
        else:
            features[column] = np.array(_filled(name, table, column, used).to_pylist(), object)
    return features


def _numeric(table: Any, inputs: Sequence[str]) -> list[str]:
    """Returns the columns that a vector has: all but those of strings."""
    return [column for column in inputs if not _is_string(table.column(column))]


def _vector(name: str, table: Any, inputs: Sequence[str], used: Columns) -> np.ndarray:
    numeric = _numeric(table, inputs)
    left_out = [column for column in inputs if column not in numeric]
    if not numeric:
        raise ConfigError(f"{_title(name)}: no column of the inputs is numeric: {', '.join(inputs)}. Use a dict.")
    if left_out:
        _log.warning("%s: columns of strings are left out of the vector: %s", _title(name), ", ".join(left_out))
    parts = [_numbers(name, table, column, used) for column in numeric]
    return np.concatenate([part.reshape(len(part), -1).astype(np.float64) for part in parts], axis=1)


def _label(name: str, table: Any, column: str, used: Columns) -> np.ndarray:
    if _is_string(table.column(column)):
        return _indices(name, table, column, used)
    values = _numbers(name, table, column, used)
    return values.astype(np.int32) if values.dtype == bool else values


def _numbers(name: str, table: Any, column: str, used: Columns) -> np.ndarray:
    """Returns a column of numbers or booleans, [n], or of lists of numbers of one length, [n, k]."""
    import pyarrow

    types = pyarrow.types
    values = _filled(name, table, column, used)
    kind = values.type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _matrix(name, column, values)
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise ConfigError(
            f"{_title(name)}: column {column!r} has the type {kind}, but must be numbers, strings or lists of numbers. "
            "Convert it, or choose other columns: columns=."
        )
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _matrix(name: str, column: str, values: Any) -> np.ndarray:
    rows = [np.asarray(row) for row in values.to_pylist()]
    lengths = {len(row) for row in rows}
    if len(lengths) > 1 or any(row.dtype.kind not in "iufb" for row in rows):
        raise ConfigError(
            f"{_title(name)}: the lists of column {column!r} must be numbers, all of one length; their lengths are "
            f"{sorted(lengths)[:5]}. Pad them, or choose other columns: columns=."
        )
    return np.stack(rows) if rows else np.zeros((0, 0))


def _indices(name: str, table: Any, column: str, used: Columns) -> np.ndarray:
    """Returns the positions of strings among the categories of their column, int32 [n]."""
    import pyarrow
    from pyarrow import compute

    values = _filled(name, table, column, used)
    categories = used.categories[column]
    indices = compute.index_in(values, value_set=pyarrow.array(list(categories), values.type))
    if indices.null_count:
        unknown = values.filter(compute.is_null(indices)).unique().to_pylist()
        raise unknown_name(f"{_title(name)}: category of column {column!r}", str(unknown[0]), categories)
    return np.asarray(indices.to_numpy(zero_copy_only=False)).astype(np.int32)


def _is_string(values: Any) -> bool:
    import pyarrow

    types = pyarrow.types
    kind = values.type.value_type if types.is_dictionary(values.type) else values.type
    return bool(types.is_string(kind) or types.is_large_string(kind) or _is_view(kind) or types.is_null(kind))


def _is_view(kind: Any) -> bool:
    """Whether a type is that of polars' strings; pyarrow has it since version 16."""
    return str(kind) == "string_view"


def _filled(name: str, table: Any, column: str, used: Columns) -> Any:
    """Returns a column as one array without missing entries; refuses missing entries that have no fill value."""
    import pyarrow
    from pyarrow import compute

    values = table.column(column).combine_chunks()
    if isinstance(values, pyarrow.ChunkedArray):  # what `combine_chunks` returns for a column without chunks
        values = pyarrow.concat_arrays(values.chunks) if values.num_chunks else pyarrow.array([], values.type)
    if pyarrow.types.is_dictionary(values.type):
        if _is_view(values.type.value_type):
            words = values.dictionary.cast(pyarrow.large_string())
            values = pyarrow.DictionaryArray.from_arrays(values.indices, words)
        values = values.dictionary_decode()
    if pyarrow.types.is_null(values.type) or _is_view(values.type):  # few functions take views (pyarrow 26)
        values = values.cast(pyarrow.large_string())
    if pyarrow.types.is_decimal(values.type):  # to which whole numbers can rarely be cast
        values = values.cast(pyarrow.float64())
    if not values.null_count:
        return values
    if column not in used.fill:
        raise _missing(name, column, values)
    text = used.fill[column]
    try:
        return compute.fill_null(values, pyarrow.scalar(text).cast(values.type))
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError, pyarrow.ArrowTypeError) as error:
        raise ConfigError(
            f"{_title(name)}: fill={column}:{text} does not fit the type {values.type} of column {column!r}: {error}"
        ) from error


def _missing(name: str, column: str, values: Any, files: Mapping[str, int] | None = None) -> ConfigError:
    """Returns the error for missing entries of a column, of files with these numbers of rows if there are any."""
    from pyarrow import compute

    row, place = int(np.argmax(compute.is_null(values).to_numpy(zero_copy_only=False))), ""
    for path, count in (files or {}).items():
        if row < count:
            place = f" of {path!r}" if len(files or {}) > 1 else ""
            break
        row -= count
    return ConfigError(
        f"{_title(name)}: column {column!r} has {values.null_count} missing entries, the first in row {row}{place}. "
        f"Fill them: fill={column}:VALUE (in Python, fill={{{column!r}: value}}), remove the rows, or choose other "
        "columns."
    )


def _title(name: str) -> str:
    return f"--dataset={name}" if ":" in name and not name.startswith("--") else name
