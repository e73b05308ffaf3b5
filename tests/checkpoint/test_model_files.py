"""`.keras` files: that they load after `import tfpar`, a warning for those that will not, what they were trained on."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile

from tfpar import models
from tfpar.checkpoint.checkpointer import Checkpoint, Checkpointer
from tfpar.checkpoint.export import export_model
from tfpar.checkpoint.model_files import examples_of_run, load_model, unloadable_parts
from tfpar.config import ConfigError, ExperimentConfig

import keras
import numpy as np
import pytest

layers = keras.layers


def language_model() -> keras.Model:
    spec = models.TaskSpec(task="language_model", input_shape=(8,), input_dtype="int32", num_classes=16)
    return models.build("transformer_lm_tiny", spec, depth=1, width=8, heads=2)


@pytest.mark.parametrize(
    "imports",
    [
        "import tfpar; import keras",
        "import keras; import tfpar",
        "import tfpar; tfpar.DistributedOptimizer; import keras",
        "from tfpar.inputs import load; import keras",
    ],
)
def test_a_language_model_loads_after_import_tfpar(imports, tmp_path):
    made = language_model()
    path = tmp_path / "model.keras"
    export_model(made, made.trainable_variables, path)
    tokens = np.arange(8, dtype=np.int32)[None]
    np.save(tmp_path / "expected.npy", made(tokens))
    code = (
        f"{imports}; import numpy as np\n"
        f"outputs = keras.saving.load_model({str(path)!r})(np.arange(8, dtype=np.int32)[None])\n"
        f"np.testing.assert_allclose(outputs, np.load({str(tmp_path / 'expected.npy')!r}), rtol=1e-5, atol=1e-6)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


class Unregistered(layers.Layer):
    def call(self, x):
        return x


class UnregisteredModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(x)


def doubled(x):
    return 2 * x


def subclassed() -> keras.Model:
    made = UnregisteredModel()
    made(np.zeros((1, 2), np.float32))
    return made


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: keras.Sequential([keras.Input((2,)), Unregistered()]), "Unregistered"),
        (lambda: keras.Sequential([keras.Input((2,)), layers.Dense(1, activation=doubled)]), "doubled"),
        (lambda: keras.Sequential([keras.Input((2,)), layers.Lambda(lambda x: x)]), "a Lambda layer"),
        (subclassed, "UnregisteredModel"),
    ],
)
def test_a_file_that_will_not_load_is_warned_about_when_it_is_written(build, named, tmp_path, messages):
    made = build()
    export_model(made, made.trainable_variables, tmp_path / "model.keras")
    assert any(
        line.startswith("WARNING") and f"because of {named}" in line.replace(f"{__name__}.", "") for line in messages
    )
    with pytest.raises((TypeError, ValueError)):
        keras.saving.load_model(tmp_path / "model.keras")


def test_what_loads_is_not_warned_about(tmp_path, messages):
    for made in (
        language_model(),
        keras.Sequential([keras.Input((2,)), layers.Dense(1, "gelu", kernel_regularizer="l2")]),
    ):
        made.compile("adamw", "mse")
        assert unloadable_parts(made) == []
        export_model(made, made.trainable_variables, tmp_path / "model.keras")
        assert keras.saving.load_model(tmp_path / "model.keras").count_params() == made.count_params()
    assert not messages


# What a model was trained on


def test_a_model_is_evaluated_on_what_its_run_held_out(tmp_path):
    flat = {
        "dataset": "text:corpus",
        "validation_fraction": 0.05,
        "sequence_length": 64,
        "seed": 3,
        "learning_rate": 0.5,
    }
    ran = ExperimentConfig.from_flat_dict(flat)
    path = str(tmp_path / "model.keras")
    plain = ExperimentConfig.from_flat_dict({"dataset": "digits", "sequence_length": 32})
    with pytest.raises(ConfigError, match=r"it is not in the workdir of a run, .* --dataset=\.\.\."):
        examples_of_run(plain, path, lambda name: False)
    writer = Checkpointer(tmp_path, keep=1)
    writer.save(Checkpoint(1, {}, {}, {}, ran.as_flat_dict()))
    writer.close()
    found = examples_of_run(plain, path, lambda name: name == "sequence_length").as_flat_dict()
    assert found == {
        **plain.as_flat_dict(),
        **{name: flat[name] for name in ("dataset", "validation_fraction", "seed")},
    }
    in_folder = str(tmp_path / "exports" / "newest" / "model.keras")  # of an online run
    assert examples_of_run(plain, in_folder, lambda name: name == "sequence_length").as_flat_dict() == found
    assert examples_of_run(plain, path, lambda name: name == "dataset") == plain  # other data


def test_a_model_of_a_program_is_evaluated_on_what_is_given(tmp_path):
    ran = ExperimentConfig.from_flat_dict({"dataset": "custom", "validation_fraction": 0.4})
    writer = Checkpointer(tmp_path, keep=1)
    writer.save(Checkpoint(1, {}, {}, {}, ran.as_flat_dict()))
    writer.close()
    plain, path = ExperimentConfig(), str(tmp_path / "model.keras")
    with pytest.raises(ConfigError, match=r"had examples of a program's own.* If only a program has"):
        examples_of_run(plain, path, lambda name: False)
    assert examples_of_run(plain, path, lambda name: name == "dataset") == plain


# Whether a model fits the examples


SPEC = models.TaskSpec(task="classification", input_shape=(32, 32, 3), input_dtype="float32", num_classes=4)


def images(*sizes: int | None, classes: int | None = 4) -> keras.Model:
    inputs = [keras.Input((size, size, 3)) for size in sizes]
    pooled = [layers.GlobalAveragePooling2D()(each) for each in inputs]
    return keras.Model(inputs if len(sizes) > 1 else inputs[0], layers.Dense(classes)(sum(pooled)))


def two_outputs() -> keras.Model:
    made = images(32)
    return keras.Model(made.inputs[0], [made.outputs[0], made.outputs[0] * 2.0])


def saved(made: keras.Model, tmp_path) -> str:
    made.save(tmp_path / "m.keras")
    return str(tmp_path / "m.keras")


@pytest.mark.parametrize("size", [32, None])
def test_a_model_of_images_of_any_size_fits(size, tmp_path):
    assert load_model(saved(images(size), tmp_path), SPEC).count_params() == 16


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: images(16), r"takes inputs \(16, 16, 3\) and gives 4 outputs; the data set has inputs \(32, 32, 3\)"),
        (lambda: images(None, classes=5), r"takes inputs \(None, None, 3\) and gives 5 outputs; .* 4 classes"),
        (
            lambda: images(32, 32),
            r"has a model with 2 x input and 1 x output; the data set has one input and one label",
        ),
        (two_outputs, r"has a model with 1 x input and 2 x output"),
        (lambda: keras.Sequential([layers.Dense(4)]), r"inputs and outputs are not known before it is called"),
    ],
)
def test_a_model_for_other_examples_is_refused(build, error, tmp_path):
    with pytest.raises(ConfigError, match=rf"--model_file=.*m\.keras .*{error}"):
        load_model(saved(build(), tmp_path), SPEC)


@pytest.mark.parametrize("changed", [{"layers": 3}, {"output_layers": ["dense", 5, 5]}, {"output_layers": []}])
def test_a_file_that_keras_stumbles_over_is_refused(changed, tmp_path):
    path = saved(images(32), tmp_path)
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    model = json.loads(content["config.json"])
    content["config.json"] = json.dumps({**model, "config": {**model["config"], **changed}}).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in content.items():
            archive.writestr(name, value)
    with pytest.raises(ConfigError, match=r"--model_file=.*m\.keras cannot be loaded: "):
        load_model(path)
