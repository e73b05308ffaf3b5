"""Keras' methods of a model whose variables are divided: whole files, and refusals in place of parts."""

from __future__ import annotations

from tests.integration.scripts import divided, divided_models
from tfpar.config import ConfigError

import keras
import numpy as np
import pytest


@pytest.mark.parametrize(("mesh", "options"), [("model:2", {}), ("", {"shard": "weights"})])
def test_a_divided_model_is_saved_whole_and_computes_through_its_trainer(mesh, options, tmp_path):
    trainer, path = divided.here("mirrored", mesh, 2, steps=2, **options), tmp_path / "model.keras"
    x, y = (part[:8] for part in divided_models.data("dense"))
    trainer.model.save(path)
    loaded = keras.saving.load_model(path)
    np.testing.assert_allclose(loaded.predict(x, verbose=0), trainer.predict(x), rtol=1e-5, atol=1e-6)
    for method, arguments in {
        "predict": (x,),
        "predict_on_batch": (x,),
        "evaluate": (x, y),
        "test_on_batch": (x, y),
        "fit": (x, y),
        "train_on_batch": (x, y),
    }.items():
        with pytest.raises(ConfigError, match=rf"model\.{method} would use parts .* trainer\.(fit|evaluate|predict)"):
            getattr(trainer.model, method)(*arguments)
    with pytest.raises(ConfigError, match=r"save_weights .* trainer\.model\.save"):
        trainer.model.save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(ConfigError, match=r"export .* WORKDIR/model\.keras"):
        trainer.model.export(tmp_path / "exported")
    with pytest.raises(ConfigError, match=r"as a \.keras file"):
        trainer.model.save(tmp_path / "model.h5")
    with pytest.raises(ConfigError, match="the file exists"):
        trainer.model.save(path, overwrite=False)
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_model_of_whole_weights_keeps_its_methods(tmp_path):
    trainer = divided.here("mirrored", "pipeline:2", 2, steps=2)
    x = divided_models.data("dense")[0][:8]
    np.testing.assert_allclose(trainer.model.predict(x, verbose=0), trainer.predict(x), rtol=1e-5, atol=1e-5)
    trainer.model.save(tmp_path / "model.keras")
    np.testing.assert_allclose(
        keras.saving.load_model(tmp_path / "model.keras").predict(x, verbose=0),
        trainer.predict(x),
        rtol=1e-5,
        atol=1e-5,
    )
