"""Behaviour common to all sources: caching, label checks, held-out names, the registry."""

from __future__ import annotations

import dataclasses

from tests.inputs.helpers import fetch_all, index_source
from tfpar import inputs
from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import Pipeline, build_source, kinds, memory, register, registry
from tfpar.inputs import source as sources

import numpy as np
import pytest
import tensorflow as tf


def test_a_source_in_memory_has_the_same_examples_and_is_read_once():
    reads = []
    original = index_source(700, [300, 400], storage="files")

    def count(indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        tf.numpy_function(lambda found: reads.append(len(found)) or np.int64(0), [indices], tf.int64)
        return original.read(indices)

    counting = dataclasses.replace(original, read=count, portable=False)
    kept = memory.keep_in_memory(counting, 24)
    assert not reads, "kept before they are used"
    kept.load()
    assert sum(reads) == 700
    for left, right in zip(fetch_all(kept), fetch_all(original), strict=True):
        assert np.array_equal(left, right)
    assert sum(reads) == 700
    assert kept.portable
    assert kept.info.storage == "memory"
    assert kept.info.files == original.info.files
    # x as stored is int64 [2], y is int64 [].
    assert kept.kept_bytes == 700 * 24


@pytest.mark.parametrize(
    ("policy", "stored_bytes", "storage"),
    [
        ("auto", 1 << 20, "memory"),
        ("auto", (1 << 20) + 1, "files"),
        ("none", 1, "files"),
        ("memory", 1 << 40, "memory"),
    ],
)
def test_auto_caches_up_to_one_gibibyte(policy, stored_bytes, storage):
    source = index_source(1024, storage="files")
    assert memory.apply_cache(source, policy, stored_bytes).info.storage == storage


def test_labels_in_memory_are_checked_at_loading():
    source = index_source(50, storage="files")
    wrong = dataclasses.replace(source, info=dataclasses.replace(source.info, num_classes=5))
    with pytest.raises(
        ConfigError,
        match=r"--dataset=index: train example 5 has label 5, but labels must be 0 to 4; 13 more examples are bad",
    ):
        memory.keep_in_memory(wrong, 24).load()


def test_an_empty_source_stays_empty():
    assert memory.keep_in_memory(index_source(0), 24).info.num_examples == 0


def test_the_numbers_of_records_must_add_up():
    with pytest.raises(ValueError, match="do not add up to 10 examples"):
        index_source(10, [4, 5])


def test_the_fingerprint_depends_on_data_and_not_on_directories():
    info = index_source(10, [4, 6]).info
    moved = dataclasses.replace(info, files=tuple(f"/mnt/{name}" for name in info.files))
    assert info.fingerprint == moved.fingerprint
    others = [
        index_source(11, [4, 7]).info,
        index_source(10, [5, 5]).info,
        dataclasses.replace(info, split="validation"),
        dataclasses.replace(info, files=("file0", "renamed")),
    ]
    assert len({info.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_held_out_names_hardly_change_when_names_are_added():
    names = [f"folder/{number}.txt" for number in range(2000)]
    whole = dict(zip(names, sources.held_out_mask(names, 200), strict=True))
    assert sum(whole.values()) == 200
    assert sum(whole[name] for name in names[:1000]) == pytest.approx(100, abs=40)
    fewer = dict(zip(names[:1900], sources.held_out_mask(names[:1900], 190), strict=True))
    assert sum(fewer[name] != whole[name] for name in names[:1900]) <= 15
    assert not any(sources.held_out_mask(names, 0))
    # Must never change: a resumed run must not train on its evaluation examples.
    assert [name for name, held in zip(names[:20], sources.held_out_mask(names[:20], 3), strict=True) if held] == [
        "folder/1.txt",
        "folder/7.txt",
        "folder/13.txt",
    ]


class TestRegistry:
    def test_kinds_are_the_documented_ones(self):
        assert {"digits", "images", "synthetic", "text", "tfds", "tfrecord"} <= set(kinds())

    def test_unknown_name_gets_a_suggestion(self):
        with pytest.raises(ConfigError, match=r"--dataset='digts' is not known. Did you mean 'digits'"):
            build_source(InputConfig(dataset="digts"), "train")

    def test_unknown_split(self):
        with pytest.raises(ConfigError, match="split='test' must be"):
            build_source(InputConfig(), "test")

    def test_users_can_register_sources(self, monkeypatch):
        monkeypatch.setattr(registry, "_REGISTERED", {})
        register("counted", lambda argument, config, split, seed: index_source(int(argument)))
        source = build_source(InputConfig(dataset="counted:30"), "train")
        assert Pipeline(source, InputConfig(global_batch_size=10)).steps_per_epoch == 3
        for taken in ("digits", "counted", "a:b"):
            with pytest.raises(ValueError, match="is empty, taken or contains a colon"):
                register(taken, lambda argument, config, split, seed: index_source(1))

    def test_what_a_registered_function_returns_must_be_a_source(self, monkeypatch):
        monkeypatch.setattr(registry, "_REGISTERED", {})
        register("nothing", lambda argument, config, split, seed: None)
        with pytest.raises(
            ConfigError, match=r"--dataset=nothing:a: the function .* 'nothing' returned NoneType\. Ret"
        ):
            build_source(InputConfig(dataset="nothing:a"), "train")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"storage": "disk"}, "index: storage='disk' is none of 'memory', 'files'"),
        ({"task": "guess"}, "index: task='guess' is none of 'classification'"),
    ],
)
def test_unknown_words_in_a_description_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(index_source(3).info, **given)


def test_a_scale_must_be_a_number():
    x, y = np.zeros([2, 3], np.float32), np.zeros([2], np.int32)
    for scale in (0.5, np.float32(0.5), 2):
        inputs.from_arrays(x, y, scale=scale)
    with pytest.raises(ValueError, match="arrays: scale='a' is no number"):
        inputs.from_arrays(x, y, scale="a")


def test_decode_bytes_accepts_invalid_utf8():
    assert sources.decode_bytes(np.array([[72, 105, 255]])) == "Hi�"


@pytest.mark.parametrize("name", ["fetch_usable", "find_bad", "passing_error"])
def test_names_of_version_0_1_still_work_and_warn(name):
    with pytest.warns(DeprecationWarning, match=rf"tfpar\.inputs\.{name} is deprecated; use (\w+)") as caught:
        member = getattr(inputs, name)
    assert member is getattr(inputs, str(caught[0].message).rpartition(" ")[2])
