"""What arrives in a watched directory, and what is kept of it: files, the journal, exports."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib

from tests.checkpoint import small_disk
from tests.incremental.watched import arrive, config_of, shard
from tfpar.checkpoint.checkpointer import CheckpointError
from tfpar.config import ConfigError, InputConfig
from tfpar.incremental.online.arrivals import STOP, Arrivals, form_of
from tfpar.incremental.online.chief import Chief
from tfpar.incremental.online.exports import Exports
from tfpar.incremental.online.journal import NAME, OLD_NAME, ArrivedFile, Journal
from tfpar.inputs import load

import pytest
import tensorflow as tf

# --- what has arrived ------------------------------------------------------------------------------------------------


def test_files_are_complete_once_they_have_not_changed(places, shards):
    base, incoming = places
    config = InputConfig(dataset=f"tfrecord:{base}")
    arrivals = Arrivals(str(incoming), form_of(config, load(config.dataset, "train").info, str(incoming)))
    assert arrivals.look(()) == ([], False)
    content = shard(shards, 1).read_bytes()
    target = incoming / "a.tfrecord"
    target.write_bytes(content[:-9])
    (incoming / "b.tfrecord.part").write_bytes(content)
    (incoming / ".c.tfrecord").write_bytes(content)
    (incoming / "notes.txt").write_text("no examples")
    assert arrivals.look(()) == ([], True)
    target.write_bytes(content)
    assert arrivals.look(()) == ([], True)
    (found,), others = arrivals.look(())
    assert (found.name, found.size, others) == ("a.tfrecord", len(content), False)
    assert arrivals.look({found.identity}) == ([], False)


def test_bad_files_are_named_with_the_reason(places, shards):
    base, incoming = places
    config = InputConfig(dataset=f"tfrecord:{base}")
    arrivals = Arrivals(str(incoming), form_of(config, load(config.dataset, "train").info, str(incoming)))
    content = bytearray(shard(shards, 1).read_bytes())
    (incoming / "whole.tfrecord").write_bytes(content)
    (incoming / "short.tfrecord").write_bytes(content[:-9])
    content[200] ^= 1
    (incoming / "flipped.tfrecord").write_bytes(content)
    (incoming / "empty.tfrecord").touch()
    arrivals.look(())
    good, bad = arrivals.check(arrivals.look(())[0])
    assert [file.name for file in good] == ["whole.tfrecord"]
    reasons = {file.name: reason for file, reason in bad}
    assert reasons.keys() == {"short.tfrecord", "flipped.tfrecord", "empty.tfrecord"}
    assert "incomplete" in reasons["short.tfrecord"]
    assert "checksum" in reasons["flipped.tfrecord"]
    assert "no examples" in reasons["empty.tfrecord"]


def test_images_are_of_the_classes_that_the_data_set_has(tmp_path):
    pixels = tf.io.encode_png(tf.zeros([8, 8, 3], tf.uint8)).numpy()
    for folder in ("base", "incoming"):
        for name in ("cat/1.png", "dog/1.png"):
            (tmp_path / folder / name).parent.mkdir(parents=True)
            (tmp_path / folder / name).write_bytes(pixels)
    incoming = tmp_path / "incoming"
    (incoming / "dog" / "broken.png").write_bytes(pixels[:40])
    (incoming / "bird").mkdir()
    (incoming / "bird" / "1.png").write_bytes(pixels)
    (incoming / "loose.png").write_bytes(pixels)
    foreign = os.fsdecode(b"gr\xf6n/1.png")  # no UTF-8
    (incoming / foreign).parent.mkdir()
    (incoming / foreign).write_bytes(pixels)
    config = InputConfig(dataset=f"images:{tmp_path}/base", image_size=8, validation_fraction=0.0)
    form = form_of(config, load(config.dataset, "train", image_size=8, validation_fraction=0.0).info, str(incoming))
    arrivals = Arrivals(str(incoming), form)
    arrivals.look(())
    arrived, _ = arrivals.look(())
    assert len({arrivals.content(file) for file in arrived}) == len(arrived)
    good, bad = arrivals.check(arrived)
    assert sorted(file.name for file in good) == ["cat/1.png", "dog/1.png"]
    assert form.source(str(incoming), ["dog/1.png", "cat/1.png"]).read(tf.range(2, dtype=tf.int64))[
        1
    ].numpy().tolist() == [
        1,
        0,
    ]
    reasons = {file.name: reason for file, reason in bad}
    assert "classes are cat, dog" in reasons["bird/1.png"]
    assert "classes are cat, dog" in reasons["loose.png"]
    assert "classes are cat, dog" in reasons[foreign]
    assert "cannot be read" in reasons["dog/broken.png"]


def chief_and_clock(places, run: pathlib.Path, monkeypatch) -> tuple[Chief, list[float]]:
    """A chief whose clock stands still."""
    base, incoming = places
    clock = [100.0]
    monkeypatch.setattr("tfpar.incremental.online.chief.time.monotonic", lambda: clock[0])
    config = config_of(base, incoming, run, delivery_examples=200, delivery_seconds=10.0, idle_seconds=60.0)
    form = form_of(config.input, load(config.input.dataset, "train").info, str(incoming))
    assert config.incremental is not None
    return Chief(config.incremental, form, config, lambda examples: -(-examples // 32)), clock


def test_a_file_that_changes_while_it_waits_is_delivered_once(places, shards, tmp_path, monkeypatch):
    """As it is then, and not at all if it is gone."""
    chief, clock = chief_and_clock(places, tmp_path / "run", monkeypatch)
    _, incoming = places
    arrive(shard(shards, 1), incoming)
    for _ in range(2):
        assert chief.next(0) == (None, False)
    [file] = [path for path in incoming.iterdir() if path.suffix == ".tfrecord"]
    file.write_bytes(shard(shards, 2).read_bytes())
    os.utime(file, ns=(1, 1))
    for _ in range(2):
        assert chief.next(0) == (None, False)
    clock[0] += 10.0
    delivery, _ = chief.next(0)
    assert delivery is not None
    assert [(each.name, each.modified) for each in delivery.files] == [(file.name, 1)]
    (tmp_path / "run" / "exports" / "000001").mkdir(parents=True)
    arrive(shard(shards, 3), incoming)
    for _ in range(2):
        assert chief.next(5) == (None, False)
    (incoming / shard(shards, 3).name).unlink()
    clock[0] += 10.0
    assert chief.next(5) == (None, False)
    assert len(chief.journal.deliveries) == 1


def test_a_delivery_waits_for_enough_examples_or_long_enough(places, shards, tmp_path, monkeypatch):
    chief, clock = chief_and_clock(places, tmp_path / "run", monkeypatch)
    _, incoming = places
    arrive(shard(shards, 1), incoming)
    chief.next(0)
    assert chief.next(0) == (None, False)  # 160 examples
    clock[0] += 9.0
    assert chief.next(0) == (None, False)
    clock[0] += 1.0
    first, _ = chief.next(0)
    assert first is not None
    assert (first.number, first.examples, first.steps) == (1, 160, 5)
    arrive(shard(shards, 2), incoming)
    arrive(shard(shards, 3), incoming)
    assert chief.next(0) == (first, False)  # which is not learned yet
    (tmp_path / "run" / "exports" / "000001").mkdir(parents=True)
    chief.next(5)
    second, _ = chief.next(5)
    assert second is not None
    assert (second.first_step, len(second.files), second.steps) == (5, 2, 10)
    (tmp_path / "run" / "exports" / "000002").mkdir(parents=True)
    assert chief.next(15) == (None, False)
    clock[0] += 61.0
    assert chief.next(15) == (None, True)


def test_a_file_that_arrives_with_stop_during_a_scan_is_learned(places, shards, tmp_path, monkeypatch):
    """Both arrive after the scan has passed; the run must not end on a STOP whose file it has not seen."""
    chief, _ = chief_and_clock(places, tmp_path / "run", monkeypatch)
    _, incoming = places
    look, scans = chief._arrivals.look, []

    def look_before_they_arrive(*known):
        found = look(*known)
        scans.append(found)
        if len(scans) == 1:
            arrive(shard(shards, 1), incoming)
            (incoming / STOP).touch()
        return found

    monkeypatch.setattr(chief._arrivals, "look", look_before_they_arrive)
    assert [chief.next(0) for _ in range(2)] == [(None, False)] * 2
    delivery, _ = chief.next(0)
    assert delivery is not None
    assert [file.name for file in delivery.files] == [shard(shards, 1).name]


def looked(chief: Chief, position: int, scans: int = 2):
    """What the last of some scans returns."""
    return [chief.next(position) for _ in range(scans)][-1]


def test_the_same_bytes_are_delivered_once_whatever_their_name_and_time(places, shards, tmp_path, monkeypatch, caplog):
    chief, _ = chief_and_clock(places, tmp_path / "run", monkeypatch)
    _, incoming = places
    for number in (1, 2):
        arrive(shard(shards, number), incoming)
    first, _ = looked(chief, 0)
    assert first is not None
    assert len(first.files) == 2
    (tmp_path / "run" / "exports" / "000001").mkdir(parents=True)
    one, two = (incoming / shard(shards, number).name for number in (1, 2))
    one.rename(incoming / "moved.tfrecord")
    os.utime(two, ns=(5, 5))
    chief, _ = chief_and_clock(places, tmp_path / "run", monkeypatch)  # also after a restart
    for _ in range(3):
        assert looked(chief, first.end) == (None, False)
    assert [file.name for file in chief.journal.repeated] == [two.name, "moved.tfrecord"]
    said = "and 1 more: left out, the model has learned from the same bytes before"
    assert caplog.text.count(said) == 1
    chief, _ = chief_and_clock(places, tmp_path / "run", monkeypatch)
    monkeypatch.setattr(chief._arrivals, "content", lambda file: pytest.fail(f"{file.name} is read again"))
    assert looked(chief, first.end) == (None, False)


def test_a_copy_of_a_waiting_file_is_delivered_if_that_file_goes(places, shards, tmp_path, monkeypatch):
    chief, _ = chief_and_clock(places, tmp_path / "run", monkeypatch)
    _, incoming = places
    arrive(shard(shards, 1), incoming)
    assert looked(chief, 0) == (None, False)
    original = incoming / shard(shards, 1).name
    (incoming / "copy.tfrecord").write_bytes(original.read_bytes())
    assert looked(chief, 0) == (None, False)
    original.unlink()
    (incoming / STOP).touch()
    delivery = next(found for found, ends in (chief.next(0) for _ in range(4)) if found or ends)
    assert delivery is not None
    assert [file.name for file in delivery.files] == ["copy.tfrecord"]
    assert chief.journal.repeated == []


def test_a_file_that_is_away_while_it_is_read_is_delivered_when_it_is_back(places, shards, tmp_path, monkeypatch):
    """With the time that it had; a program may have moved it, or a file server lost it for a moment."""
    chief, clock = chief_and_clock(places, tmp_path / "run", monkeypatch)
    _, incoming = places
    arrive(shard(shards, 1), incoming)
    file = incoming / shard(shards, 1).name
    check = chief._arrivals.check

    def check_without(files):
        if files:
            file.rename(tmp_path / "away")
        return check(files)

    with monkeypatch.context() as patched:
        patched.setattr(chief._arrivals, "check", check_without)
        for _ in range(2):
            assert chief.next(0) == (None, False)
    assert not file.exists()
    (tmp_path / "away").rename(file)
    for _ in range(2):
        assert chief.next(0) == (None, False)
    clock[0] += 10.0
    delivery, _ = chief.next(0)
    assert delivery is not None
    assert [each.name for each in delivery.files] == [file.name]
    assert not chief.journal.skipped


def test_the_rest_of_a_delivery_is_that_of_the_files_that_were_delivered(places, shards, tmp_path, monkeypatch):
    """After a crash within a delivery; a program may have put other examples, as many, under the same name."""
    _, incoming = places
    arrive(shard(shards, 1), incoming)
    (incoming / STOP).touch()
    first, _ = looked(chief_and_clock(places, tmp_path / "run", monkeypatch)[0], 0)
    assert first is not None
    file = incoming / shard(shards, 1).name
    file.write_bytes(shard(shards, 2).read_bytes())
    os.utime(file, ns=(3, 3))
    chief, _ = chief_and_clock(places, tmp_path / "run", monkeypatch)
    with pytest.raises(ConfigError, match=f"{file.name} of delivery 1 has other contents, or is gone, .* Restore it"):
        chief.next(2)
    file.unlink()
    with pytest.raises(ConfigError, match=f"{file.name} of delivery 1 has other contents, or is gone"):
        chief.next(2)
    arrive(shard(shards, 1), incoming)  # at another time
    assert chief.next(2) == (first, False)


def test_the_class_is_part_of_what_an_image_says(tmp_path):
    pixels = tf.io.encode_png(tf.zeros([8, 8, 3], tf.uint8)).numpy()
    for name in ("cat/1.png", "dog/1.png", "dog/2.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(pixels)
    options = {"dataset": f"images:{tmp_path}", "image_size": 8, "validation_fraction": 0.0}
    info = load(options["dataset"], "train", image_size=8, validation_fraction=0.0).info
    arrivals = Arrivals(str(tmp_path), form_of(InputConfig(**options), info, str(tmp_path)))
    arrivals.look(())
    contents = {file.name: arrivals.content(file) for file in arrivals.look(())[0]}
    assert contents["dog/1.png"] == contents["dog/2.png"] != contents["cat/1.png"]


# --- what is kept ----------------------------------------------------------------------------------------------------


def entries_of(journal: Journal) -> tuple:
    return journal.deliveries, journal.skipped, journal.repeated, journal.known, journal.contents, journal.steps


def written(workdir: pathlib.Path, deliveries: int = 2) -> Journal:
    journal = Journal(str(workdir))
    for number in range(deliveries):
        journal.deliver([ArrivedFile(f"a{number}", 1, 2, 3, f"content {number}")], 4)
    return journal


def test_a_journal_that_cannot_be_read_ends_the_start(tmp_path):
    journal = written(tmp_path, 1)
    journal.reject(ArrivedFile("b", 1, 2), "it is empty")
    journal.repeat([ArrivedFile("c", 1, 2, 3, "content 0")])
    again = Journal(str(tmp_path))
    assert entries_of(again) == entries_of(journal)
    assert again.deliver([ArrivedFile("d", 1, 2, 3)], 5).first_step == 4
    lines = (tmp_path / NAME).read_bytes().splitlines(keepends=True)
    for wrong in (b"{", b"", lines[0] + b"{\n" + lines[1], lines[0] + lines[-1]):
        (tmp_path / NAME).write_bytes(wrong)
        with pytest.raises(ConfigError, match=r"deliveries\.jsonl records which files .*, and cannot be read"):
            Journal(str(tmp_path))


def test_an_entry_that_a_crash_cut_off_anywhere_is_as_if_it_was_never_begun(tmp_path):
    written(tmp_path, 2)
    before = (tmp_path / NAME).read_bytes()
    third = [ArrivedFile("a2", 1, 2, 3, "content 2")]
    Journal(str(tmp_path)).deliver(third, 4)
    after = (tmp_path / NAME).read_bytes()
    assert after.startswith(before)  # appended
    for end in range(len(before), len(after)):
        (tmp_path / NAME).write_bytes(after[:end])
        journal = Journal(str(tmp_path))
        assert len(journal.deliveries) == 2
        journal.deliver(third, 4)
        assert (tmp_path / NAME).read_bytes() == after


def test_a_journal_of_an_earlier_version_is_read_and_replaced_at_the_next_entry(tmp_path):
    files = [{"name": name, "size": 1, "modified": 2, "examples": 3} for name in "ab"]
    old = {
        "format": 1,
        "deliveries": [{"number": 1, "files": files, "first_step": 0, "steps": 5}],
        "skipped": [{"file": {"name": "c", "size": 0, "modified": 1, "examples": 0}, "reason": "it is empty"}],
    }
    (tmp_path / OLD_NAME).write_text(json.dumps(old))
    journal = Journal(str(tmp_path), lambda file: f"content of {file.name}")
    assert (journal.steps, journal.examples(1), len(journal.skipped)) == (5, 6, 1)
    assert journal.contents == {"content of a", "content of b"}
    assert ("c", 0, 1) in journal.known
    journal.deliver([ArrivedFile("d", 1, 2, 3)], 5)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert entries_of(Journal(str(tmp_path))) == entries_of(journal)


def test_a_journal_that_lacks_learned_steps_is_refused(places, shards, tmp_path, monkeypatch):
    chief, _ = chief_and_clock(places, tmp_path / "run", monkeypatch)
    written(tmp_path / "run", 2)
    with pytest.raises(ConfigError, match=r"checkpoint is of step 12, but deliveries\.jsonl ends at step 8"):
        chief.next(12)


def test_exports_appear_whole_and_old_ones_go(tmp_path):
    exports = Exports(str(tmp_path), keep=2)
    for version in (1, 2, 3):
        (tmp_path / ".new").write_text(f"weights {version}")
        os.replace(tmp_path / ".new", tmp_path / "model.keras")
        exports.add(version, {"version": version})
    assert sorted(path.name for path in (tmp_path / "exports").iterdir()) == ["000002", "000003", "newest"]
    assert (tmp_path / "exports" / "000002" / "model.keras").read_text() == "weights 2"
    assert (tmp_path / "exports" / "newest" / "model.keras").read_text() == "weights 3"
    assert exports.has(1)
    assert not exports.has(4)


def test_a_full_disk_ends_the_run_with_all_earlier_entries(tmp_path):
    with small_disk.mounted(tmp_path / "disk", kilobytes=64) as disk:
        journal = written(disk, 2)
        with open(disk / "other", "wb", buffering=0) as other, contextlib.suppress(OSError):
            while other.write(bytes(512)):
                pass
        files = [ArrivedFile("x" * 5000, 1, 2, 3, "content 2")]
        with pytest.raises(CheckpointError, match=r"deliveries\.jsonl records .* cannot be written \(No space left on"):
            journal.deliver(files, 4)
        assert entries_of(journal) == entries_of(Journal(str(disk)))
        (disk / "other").unlink()
        again = Journal(str(disk))
        again.deliver(files, 4)
        assert len(Journal(str(disk)).deliveries) == 3
