"""`.keras` files: that they load after `import tfpar`, and a warning for those that will not."""

from __future__ import annotations

import subprocess
import sys

from tfpar import models
from tfpar.checkpoint.export import export_model
from tfpar.checkpoint.model_files import unloadable_parts

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
