"""Between variables and checkpoints: all or none, named mismatches, warm starts, the hash of the weights."""

from __future__ import annotations

import hashlib
import pathlib
import zipfile

from tests.training.harness import strategy_of
from tests.training.trainers import model as small_model
from tests.training.trainers import source, trainer_of
from tfpar.checkpoint import names, run_state
from tfpar.checkpoint.checkpointer import Checkpoint, Checkpointer
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.monitor import summary

import keras
import numpy as np
import pytest


def model(
    classes: int = 3, *, layers: tuple[str, ...] = ("body", "norm", "head"), width: int = 4, name: str | None = "net"
) -> keras.Model:
    """Body, normalisation and head; with name=None Keras counts: sequential, sequential_1, ..."""
    body, norm, head = layers
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(width, name=body),
            keras.layers.BatchNormalization(name=norm),
            keras.layers.Dense(classes, name=head),
        ],
        name=name,
    )


def filled(made: keras.Model, seed: int = 1) -> keras.Model:
    generator = np.random.default_rng(seed)
    made.set_weights([generator.normal(size=value.shape) for value in made.get_weights()])
    return made


def variables_of(made: keras.Model) -> dict[str, keras.Variable]:
    return run_state.named(made.variables, "model")


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


# named, snapshot, restore


def test_names_are_paths_and_never_collide():
    made = model()
    named = variables_of(made)
    assert list(named)[:2] == ["model/net/body/kernel", "model/net/body/bias"]
    assert list(named.values()) == made.variables
    twins = [keras.Variable(np.zeros(1), name="twin") for _ in range(3)]
    assert list(run_state.named(twins, "x")) == ["x/twin", "x/twin#1", "x/twin#2"]


def test_a_snapshot_does_not_follow_the_variables():
    made = filled(model())
    before = [value.copy() for value in made.get_weights()]
    taken = run_state.snapshot(variables_of(made))
    made.set_weights([value + 1 for value in before])
    assert same(list(taken.values()), before)
    assert all(value.flags["C_CONTIGUOUS"] and value.flags["OWNDATA"] for value in taken.values())


@pytest.mark.parametrize("replicas", [1, 3])
def test_restore_brings_every_replica_back(replicas):
    strategy = strategy_of(replicas)
    with strategy.scope():
        made = model()
        optimizer = keras.optimizers.Adam()
        optimizer.build(made.trainable_variables)
    variables = {**variables_of(made), **run_state.named(optimizer.variables, "optimizer")}
    generator = np.random.default_rng(2)
    wanted = {
        name: generator.integers(1, 9, variable.shape).astype(variable.numpy().dtype)
        for name, variable in variables.items()
    }
    run_state.restore(variables, wanted)
    for name, variable in variables.items():
        copies = strategy.experimental_local_results(variable.value)
        assert len(copies) == replicas
        for copy in copies:
            np.testing.assert_array_equal(copy.numpy(), wanted[name], err_msg=name)
    assert same(list(run_state.snapshot(variables).values()), list(wanted.values()))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda saved: saved.pop("model/net/head/bias"), "missing model/net/head/bias"),
        (lambda saved: saved.update({"model/net/tail/bias": np.zeros(3)}), "unexpected model/net/tail/bias"),
        (
            lambda saved: saved.update({"model/net/head/kernel": np.zeros((4, 7))}),
            r"model/net/head/kernel: saved \(4, 7\), model has \(4, 3\)",
        ),
        (
            lambda saved: saved.update({"model/net/head/bias": np.zeros((3, 1))}),
            r"model/net/head/bias: saved \(3, 1\), model has \(3,\)",
        ),
    ],
)
def test_restore_takes_all_or_none_and_names_what_does_not_fit(spoil, message):
    made = filled(model())
    before = [value.copy() for value in made.get_weights()]
    saved = {name: value + 1 for name, value in run_state.snapshot(variables_of(made)).items()}
    spoil(saved)
    with pytest.raises(ConfigError, match=message):
        run_state.restore(variables_of(made), saved)
    assert same(made.get_weights(), before)


def test_a_long_list_of_mismatches_is_cut():
    saved = run_state.snapshot(variables_of(model(layers=("a", "b", "c"))))
    with pytest.raises(ConfigError) as caught:
        run_state.restore(variables_of(model()), saved)
    message = str(caught.value)
    assert message.count("missing") + message.count("unexpected") == 8
    assert "and 8 more" in message  # 8 missing and 8 unexpected


def test_other_data_is_refused():
    config = ExperimentConfig.from_flat_dict({"dataset": "digits", "workdir": "runs/a"})
    run_state.check_data({"input": {"fingerprint": "abc"}}, "abc", config)
    with pytest.raises(ConfigError, match=r"--dataset=digits: .*runs/a.*class_weight.*another --workdir"):
        run_state.check_data({"input": {"fingerprint": "abc"}}, "abd", config)


# warm_start


def save_run(workdir: pathlib.Path, made: keras.Model, *, steps: tuple[int, ...] = (3,), best: int = 0) -> None:
    """Checkpoints of a run: at each step all weights are the model's plus the step."""
    writer = Checkpointer(workdir, keep=9)
    for step in steps:
        arrays = {name: value + step for name, value in run_state.snapshot(variables_of(made)).items()}
        arrays["optimizer/SGD/iterations"] = np.asarray(step)
        writer.save(Checkpoint(step, arrays, {}, {"variables": list(arrays)}, {}), best=step == best)
    writer.close()


def test_warm_start_from_a_workdir_takes_its_best_checkpoint(tmp_path):
    source, target, said = filled(model()), model(), []
    save_run(tmp_path, source, steps=(1, 2, 3), best=2)
    run_state.warm_start(target, str(tmp_path), said.append)
    assert same(target.get_weights(), [value + 2 for value in source.get_weights()])
    assert said == [f"warm start from {tmp_path}: 8 of 8 weights taken"]


@pytest.mark.parametrize("options", [{}, {"strategy": "mirrored", "devices": 2, "shard": "optimizer"}])
def test_warm_start_from_a_run_with_averages_takes_them(tmp_path, options):
    trainer_of(ema=0.5, learning_rate=0.1, workdir=str(tmp_path), **options).fit(source(), steps=4)
    exported, target, said = keras.saving.load_model(tmp_path / "model.keras"), small_model(), []
    run_state.warm_start(target, str(tmp_path), said.append)
    assert same(target.get_weights(), exported.get_weights())
    assert said[0] == f"warm start from {tmp_path}: taking the moving averages of 6 weights, as evaluation did there"


def test_averages_belong_to_weights_of_equal_names_in_order():
    weights = ["model/a/b_c/kernel", "model/a_b/c/kernel", "model/fc/kernel", "model/fc/kernel#3", "model/frozen/bias"]
    averages = ["optimizer/adam/a_b_c_kernel_average", "optimizer/adam/a_b_c_kernel_average#7"]
    found = names.averages_among([*weights, *averages, "optimizer/adam/fc_kernel_average"])
    assert found == dict(zip(weights[:2], averages, strict=True))  # whose the last one is cannot be known


def test_warm_start_normalises_by_the_statistics_it_took(tmp_path):
    def normalizing() -> keras.Model:
        return keras.Sequential([keras.Input((2,)), keras.layers.Normalization(name="norm")], name="net")

    source, target = filled(normalizing()), normalizing()
    source.get_layer("norm").adapt_variance.assign([4.0, 9.0])
    save_run(tmp_path, source, steps=(0,))
    run_state.warm_start(target, str(tmp_path), print)
    wanted = (np.ones((1, 2)) - target.get_layer("norm").adapt_mean.numpy()) / [2.0, 3.0]
    np.testing.assert_allclose(target(np.ones((1, 2), np.float32)), wanted, rtol=1e-6)


def twins(seed: int, sizes: tuple[int, int] = (4, 4)) -> keras.Model:
    """Two functional models whose layers have the same names, and so the same paths."""
    made = []
    for size, name in zip(sizes, ("left", "right"), strict=True):
        one = keras.Input((size,))
        made.append((one, keras.Model(one, keras.layers.Dense(4, name="fc")(one), name=name)))
    inputs = [keras.Input(one.shape[1:]) for one, _ in made]
    outputs = [tower(each) for (_, tower), each in zip(made, inputs, strict=True)]
    return filled(keras.Model(inputs, keras.layers.add(outputs)), seed)


@pytest.mark.parametrize("kind", ["workdir", "model.keras"])
def test_warm_start_takes_all_weights_of_layers_with_equal_paths(tmp_path, kind):
    source, target, said = twins(1), twins(2), []
    if kind == "workdir":
        save_run(tmp_path, source, steps=(0,))
    else:
        source.save(tmp_path / kind)
    run_state.warm_start(target, str(tmp_path if kind == "workdir" else tmp_path / kind), said.append)
    assert same(target.get_weights(), source.get_weights())
    assert said[0].endswith(": 4 of 4 weights taken")


def test_saved_names_are_matched_whatever_else_was_named():
    saved = ["m/fc", "m/fc#11", "m/fc#3", "m/head"]
    assert names.saved_names(["m/fc", "m/fc#1", "m/fc#2", "m/new"], saved) == {
        "m/fc": "m/fc",
        "m/fc#1": "m/fc#3",
        "m/fc#2": "m/fc#11",
    }


def test_parts_of_one_variable_have_the_names_of_worker_0():
    """Keras counts names over a whole process. What differs otherwise is another model."""
    first = ["model/sequential/dense/kernel", "model/sequential/dense/bias", "optimizer/iteration"]
    second = ["model/sequential_3/dense_7/kernel", "model/sequential_3/dense_7/bias", "optimizer/iteration"]
    assert names.common_names([first, second]) == first
    with pytest.raises(ConfigError, match=r"on worker 1 than on worker 0: 'model/net/head' is 'model/net/body' there"):
        names.common_names([["model/net/body"], ["model/net/head"]])
    with pytest.raises(ConfigError, match=r"on worker 2 .* 'model/extra'"):
        names.common_names([["model/a"], ["model/a"], ["model/a", "model/extra"]])


def test_each_of_several_weights_with_one_path_has_a_digest():
    weights = twins(1).weights
    (digests,) = summary.weight_digests(strategy_of(1), weights)
    assert len(set(digests)) == 4


def test_warm_start_from_a_workdir_without_a_best_takes_the_newest(tmp_path):
    source, target = filled(model()), model()
    save_run(tmp_path, source, steps=(1, 2, 3))
    run_state.warm_start(target, str(tmp_path), print)
    assert same(target.get_weights(), [value + 3 for value in source.get_weights()])


def test_warm_start_from_one_checkpoint(tmp_path):
    source, target = filled(model()), model()
    save_run(tmp_path, source, steps=(1, 2, 3), best=2)
    run_state.warm_start(target, str(tmp_path / "checkpoints" / "step-000000001"), print)
    assert same(target.get_weights(), [value + 1 for value in source.get_weights()])


@pytest.mark.parametrize("kind", ["workdir", "checkpoint", "keras"])
def test_a_head_for_other_classes_keeps_its_initial_values_and_is_named(tmp_path, kind):
    source, target, said = filled(model(classes=3)), model(classes=7), []
    initial = {variable.path: variable.numpy().copy() for variable in target.weights}
    if kind == "keras":
        path = tmp_path / "model.keras"
        source.save(path)
    else:
        save_run(tmp_path, source, steps=(0,))
        path = tmp_path if kind == "workdir" else tmp_path / "checkpoints" / "step-000000000"
    run_state.warm_start(target, str(path), said.append)
    wanted = {variable.path: variable.numpy() for variable in source.weights}
    for variable in target.weights:
        expected = initial if variable.path.startswith("net/head/") else wanted
        np.testing.assert_array_equal(variable.numpy(), expected[variable.path], err_msg=variable.path)
    assert said == [
        f"warm start from {path}: 6 of 8 weights taken; keeping their initial values: net/head/bias, net/head/kernel",
    ]


def test_a_keras_file_with_other_layer_names_is_matched_by_position(tmp_path):
    source, target = filled(model(layers=("x", "y", "z"))), model()
    source.save(tmp_path / "model.keras")
    run_state.warm_start(target, str(tmp_path / "model.keras"), print)
    assert same(target.get_weights(), source.get_weights())


@pytest.mark.parametrize("kind", ["workdir", "keras"])
def test_a_model_of_another_name_gets_each_weight_in_its_place(tmp_path, kind):
    """Keras names models sequential, sequential_1, ... in the order in which a process builds them."""
    source, target = filled(model(name=None)), model(name=None)
    assert not {v.path for v in source.weights} & {v.path for v in target.weights}
    path = tmp_path / "model.keras" if kind == "keras" else tmp_path
    source.save(path) if kind == "keras" else save_run(tmp_path, source, steps=(0,))
    run_state.warm_start(target, str(path), print)
    for theirs, ours in zip(source.weights, target.weights, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), err_msg=ours.path)


@pytest.mark.parametrize("kind", ["workdir", "keras"])
def test_layers_that_keras_counted_further_get_each_weight_in_its_place(tmp_path, kind):
    """`dense_1` of the one is `dense` of the other, though both have a `dense_1` of that shape."""
    shape = {"classes": 5, "width": 5}
    source = filled(model(layers=("dense", "norm", "dense_1"), **shape))
    target = model(layers=("dense_1", "norm", "dense_2"), **shape)
    path = tmp_path / "model.keras" if kind == "keras" else tmp_path
    source.save(path) if kind == "keras" else save_run(tmp_path, source, steps=(0,))
    run_state.warm_start(target, str(path), print)
    for theirs, ours in zip(source.weights, target.weights, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), err_msg=ours.path)


def test_warm_start_reaches_every_replica(tmp_path):
    source = filled(model())
    source.save(tmp_path / "model.keras")
    strategy = strategy_of(2)
    with strategy.scope():
        target = model()
    run_state.warm_start(target, str(tmp_path / "model.keras"), print)
    for theirs, ours in zip(source.weights, target.weights, strict=True):
        for copy in strategy.experimental_local_results(ours.value):
            np.testing.assert_array_equal(copy.numpy(), theirs.numpy())


def test_a_model_with_nothing_in_common_is_refused_and_left_alone(tmp_path):
    filled(model(classes=2, width=9)).save(tmp_path / "model.keras")
    target = filled(keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, name="other")]))
    before = [value.copy() for value in target.get_weights()]
    with pytest.raises(ConfigError, match=r"--warm_start=.*keras: none of its 8 weights has .* model's 2\. Name a run"):
        run_state.warm_start(target, str(tmp_path / "model.keras"), print)
    assert same(target.get_weights(), before)


@pytest.mark.parametrize(
    "source",
    ["absent", "absent.keras", "broken.keras", "zip.keras", "damaged", "damaged/checkpoints/step-000000001"],
)
def test_nothing_to_start_from_is_a_plain_error(tmp_path, source):
    (tmp_path / "broken.keras").write_text("not a zip file")
    with zipfile.ZipFile(tmp_path / "zip.keras", "w") as archive:
        archive.writestr("config.json", "{}")
    save_run(tmp_path / "damaged", model(), steps=(1,))
    (tmp_path / "damaged" / "checkpoints" / "step-000000001" / "state.safetensors").write_bytes(b"short")
    with pytest.raises(ConfigError, match="--warm_start=") as caught:
        run_state.warm_start(model(), str(tmp_path / source), print)
    assert str(tmp_path / source) in str(caught.value)


# params_sha256


def test_params_sha256_is_over_float32_bytes_in_path_order():
    """The contract: SHA-256 over the float32 bytes of the trainable weights in path order."""
    made = filled(model())
    content = b""
    for variable in sorted(made.trainable_variables, key=lambda variable: variable.path):
        content += np.asarray(variable.numpy()).astype("<f4").tobytes(order="C")
    expected = hashlib.sha256(content).hexdigest()
    assert run_state.params_sha256(made.trainable_variables) == expected
    assert run_state.params_sha256(made.trainable_variables[::-1]) == expected
    assert [v.path for v in made.trainable_variables] != sorted(v.path for v in made.trainable_variables)


def test_params_sha256_of_known_bytes():
    b, a = keras.Variable([1.0, -2.0], name="b"), keras.Variable(np.array([[0.5]], np.float32), name="a")
    # 0.5, then 1 and -2, little-endian IEEE 754.
    expected = hashlib.sha256(bytes.fromhex("0000003f0000803f000000c0")).hexdigest()
    assert run_state.params_sha256([b, a]) == expected


def test_params_sha256_sees_the_last_bit():
    made = filled(model())
    before = run_state.params_sha256(made.trainable_variables)
    kernel = made.trainable_variables[0]
    value = kernel.numpy().copy()
    value[0, 0] = np.nextafter(value[0, 0], np.float32(np.inf), dtype=np.float32)
    kernel.assign(value)
    assert run_state.params_sha256(made.trainable_variables) != before


# The run state of a manifest

SYNCHRONOUS = {
    "variables": ["model/a"],
    "input": {"fingerprint": "abc"},
    "loss_scale": {"scale": 1.0, "good_steps": 0},
    "loss": [1.5, 3],
    "plateau": None,
    "best": None,
    "skipped": 0,
    "workers": 2,
}
ASYNCHRONOUS = {"variables": ["model/a"], "input": {"fingerprint": "abc"}, "best": 0.5, "skipped": 1}


def test_a_complete_run_state_is_taken():
    assert run_state.checked(SYNCHRONOUS, synchronous=True) is SYNCHRONOUS
    assert run_state.checked(ASYNCHRONOUS, synchronous=False) is ASYNCHRONOUS


@pytest.mark.parametrize("count", [3, 3.0, 4.2])
def test_the_number_of_examples_of_a_loss_may_be_whole_or_not(count):
    """Earlier versions rounded it."""
    run = {**SYNCHRONOUS, "loss": [1.5, count]}
    assert run_state.checked(run, synchronous=True) is run


def test_an_incomplete_run_state_is_refused():
    fine = [("best", -1.5), ("plateau", {}), ("variables", []), ("variables", [None, None])]
    for key in SYNCHRONOUS:
        for value in (..., "x", -1.5, [], {}, [None, None]):
            if (key, value) not in fine:
                run = {name: part for name, part in {**SYNCHRONOUS, key: value}.items() if part is not ...}
                with pytest.raises(ConfigError, match=rf"no valid .*{key}|--strategy: the checkpoint is of"):
                    run_state.checked(run, synchronous=True)


def test_steps_of_one_worker_and_of_all_are_not_mixed():
    with pytest.raises(ConfigError, match=r"--strategy: the checkpoint is of an asynchronous run.*--warm_start"):
        run_state.checked(ASYNCHRONOUS, synchronous=True)
    with pytest.raises(ConfigError, match=r"--strategy: the checkpoint is of a synchronous run.*--warm_start"):
        run_state.checked(SYNCHRONOUS, synchronous=False)


def test_warm_start_from_a_run_whose_best_is_damaged_says_so_and_takes_the_newest(tmp_path):
    source, target, said = filled(model()), model(), []
    save_run(tmp_path, source, steps=(1, 2, 3), best=2)
    (tmp_path / "checkpoints" / "step-000000002" / "state.safetensors").write_bytes(b"short")
    run_state.warm_start(target, str(tmp_path), said.append)
    assert same(target.get_weights(), [value + 3 for value in source.get_weights()])
    assert "checkpoint of step 2" in said[0]
    assert "is damaged" in said[0]
