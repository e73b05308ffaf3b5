"""Tasks out of a source, what is kept of them, and what is held on to."""

from __future__ import annotations

import dataclasses

from tfpar.config import ConfigError, IncrementalConfig
from tfpar.config.sections.incremental import METHODS
from tfpar.incremental import consolidation, distillation, replay, results, tasks
from tfpar.inputs import BadRecordError, from_arrays, locate_bad_example, memory

import keras
import numpy as np
import pytest
import tensorflow as tf

LABELS = np.array([0, 1, 2, 3] * 6, np.int32)


def source(count: int = 24, split: str = "train"):
    x = np.arange(2 * count, dtype=np.float32).reshape([count, 2])
    return from_arrays(x, LABELS[:count], split=split)


def fetched(made, places=None):
    places = np.arange(made.info.num_examples) if places is None else places
    x, y = made.fetch(tf.constant(places, tf.int64))
    return x.numpy()[:, 0] / 2.0, y.numpy()


def split(options: IncrementalConfig, train=None, validation_fraction: float = 0.25) -> list[tasks.Task]:
    return tasks.split_tasks(options, train or source(), source(8), validation_fraction=validation_fraction)


def test_classes_come_two_at_a_time():
    options = IncrementalConfig(tasks="by_class:2")
    first, second = split(options)
    assert (first.classes, second.classes) == ((0, 1), (2, 3))
    np.testing.assert_array_equal(LABELS[second.indices] // 2, 1)
    np.testing.assert_array_equal(second.validation, [2, 3, 6, 7])
    with pytest.raises(ConfigError, match=r"--tasks=by_class:4 divides .* into 1 tasks.*classes 0-3: 24 and 8"):
        split(IncrementalConfig(tasks="by_class:4"))


def whole(task: tasks.Task) -> tuple[int, int]:
    """The first and the last example of a task that holds out a quarter of its own."""
    every = np.union1d(task.indices, task.validation)
    assert task.own
    assert len(task.validation) == max(1, round(len(every) / 4))
    assert len(every) == len(task.indices) + len(task.validation)  # none is in both
    np.testing.assert_array_equal(every, np.arange(every[0], every[-1] + 1))
    return int(every[0]), int(every[-1])


def test_parts_and_files_hold_out_examples_of_their_own():
    made = split(IncrementalConfig(tasks="in_order:5"))
    assert [whole(task) for task in made] == [(0, 4), (5, 9), (10, 14), (15, 19), (20, 23)]
    again = split(IncrementalConfig(tasks="in_order:5"))
    assert [task.validation.tolist() for task in made] == [task.validation.tolist() for task in again]
    with pytest.raises(ConfigError, match=r"--validation_fraction=0 leaves the tasks of --tasks=in_order:2 without"):
        split(IncrementalConfig(tasks="in_order:2"), validation_fraction=0.0)
    info = dataclasses.replace(source().info, files=("a", "b", "c"), records_per_file=(4, 12, 8))
    of_files = dataclasses.replace(source(), info=info)
    made = split(IncrementalConfig(tasks="by_file:2"), of_files)
    assert [(task.name, *whole(task)) for task in made] == [("files 1-2", 0, 15), ("file 3", 16, 23)]
    with pytest.raises(ConfigError, match=r"has no files. Use by_class:N"):
        split(IncrementalConfig(tasks="by_file:1"))


@pytest.mark.parametrize("wrong", ["by_class", "by_class:0", "by_size:2", "by_file:x"])
def test_wrong_tasks_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"--tasks='{wrong}' is not KIND:NUMBER"):
        IncrementalConfig(tasks=wrong)


def test_options_of_another_method_are_refused():
    with pytest.raises(ConfigError, match=r"--ewc_strength=5.0 is an option of --method=ewc, and .*finetune does"):
        IncrementalConfig(method="finetune", ewc_strength=5.0)
    with pytest.raises(ConfigError, match=r"--replay_policy=reservoir is an option of --method=replay"):
        IncrementalConfig(method="lwf", replay_policy="reservoir")
    assert IncrementalConfig(method="ewc", ewc_strength=5.0).ewc_strength == 5.0
    for field in dataclasses.fields(IncrementalConfig):  # what --help says agrees
        method = field.metadata["help"].partition(":")[0]
        assert method not in METHODS or field.name in METHODS[method]


def test_examples_without_a_class_each_are_refused():
    with pytest.raises(ConfigError, match="needs examples with one class each"):
        tasks.labels_of(from_arrays(np.zeros([4, 2], np.float32), np.zeros([4, 2], np.float32)))


def test_parts_and_joined_parts_are_sources():
    part = tasks.chosen(source(), np.array([20, 3, 7]), "some")
    np.testing.assert_array_equal(fetched(part)[0], [20, 3, 7])
    both = tasks.joined(part, tasks.chosen(source(), np.array([1, 2]), "others"), 3, "both")
    assert both.info.num_examples == 9
    np.testing.assert_array_equal(fetched(both, [8, 0, 3, 4, 2])[0], [2, 20, 1, 2, 7])
    np.testing.assert_array_equal(fetched(both, [5, 7])[0], [1, 1])  # of one source alone
    assert len({each.info.fingerprint for each in (source(), part, both)}) == 3


def damaged(place: int = 7, *, skip: bool):
    """The source, in files of which one example cannot be read."""
    whole = source()

    def read(indices):
        check = tf.debugging.Assert(tf.reduce_all(indices != place), ["the file ends too soon"])
        with tf.control_dependencies([check] if check is not None else []):
            return whole.read(tf.identity(indices))

    info = dataclasses.replace(whole.info, storage="files")
    return dataclasses.replace(whole, info=info, read=read, skip=skip)


def test_an_example_that_cannot_be_read_is_named_or_skipped():
    with pytest.raises(BadRecordError, match=r"train example 7 cannot be read: .*the file ends too soon"):
        tasks.labels_of(damaged(skip=False))
    expected = np.where(np.arange(24) == 7, 0, LABELS)
    np.testing.assert_array_equal(tasks.labels_of(damaged(skip=True)), expected)
    assert replay.room_for(damaged(0, skip=True), 10, 24) == 2


def test_a_bad_example_that_is_kept_in_memory_has_its_number_in_a_part():
    whole = source()
    x = np.arange(48, dtype=np.float32).reshape([24, 2])
    x[7] = np.nan

    def read(indices):
        return tf.gather(tf.constant(x), indices), tf.gather(tf.constant(LABELS), indices)

    info = dataclasses.replace(whole.info, storage="files")
    stored = dataclasses.replace(whole, info=info, read=read, load=lambda: None, skip=True)
    kept = memory.keep_in_memory(stored, 12)
    part = tasks.chosen(kept, np.array([20, 3, 7]), "some")
    both = tasks.joined(part, tasks.chosen(kept, np.array([7, 2]), "others"), 20, "both")
    for made, expected in ((part, [2]), (both, [2, *range(3, 43, 2)])):
        found = locate_bad_example(made, range(made.info.num_examples), limit=100)
        assert [bad.index for bad in found] == expected
        assert {bad.reason for bad in found} == {"has NaN or infinity in its input (2 of 2 values)"}


@pytest.mark.parametrize("policy", ["balanced", "reservoir"])
def test_what_is_kept(policy):
    labels = np.concatenate([np.zeros(300, np.int64), np.ones(100, np.int64), np.full(100, 2)])
    made = [tasks.Task(str(place), part, part, ()) for place, part in enumerate(np.split(np.arange(500), [300, 400]))]
    kept = [replay.kept_examples(made[:count], labels, 60, policy=policy, seed=7) for count in (1, 2, 3)]
    assert [len(each) for each in kept] == [60, 60, 60]
    counts = np.bincount(labels[kept[2]], minlength=3)
    if policy == "balanced":
        np.testing.assert_array_equal(counts, [20, 20, 20])
    else:
        assert 25 < counts[0] < 47  # of 36 expected
    # Nothing comes back that had been let go.
    old = [set(each[labels[each] == 0]) for each in kept]
    assert old[2] <= old[1] <= old[0]
    assert replay.kept_examples(made, labels, 1000, policy=policy, seed=7).tolist() == list(range(500))
    assert replay.room_for(source(), 200, 120) == 10  # of 12 bytes each
    with pytest.raises(ConfigError, match=r"--replay_bytes=11 holds no example: .* Use --replay_bytes=12 or more"):
        replay.room_for(source(), 200, 11)
    mixed = replay.with_replay(source(), tasks.Task("b", np.arange(12, 24), np.arange(2), ()), np.array([1, 5, 6]))
    np.testing.assert_array_equal(np.bincount((fetched(mixed)[0] < 12).astype(int)), [12, 12])
    few = replay.with_replay(source(), tasks.Task("b", np.arange(20, 24), np.arange(2), ()), np.arange(12))
    assert sorted(fetched(few)[0] < 12) == [False] * 4 + [True] * 4


def test_the_fisher_information_is_that_of_logistic_regression():
    """Of a linear model, in closed form: E[(p - y)² x²] with y drawn from p is p (1 - p) x²."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    data = source()
    scaled = dataclasses.replace(data, scale=0.01)
    indices = np.tile(np.arange(24), 100)
    kernel, bias = consolidation.fisher_information(model, scaled, indices, seed=3)
    x = scaled.fetch(tf.range(24, dtype=tf.int64))[0].numpy()
    odds = tf.nn.softmax(model(x)).numpy()
    variance = odds * (1.0 - odds)
    np.testing.assert_allclose(bias, variance.mean(axis=0), rtol=0.1)
    np.testing.assert_allclose(kernel, np.einsum("nc,nf->fc", variance, x**2) / 24, rtol=0.15)


def test_too_little_room_for_all_classes_leaves_out_any_of_them(caplog):
    """Not always the last ones; what had been let go does not come back with more classes."""
    labels = np.arange(1200) % 12
    made = [tasks.Task(str(place), np.flatnonzero(labels // 4 == place), np.zeros(0), ()) for place in range(3)]
    kept = set()
    for seed in range(20):
        of_seed = [
            replay.kept_examples(made[:count], labels, 6, policy="balanced", seed=seed).tolist() for count in (1, 2, 3)
        ]
        assert [len(each) for each in of_seed] == [6, 6, 6]
        assert len({*labels[of_seed[2]]}) == 6
        assert {example for example in of_seed[2] if labels[example] < 8} <= {*of_seed[1]}
        kept.update(labels[of_seed[2]])
    assert kept == {*range(12)}
    assert "room for 6 examples, and 12 classes have come: 6 of them are not kept at all" in caplog.text
    assert "and 4 classes" not in caplog.text


class Untrained(keras.Model):
    """A model whose `call` takes no `training`."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4)

    def call(self, inputs):
        return self.dense(inputs)


def test_the_fisher_information_is_that_of_any_model():
    """Whether or not its `call` takes `training`."""
    keras.utils.set_random_seed(1)
    plain, own = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4)]), Untrained()
    own(np.zeros([1, 2], np.float32))
    own.set_weights(plain.get_weights())
    informations = (
        consolidation.fisher_information(model, dataclasses.replace(source(), scale=0.01), np.arange(5), seed=3)
        for model in (plain, own)
    )
    for one, other in zip(*informations, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_the_fisher_information_leaves_out_skipped_examples_and_takes_any_seed():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4)])
    of_two, of_three, other = (
        consolidation.fisher_information(model, damaged(skip=skip), np.array(indices), seed=seed)
        for skip, indices, seed in ((False, [3, 5], 5), (True, [3, 5, 7], 5), (False, [3, 5], 5_000_000_000))
    )
    for one, same in zip(of_two, of_three, strict=True):
        np.testing.assert_allclose(one, same, rtol=1e-6)
    assert all(np.isfinite(each).all() for each in other)


def test_one_parabola_stands_for_those_of_all_tasks(tmp_path):
    """Also where the head has grown between them."""
    random = np.random.default_rng(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.5))])
    informations = [
        [random.uniform(size=[2, width]).astype(np.float32), np.zeros(width, np.float32)] for width in (2, 3)
    ]
    anchors = [[random.normal(size=[2, width]).astype(np.float32), np.ones(width, np.float32)] for width in (2, 3)]
    held = consolidation.Consolidation([], [])
    for information, anchor in zip(informations, anchors, strict=True):
        held = held.with_task(information, anchor)
    held.save(tmp_path / "held.npz")
    held = consolidation.Consolidation.load(tmp_path / "held.npz")

    def expected(kernel):
        parts = [
            information[0] * (kernel[:, : information[0].shape[1]] - anchor[0]) ** 2
            for information, anchor in zip(informations, anchors, strict=True)
        ]
        return 0.5 * 10.0 * sum(part.sum() for part in parts) + 0.5 * (kernel**2).sum()

    held.hold(model, 10.0)
    held.hold(model, 10.0)  # twice is once
    values = []
    for _ in range(2):
        kernel = random.normal(size=[2, 3]).astype(np.float32)
        model.layers[0].kernel.assign(kernel)
        values.append((float(sum(model.losses)), expected(kernel)))
    assert values[0][0] - values[1][0] == pytest.approx(values[0][1] - values[1][1], rel=1e-4)  # but for a constant


def test_distillation_is_that_of_the_paper():
    random = np.random.default_rng(0)
    logits, earlier = random.normal(size=[5, 4]), random.normal(size=[5, 3])
    made = distillation.with_logits(source(5), earlier, "the digest of a model")
    x, y = made.fetch(tf.range(5, dtype=tf.int64))
    assert made.info.label_spec == tf.TensorSpec([4], tf.float32)
    np.testing.assert_array_equal(y[:, 0], LABELS[:5])
    loss = distillation.DistillationLoss(0.7, 2.0)(y, tf.constant(logits, tf.float32))

    def log_softmax(values):
        return values - np.log(np.exp(values).sum(axis=1, keepdims=True))

    label = -log_softmax(logits)[np.arange(5), LABELS[:5]]
    kept = -(np.exp(log_softmax(earlier / 2.0)) * log_softmax(logits[:, :3] / 2.0)).sum(axis=1)
    assert float(loss) == pytest.approx(np.mean(label + 0.7 * 4.0 * kept), rel=1e-5)
    metric = distillation.accuracy_beside_logits()
    metric.update_state(y, tf.one_hot([0, 1, 2, 0, 0], 4))
    assert float(metric.result()) == pytest.approx(4 / 5)
    assert x.shape == (5, 2)


def test_figures_of_a_matrix():
    matrix = np.array([[1.0, np.nan, np.nan], [0.5, 0.9, np.nan], [0.6, 0.7, 0.8]])
    assert results.figures_of(matrix) == pytest.approx(
        {"average_accuracy": 0.7, "forgetting": (0.4 + 0.2) / 2, "backward_transfer": (-0.4 - 0.2) / 2}
    )
    assert results.figures_of(matrix[:1, :1]) == {
        "average_accuracy": 1.0,
        "forgetting": None,
        "backward_transfer": None,
    }
    assert results.as_rows(matrix)[0] == [1.0, None, None]
    assert results.picture(matrix, ["one", "two", "three"]).shape == (1, 238, 238, 3)
    assert results.picture(matrix, [f"{number}: classes 0-1" for number in range(3)]).shape == (1, 238, 238, 3)
    assert "60.0   70.0   80.0" in results.table(matrix, ["one", "two", "three"])


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["1: part 1", "2: part 2"], ["1: part 1", "2: part 2"]),
        (["1: classes 0-1", "2: classes 2-3"], ["classes 0-1", "classes 2-3"]),
        (["1: classes 0-9", "10: classes 90-99"], ["1: 0-9", "10: 90-99"]),
        (["1: classes 0, 2, 4, 6, 8, 10, 12, 14", "2: class 1"], ["1", "2"]),
    ],
)
def test_a_picture_shows_the_longest_names_that_fit(names, labels):
    assert results.labels(names) == labels
    np.testing.assert_array_equal(results.picture(np.eye(2), names), results.picture(np.eye(2), labels))


def test_groups_of_classes_are_named_by_their_ranges():
    labels = np.array([0, 1, 2, 3, 5, 7, 8, 9] * 3, np.int32)
    examples = from_arrays(np.zeros([24, 2], np.float32), labels)
    made = tasks.split_tasks(IncrementalConfig(tasks="by_class:7"), examples, examples, validation_fraction=0.1)
    assert [task.name for task in made] == ["classes 0-3, 5, 7-8", "class 9"]


@pytest.mark.parametrize("in_files", [False, True])
def test_labels_of_examples_that_are_skipped_are_no_classes(in_files):
    """Neither in memory nor in files; each would be a task that nothing can be learned from."""
    labels = np.arange(24, dtype=np.int32) % 4
    labels[[5, 9]] = 9, -1
    x = np.zeros([24, 2], np.float32)
    skipping = from_arrays(x, labels, num_classes=4, on_bad_record="skip")
    if in_files:
        stored = dataclasses.replace(skipping, usable=None, load=lambda: None)
        skipping = dataclasses.replace(stored, info=dataclasses.replace(stored.info, storage="files"))
    expected = np.where((labels < 0) | (labels > 3), 0, labels)
    np.testing.assert_array_equal(tasks.labels_of(skipping), expected)
    good = from_arrays(x, np.arange(24) % 4)
    made = tasks.split_tasks(IncrementalConfig(tasks="by_class:2"), skipping, good, validation_fraction=0.1)
    assert [task.name for task in made] == ["classes 0-1", "classes 2-3"]
