"""CSV and Parquet files: columns as inputs, labels and weights."""

from __future__ import annotations

import json
import sys

import tfpar
from tests.inputs.helpers import fetch_all
from tfpar import inputs
from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import Pipeline, build_source
from tfpar.inputs.checks import check_same_shapes
from tfpar.inputs.sources import tables
from tfpar.inputs.write import write as write_shards

import keras
import numpy as np
import pyarrow
import pytest
import tensorflow as tf
from pyarrow import csv, parquet

COUNT = 40


def table(first: int = 0, count: int = COUNT) -> pyarrow.Table:
    numbers = np.arange(first, first + count)
    return pyarrow.table(
        {
            "rooms": numbers.astype(np.int64),
            "area": numbers / 4,
            "new": numbers % 2 == 0,
            "city": [("Oslo", "Rome", "Bonn")[number % 3] for number in numbers],
            "price": numbers * 1000.5,
            "kind": [("flat", "house")[number % 2] for number in numbers],
            "heavy": numbers / 10,
        }
    )


@pytest.fixture(params=["csv", "parquet"])
def kind(request):
    return request.param


@pytest.fixture
def files(kind, tmp_path):
    for number, (first, count) in enumerate(((0, 25), (25, 15))):
        write(kind, table(first, count), tmp_path / f"part{number}.{kind}")
    return f"{kind}:{tmp_path}/*.{kind}"


def write(kind: str, rows: pyarrow.Table, path) -> None:
    csv.write_csv(rows, path) if kind == "csv" else parquet.write_table(rows, path)


def build(dataset: str, split: str = "train", **options) -> inputs.Source:
    return build_source(InputConfig(dataset=dataset, **options), split)


def test_columns_are_a_dict_of_inputs(files):
    source = build(f"{files}?label=kind&weight=heavy", validation_fraction=0.0)
    assert source.info.input_spec == {
        "rooms": tf.TensorSpec([], tf.int32),
        "area": tf.TensorSpec([], tf.float32),
        "new": tf.TensorSpec([], tf.float32),
        "city": tf.TensorSpec([], tf.string),
        "price": tf.TensorSpec([], tf.float32),
    }
    assert source.info.class_names == ("flat", "house")
    assert (source.info.num_classes, source.info.num_examples) == (2, COUNT)
    x, y = source.fetch(tf.range(COUNT, dtype=tf.int64))
    np.testing.assert_array_equal(x["rooms"], np.arange(COUNT))
    np.testing.assert_array_equal(x["area"], np.arange(COUNT) / 4)
    np.testing.assert_array_equal(x["new"], np.arange(COUNT) % 2 == 0)
    np.testing.assert_array_equal(x["city"][:3], [b"Oslo", b"Rome", b"Bonn"])
    np.testing.assert_array_equal(y.y, np.arange(COUNT) % 2)
    np.testing.assert_allclose(y.sample_weight, np.arange(COUNT) / 10, rtol=1e-6)
    assert "city scalar string" in Pipeline(source, InputConfig(global_batch_size=8)).report()


def test_columns_are_one_vector_of_the_numeric_ones(files, caplog):
    source = build(f"{files}?label=price&columns=area,city,rooms,new&as=vector", validation_fraction=0.0)
    assert source.info.input_spec == tf.TensorSpec([3], tf.float32)
    assert source.info.label_spec == tf.TensorSpec([], tf.float32)
    x, y = fetch_all(source)
    numbers = np.arange(COUNT)
    np.testing.assert_array_equal(x, np.stack([numbers / 4, numbers, numbers % 2 == 0], -1).astype(np.float32))
    np.testing.assert_array_equal(y, (numbers * 1000.5).astype(np.float32))
    assert "columns of strings are left out of the vector: city" in caplog.text


def test_strings_as_indices_have_the_same_categories_in_both_splits(files):
    dataset = f"{files}?label=rooms&columns=city&strings=index"
    train, validation = (build(dataset, split, validation_fraction=0.05) for split in ("train", "validation"))
    assert (train.info.num_examples, validation.info.num_examples) == (38, 2)
    assert train.info.num_classes == validation.info.num_classes == COUNT
    for source in (train, validation):
        x, y = source.fetch(tf.range(source.info.num_examples, dtype=tf.int64))
        # Sorted: Bonn, Oslo, Rome.
        np.testing.assert_array_equal(x["city"], np.array([1, 2, 0])[y.numpy() % 3])


def test_the_held_out_rows_are_spread_and_complete(files):
    dataset = f"{files}?label=rooms&columns=area"
    parts = [fetch_labels(build(dataset, split, validation_fraction=0.25)) for split in ("train", "validation")]
    assert sorted(np.concatenate(parts)) == list(range(COUNT))
    assert len(parts[1]) == 10
    # Must never change: a resumed run must not train on its evaluation examples.
    assert parts[1].tolist() == EXPECTED_HELD_OUT


EXPECTED_HELD_OUT = [2, 4, 6, 8, 18, 27, 31, 32, 33, 37]


def fetch_labels(source: inputs.Source) -> np.ndarray:
    return source.fetch(tf.range(source.info.num_examples, dtype=tf.int64))[1].numpy()


def test_rows_belong_to_their_files(files, tmp_path, kind):
    source = build(f"{files}?label=rooms&columns=area", validation_fraction=0.25)
    assert source.info.files == tuple(f"{tmp_path}/part{number}.{kind}" for number in range(2))
    assert sum(source.info.records_per_file) == 30
    labels = fetch_labels(source)
    assert (labels < 25).sum() == source.info.records_per_file[0]
    config = InputConfig(global_batch_size=10, shard_by="file")
    pipeline = Pipeline(source, config, replicas=2, workers=2)
    assert "sharded by file: worker 0:" in pipeline.report()


def test_validation_files_of_their_own(files, tmp_path, kind):
    (tmp_path / "held").mkdir()
    write(kind, table(100, 6), tmp_path / "held" / f"some.{kind}")
    dataset = f"{files}?label=rooms&columns=area&validation={tmp_path}/held/*"
    assert build(dataset).info.num_examples == COUNT
    np.testing.assert_array_equal(fetch_labels(build(dataset, "validation")), np.arange(100, 106))
    assert build(dataset).info.num_classes == 106


def test_several_labels_and_none(files):
    source = build(f"{files}?label=kind,price&columns=area", validation_fraction=0.0)
    assert source.info.label_spec == {"kind": tf.TensorSpec([], tf.int32), "price": tf.TensorSpec([], tf.float32)}
    assert build(files, validation_fraction=0.0).info.label_spec == ()


def test_missing_entries_are_refused_or_filled(kind, tmp_path):
    rows = pyarrow.table({"a": [1, None, 3], "b": ["x", "y", None], "c": [None, 0.5, 1.5], "y": [0, 1, 0]})
    write(kind, rows, tmp_path / f"t.{kind}")
    dataset = f"{kind}:{tmp_path}/t.{kind}?label=y"
    with pytest.raises(
        ConfigError,
        match=r"--dataset=.*: column 'a' has 1 missing entries, the first in row 1. Fill them",
    ):
        build(dataset, validation_fraction=0.0)
    fill = "fill=a:7,c:-1,b:none"
    x, _ = build(f"{dataset}&{fill}", validation_fraction=0.0).fetch(tf.range(3, dtype=tf.int64))
    np.testing.assert_array_equal(x["a"], [1, 7, 3])
    np.testing.assert_array_equal(x["c"], [-1, 0.5, 1.5])
    np.testing.assert_array_equal(x["b"], [b"x", b"y", b"none"])
    with pytest.raises(ConfigError, match="fill=a:many does not fit the type int64 of column 'a'"):
        build(f"{dataset}&fill=a:many,b:none,c:1", validation_fraction=0.0)


def test_columns_that_a_vector_leaves_out_may_have_missing_entries(kind, tmp_path):
    none = pyarrow.array([None, None], pyarrow.string())
    write(kind, pyarrow.table({"a": [1, 2], "b": none, "y": [0, 1]}), tmp_path / f"t.{kind}")
    source = build(f"{kind}:{tmp_path}/t.{kind}?label=y&as=vector", validation_fraction=0.0)
    np.testing.assert_array_equal(source.fetch(tf.range(2, dtype=tf.int64))[0], [[1], [2]])


def test_a_missing_entry_is_named_by_its_row_in_the_file(kind, tmp_path):
    """Also if other rows are held out."""
    for number in range(2):
        a = [None if number and row == 17 else row for row in range(20)]
        write(kind, pyarrow.table({"a": a, "y": [0, 1] * 10}), tmp_path / f"part{number}.{kind}")
    with pytest.raises(
        ConfigError, match=rf"column 'a' has 1 missing entries, the first in row 17 of .*part1\.{kind}'"
    ):
        build(f"{kind}:{tmp_path}/*.{kind}?label=y", validation_fraction=0.3)
    with pytest.raises(ConfigError, match=r"column 'a' has 1 missing entries, the first in row 17\. Fill them"):
        build(f"{kind}:{tmp_path}/part1.{kind}?label=y", validation_fraction=0.3)


def test_an_empty_string_of_a_csv_file_is_no_class(tmp_path):
    """It is a missing label; as an input without a fill value it is the empty text."""
    (tmp_path / "t.csv").write_text("a,city,kind\n1,,flat\n2,Oslo,\n3,Rome,house\n")
    dataset = f"csv:{tmp_path}/t.csv?label=kind"
    with pytest.raises(ConfigError, match=r"column 'kind' has 1 missing entries, the first in row 1\. Fill them"):
        build(dataset, validation_fraction=0.0)
    source = build(f"{dataset}&fill=kind:none", validation_fraction=0.0)
    assert source.info.class_names == ("flat", "house", "none")
    x, y = source.fetch(tf.range(3, dtype=tf.int64))
    np.testing.assert_array_equal(y, [0, 2, 1])
    np.testing.assert_array_equal(x["city"], [b"", b"Oslo", b"Rome"])


def test_names_with_special_characters(tmp_path):
    (tmp_path / "t.csv").write_text("a & b;c,d\n1;2\n3;4\n")
    source = build(f"csv:{tmp_path}/t.csv?label=c%2Cd&columns=a %26 b&delimiter=;", validation_fraction=0.0)
    x, y = source.fetch(tf.range(2, dtype=tf.int64))
    np.testing.assert_array_equal(x["a & b"], [1, 3])
    np.testing.assert_array_equal(y, [2, 4])


@pytest.mark.parametrize(("suffix", "query"), [("tsv", ""), ("csv", "&delimiter=%09")])
def test_fields_between_tabs_and_an_encoded_path(tmp_path, suffix, query):
    for name in (f"t.{suffix}", f"a&b.{suffix}"):
        (tmp_path / name).write_text("a,b\tc\n1\t2\n3\t4\n")
    dataset = f"csv:{tmp_path}/t.{suffix}?label=c&validation={tmp_path}/a%26b.{suffix}{query}"
    for split in ("train", "validation"):
        assert build(dataset, split).info.input_spec == {"a,b": tf.TensorSpec([], tf.int32)}


@pytest.mark.parametrize("whole", ["train", "validation"])
def test_numbers_of_one_split_may_all_be_whole(tmp_path, whole):
    for split in ("train", "validation"):
        end = "" if split == whole else ".5"
        (tmp_path / f"{split}.csv").write_text(f"x,price,kind\n1{end},-2{end},0\n2,1,1\n")
    files = f"csv:{tmp_path}/train.csv?validation={tmp_path}/validation.csv&columns=x"
    train, validation = inputs.build_splits(InputConfig(dataset=f"{files}&label=kind"))
    assert train.info.input_spec == validation.info.input_spec == {"x": tf.TensorSpec([], tf.float32)}
    assert train.info.label_spec.dtype == tf.int32
    check_same_shapes(train.info, validation.info)
    if whole == "validation":  # otherwise the label of the training examples is a class
        np.testing.assert_array_equal(fetch_labels(build(f"{files}&label=price", "validation")), [-2.0, 1.0])


class Frame:
    """A data frame by Arrow's protocol, as pandas and polars have it."""

    def __init__(self, rows: pyarrow.Table):
        self._rows = rows

    def __arrow_c_stream__(self, requested_schema=None):
        return self._rows.__arrow_c_stream__(requested_schema)


def test_tables_and_frames_of_a_program(tmp_path):
    write("parquet", table(), tmp_path / "t.parquet")
    sources = [
        inputs.from_table(each, label="kind", columns=["area"], weight="heavy", name="mine")
        for each in (table(), Frame(table()), tmp_path / "t.parquet", [f"{tmp_path}/t.parquet"])
    ]
    for source in sources:
        assert source.info.name == "mine"
        _, y = source.fetch(tf.range(4, dtype=tf.int64))
        np.testing.assert_array_equal(y.y, [0, 1, 0, 1])
    with pytest.raises(ConfigError, match=r"unknown category|category of column 'kind'='house' is not known"):
        inputs.from_table(table(), label="kind", categories={"kind": ["flat", "castle"]})
    chosen = inputs.from_table(table(), label="kind", categories={"kind": ["house", "flat"]})
    assert chosen.info.class_names == ("house", "flat")


def test_the_index_of_a_pandas_frame_is_no_input(tmp_path):
    # As `pyarrow.table` gives it for `frame.sample(...)`: pandas is not installed where the tests run.
    index = json.dumps({"index_columns": ["__index_level_0__"], "columns": [], "column_indexes": []})
    rows = pyarrow.table({"a": [1.0, 2.0], "y": [0, 1], "__index_level_0__": [7, 3]}).replace_schema_metadata(
        {"pandas": index}
    )
    write("parquet", rows, tmp_path / "sampled.parquet")
    write("parquet", rows.drop_columns(["__index_level_0__"]), tmp_path / "whole.parquet")
    for each in (
        rows,
        Frame(rows),
        tmp_path / "sampled.parquet",
        [tmp_path / "sampled.parquet", tmp_path / "whole.parquet"],
    ):
        assert set(inputs.from_table(each, label="y").info.input_spec) == {"a"}
    assert inputs.from_table(rows, label="y", layout="vector").info.input_spec.shape == (1,)
    named = inputs.from_table(rows, label="y", columns=["__index_level_0__"], layout="vector")
    np.testing.assert_array_equal(fetch_all(named)[0][:, 0], [7, 3])


def test_classes_that_differ_between_splits_are_refused():
    kinds = [["cat", "cow", "dog"], ["cat", "dog"], ["cat", "cow"], ["cat", "cow", "dog", "emu"]]
    train, other, fewer, more = (
        inputs.from_table(pyarrow.table({"x": np.arange(len(each)), "y": each}), label="y").info for each in kinds
    )
    check_same_shapes(train, train)
    check_same_shapes(train, fewer)  # whose classes have the same numbers
    with pytest.raises(ConfigError, match=r"class 1 of the validation .* is 'dog', but .* is 'cow'.*categories="):
        check_same_shapes(train, other)
    with pytest.raises(ConfigError, match=r"class 3 of the validation .* is 'emu', but .* is not known"):
        check_same_shapes(train, more)


def test_strings_of_polars():
    """Its frames have views of strings."""
    city = pyarrow.array(["Oslo", None, "Rome"], pyarrow.string_view())
    kinds = pyarrow.DictionaryArray.from_arrays([0, 1, 0], pyarrow.array(["flat", "house"], pyarrow.string_view()))
    frame = Frame(pyarrow.table({"city": city, "kind": kinds}))
    for strings, expected in (("text", [b"Oslo", b"none", b"Rome"]), ("index", [0, 2, 1])):
        source = inputs.from_table(frame, label="kind", fill={"city": "none"}, strings=strings)
        x, y = source.fetch(tf.range(3, dtype=tf.int64))
        np.testing.assert_array_equal(x["city"], expected)
        np.testing.assert_array_equal(y, [0, 1, 0])
        assert source.info.class_names == ("flat", "house")


def test_lists_decimals_and_dictionaries():
    rows = pyarrow.table(
        {
            "vector": pyarrow.array([[1.0, 2.0], [3.0, 4.0]]),
            "fixed": pyarrow.array([[1, 2], [3, 4]], pyarrow.list_(pyarrow.int32(), 2)),
            "money": pyarrow.array(["1.50", "2.25"]).cast(pyarrow.decimal128(5, 2)),
            "kind": pyarrow.array(["a", "b"]).dictionary_encode(),
        }
    )
    x, _ = inputs.from_table(rows).fetch(tf.range(2, dtype=tf.int64))
    np.testing.assert_array_equal(x["vector"], [[1, 2], [3, 4]])
    np.testing.assert_array_equal(x["fixed"], [[1, 2], [3, 4]])
    np.testing.assert_array_equal(x["money"], [1.5, 2.25])
    np.testing.assert_array_equal(x["kind"], [b"a", b"b"])
    vector = inputs.from_table(rows, columns=["vector", "money"], layout="vector")
    x, _ = vector.fetch(tf.range(2, dtype=tf.int64))
    np.testing.assert_array_equal(x, [[1, 2, 1.5], [3, 4, 2.25]])


@pytest.mark.parametrize(("fill", "filled"), [(0, 0.0), ("0", 0.0), (9.75, 9.75)])
def test_missing_decimals_are_filled(fill, filled):
    money = pyarrow.array(["1.50", None]).cast(pyarrow.decimal128(7, 2))
    x, _ = inputs.from_table(pyarrow.table({"price": money}), fill={"price": fill}).fetch(tf.range(2, dtype=tf.int64))
    np.testing.assert_array_equal(x["price"], [1.5, filled])


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("?lable=price", "option='lable' is not known. Did you mean 'label'"),
        ("?label=pric", "column='pric' is not known. Did you mean 'price'"),
        ("?label=price&fill=age", "fill=age is not COLUMN:VALUE"),
        ("?label=price&fill=age:3", "column='age' is not known"),
        ("?as=rows", "as='rows' is not known"),
        ("?strings=words", "strings='words' is not known"),
        ("?columns=city&as=vector", "no column of the inputs is numeric: city"),
        ("?columns=price&label=price", "no column is left for the inputs"),
        ("?delimiter=ab", "delimiter='ab' must be one ASCII character"),
        ("?delimiter=§", "delimiter='§' must be one ASCII character"),
        ("?validation=/no/such/*", "no file matches '/no/such/"),
    ],
)
def test_what_cannot_be_is_refused(files, query, message):
    with pytest.raises(ConfigError, match=message):
        build(files + query)


def test_files_that_are_no_tables_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no file matches"):
        build(f"csv:{tmp_path}/*.csv")
    (tmp_path / "bad.parquet").write_bytes(b"no table")
    with pytest.raises(ConfigError, match=r"bad.parquet' cannot be read as parquet"):
        build(f"parquet:{tmp_path}/bad.parquet")
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "b.csv").write_text("x,z\n1,2\n")
    with pytest.raises(ConfigError, match=r"has the columns \['x', 'z'\], but"):
        build(f"csv:{tmp_path}/*.csv")
    (tmp_path / "twice.csv").write_text("x,y,x\n1,2,3\n")
    with pytest.raises(ConfigError, match=r"twice.csv': the columns \['x'\] occur twice\. Rename them"):
        build(f"csv:{tmp_path}/twice.csv?label=y")
    (tmp_path / "latin.csv").write_bytes("größe,y\n1,2\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin.csv' is not in UTF-8: .* Convert it, e\.g\. with iconv"):
        build(f"csv:{tmp_path}/latin.csv?label=y")
    with pytest.raises(ConfigError, match="int is not a table"):
        inputs.from_table(3)
    (tmp_path / "t.csv").write_text("when,y\n2020-01-01,2\n")
    with pytest.raises(ConfigError, match="column 'when' has the type date32"):
        build(f"csv:{tmp_path}/t.csv?label=y", validation_fraction=0.0)
    twice = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    with pytest.raises(ConfigError, match=r"the columns \['a'\] occur twice"):
        inputs.from_table(twice)


def test_without_pyarrow_the_error_says_what_to_install(monkeypatch, tmp_path):
    (tmp_path / "t.csv").write_text("x,y\n1,2\n")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'tfpar\[tables\]'"):
        build(f"csv:{tmp_path}/t.csv?label=y")


@pytest.mark.parametrize("cache", ["none", "memory"])
@pytest.mark.parametrize(
    "query", ["?label=kind&weight=heavy", "?label=price,kind&columns=city", "?label=price&as=vector", ""]
)
def test_tables_are_written_as_shards_and_read_again(query, cache, tmp_path):
    write("parquet", table(), tmp_path / "t.parquet")
    dataset = f"parquet:{tmp_path}/t.parquet{query}"
    output = str(tmp_path / "shards")
    counts = write_shards(InputConfig(dataset=dataset, cache="none"), output, shards=2)
    assert sum(counts.values()) == COUNT
    for split in ("train", "validation"):
        original = build(dataset, split)
        again = build(f"tfrecord:{output}", split, cache=cache)
        for part in ("input_spec", "target_spec", "num_classes", "class_names", "num_examples"):
            assert getattr(again.info, part) == getattr(original.info, part), part
        indices = tf.range(original.info.num_examples, dtype=tf.int64)
        tf.nest.map_structure(np.testing.assert_array_equal, again.fetch(indices), original.fetch(indices))


def test_large_numbers_may_be_in_one_split_alone(tmp_path):
    """A model then gets int32 in training and int64 in evaluation."""
    held = int(np.flatnonzero(tables._held_out(40, 4))[0])
    rows = [f"{5_000_000_000 if row == held else row},{row % 2},{row % 2}" for row in range(40)]
    (tmp_path / "rows.csv").write_text("\n".join(["id,x,y", *rows]))
    dataset = f"csv:{tmp_path}/rows.csv?label=y"
    train, validation = inputs.build_splits(InputConfig(dataset=dataset, validation_fraction=0.1))
    assert validation is not None
    assert [split.info.input_spec["id"].dtype for split in (train, validation)] == [tf.int32, tf.int64]
    given = {"id": keras.Input((), dtype="int64"), "x": keras.Input((), dtype="int32")}
    hashed = keras.layers.Embedding(16, 4)(keras.layers.Hashing(16)(given["id"]))
    trainer = tfpar.Trainer(
        keras.Model(given, keras.layers.Dense(2)(hashed)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        strategy="one_device",
        jit_compile="false",
        global_batch_size=8,
        verbose=0,
        epochs=1,
    )
    assert trainer.fit(train, validation=validation)["eval"]["loss"] > 0.0
