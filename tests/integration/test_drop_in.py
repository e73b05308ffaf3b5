"""Plain Keras `fit` in two real processes: what one process would have trained, and a plain word where it cannot be."""

from __future__ import annotations

import json
import pathlib
import re
import zipfile

from tests.integration.scripts import drop_in
from tests.integration.test_multi_worker import launch

import keras
import numpy as np
import pytest

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> pathlib.Path:
    """What the two workers left behind; one start for all tests."""
    path = tmp_path_factory.mktemp("drop_in")
    result = launch(2, "tests/integration/scripts/drop_in.py", str(path), timeout=400.0)
    assert result.returncode == 0, result.stdout + result.stderr
    return path


def workers(directory: pathlib.Path, name: str) -> list[dict[str, np.ndarray]]:
    return [dict(np.load(directory / f"{name}-{rank}.npz")) for rank in range(2)]


@pytest.mark.parametrize("name", drop_in.FITS)
def test_two_workers_equal_one_process_with_the_joint_batch(directory, name):
    first, second = workers(directory, name)
    expected = drop_in.fit(name, 2 * drop_in.BATCH)
    assert set(first) == set(second) == set(expected)
    assert {"log/loss", "log/mae", "log/val_loss", "log/val_mae"} <= set(expected)
    # Halves of a batch round otherwise in float16.
    tolerance = {"rtol": 1e-2, "atol": 1e-3} if name == "mixed_float16" else {"rtol": 1e-5, "atol": 1e-6}
    for key, value in expected.items():
        if key.startswith(("slot", "weight", "log/val")):
            assert np.isfinite(value).all(), key
        np.testing.assert_array_equal(first[key], second[key], err_msg=key)
        np.testing.assert_allclose(first[key], value, **tolerance, err_msg=key)


def test_rows_of_embeddings_travel_where_that_is_less(directory):
    """And only there: what Keras has accumulated is dense, and a small table is touched as a whole."""
    for rank in range(2):
        sent = json.loads((directory / f"sent-{rank}.json").read_text())
        for name in ("rows", "rows_scaled"):
            assert sent[name] < 0.3 * sent[f"{name}, dense"]
        for name in ("clipped", "rows_accumulated"):
            assert sent[name] == sent[f"{name}, dense"]
        assert sent["indexed"] == pytest.approx(sent["indexed, dense"], abs=8)


def test_rows_beside_a_codec(directory):
    """Rows are not encoded, and the other weights are too small to be."""
    first, second = workers(directory, "rows_int8")
    expected = drop_in.fit("rows", 2 * drop_in.BATCH)
    for key, value in expected.items():
        np.testing.assert_array_equal(first[key], second[key], err_msg=key)
        if key.startswith("weight"):
            np.testing.assert_allclose(first[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.parametrize(("name", "scale"), [("loss_scaled", 8.0), ("mixed_float16", 1024.0)])
def test_an_overflow_on_one_worker_is_skipped_by_both(directory, name, scale):
    first, _ = workers(directory, name)
    examples = 2 * drop_in.BATCH * drop_in.STEPS
    assert 0 < drop_in.OVERFLOW < examples
    assert np.isnan(first["log/loss"]).all()
    finite_steps = (drop_in.STEPS - 1) * drop_in.EPOCHS
    slots = [value for key, value in first.items() if key.startswith("slot") and value.shape == ()]
    assert finite_steps in slots
    assert scale / 2**drop_in.EPOCHS in slots


def test_an_evaluation_at_the_end_of_an_epoch_leaves_its_averages_alone(directory):
    expected = drop_in.evaluated(2 * drop_in.BATCH)
    for worker in workers(directory, "evaluated"):
        assert set(worker) == set(expected)
        for name, values in expected.items():
            np.testing.assert_allclose(worker[name], values, rtol=1e-5, err_msg=name)


def test_tensors_that_a_step_of_ones_own_returns_are_averaged(directory):
    """Also under the name of the mean that Keras makes for every model, which such a step does not update."""
    first, second = workers(directory, "own_step")
    for name in ("loss", "kl_loss"):
        expected = (first[f"own/{name}"] + second[f"own/{name}"]) / 2.0
        assert (expected > 0.5).all()
        for worker in (first, second):
            np.testing.assert_allclose(worker[f"log/{name}"], expected, rtol=1e-12)


def test_a_model_with_an_optimizer_for_each_part_equals_one_process(directory):
    first, second = workers(directory, "gan")
    expected = drop_in.gan(2 * drop_in.BATCH)
    assert set(first) == set(second) == set(expected) >= {"log/d_loss", "log/g_loss"}
    for key, value in expected.items():
        np.testing.assert_array_equal(first[key], second[key], err_msg=key)
        np.testing.assert_allclose(first[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


def test_backups_of_every_worker_resume_after_the_broadcast(directory):
    expected, _ = workers(directory, "uninterrupted")
    for worker in workers(directory, "resumed"):
        for key, value in expected.items():
            np.testing.assert_array_equal(worker[key], value, err_msg=key)


def test_compressed_from_different_weights(directory):
    first, second = workers(directory, "int4")
    assert not np.array_equal(first.pop("before"), second.pop("before"))
    own = [float(worker.pop("own/val_loss")) for worker in (first, second)]
    for key, value in first.items():
        np.testing.assert_array_equal(value, second[key], err_msg=key)
    assert first["log/loss"][-1] < 0.1 * first["log/loss"][0]
    assert first["log/learning_rate"][-1] < first["log/learning_rate"][0]  # decided alike by both
    np.testing.assert_allclose(first["log/val_loss"][-1], (5 * own[0] + 14 * own[1]) / 19, rtol=1e-5)


def test_the_saved_model_knows_nothing_of_tfpar(directory):
    with zipfile.ZipFile(directory / "int4.keras") as archive:
        assert b"tfpar" not in archive.read("config.json")
    model = keras.models.load_model(directory / "int4.keras")
    assert type(model.optimizer) is keras.optimizers.Adam
    first, _ = workers(directory, "int4")
    for index, variable in enumerate(model.optimizer.variables):
        np.testing.assert_array_equal(variable.numpy(), first[f"slot/{index}"])
    x, y = drop_in.data()
    assert np.isfinite(model.fit(x, y, verbose=0).history["loss"]).all()


@pytest.mark.parametrize(
    ("misuse", "said"),
    [
        ("xla", "model.compile(..., jit_compile=False)"),
        ("xla, no callback", "model.compile(..., jit_compile=False)"),
        ("other model", "worker 1 and worker 0 train different models: 'sequential/dense/kernel (6, 33) float32' and"),
        ("other model, no callback", "worker 1 and worker 0 train different models"),
        ("other exchange", "worker 1 and worker 0 have different values of exchange, 'int8' and 'int4'"),
        ("other optimizer", "worker 1 and worker 0 have different values of momentum, '0.6' and '0.5'"),
        ("other weights", "worker 1 would start from other weights than worker 0. Put tfpar.BroadcastInitialWeights()"),
        ("other optimizer variables", "worker 1 would start from other optimizer variables than worker 0"),
        ("other callbacks", "(worker 0: BroadcastInitialWeights begins; worker 1: AverageMetrics begins)"),
        ("other end", "worker 0: BroadcastInitialWeights begins epoch 3; worker 1: BroadcastInitialWeights ends"),
        ("other first epoch", "workers resume at different epochs (worker 0: epoch 1; worker 1: epoch 2)"),
        ("other steps", "(steps x epochs: worker 0: 5 x 1; worker 1: 4 x 1)"),
        ("other learning rates", "Put AverageMetrics before the callbacks that decide"),
        (
            "a layer is unfrozen",
            "SGD was built without the variable sequential/dense/kernel: layers were unfrozen since",
        ),
        ("a variable is left out", "apply was called without the variable a, and exchange='int8' keeps a residual"),
    ],
)
def test_misuse_is_refused_by_all_workers(directory, misuse, said):
    refusals = [json.loads((directory / f"refusals-{rank}.json").read_text()) for rank in range(2)]
    for refusal in refusals:
        assert said in refusal[misuse]
        assert "\n" not in refusal[misuse]


def test_a_gradient_that_one_worker_no_longer_has_counts_as_zeros(directory):
    for rank in range(2):
        with np.load(directory / f"lone-{rank}.npz") as found:
            assert found["a"].tolist() == [0.0, 0.0]
            assert found["b"].tolist() == [0.25, 0.25]


@pytest.mark.parametrize("way", ["eager", "graph"])
def test_a_gradient_that_one_worker_alone_gets_later_is_refused_by_all(directory, way):
    for rank in range(2):
        found = json.loads((directory / f"late-{rank}.json").read_text())[way]
        assert found["together"] == [[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]]
        text = "only some workers have a gradient of these variables, and in the first step none had: c. Workers would"
        assert text in found["refused"]
        assert found["after"] == found["together"]


def test_workers_that_cannot_be_connected_say_why(tmp_path):
    script = tmp_path / "transports.py"
    script.write_text(
        "import tfpar\n"
        "try:\n"
        "    tfpar.init_cluster(transport=('gloo', 'tensorflow')[tfpar.rank()])\n"
        "except tfpar.ConfigError as error:\n"
        "    print('refused:', error, flush=True)\n"
    )
    result = launch(2, str(script))
    said = result.stdout + result.stderr
    for rank in range(2):
        assert f"[worker {rank}] refused: --transport: worker 0 has gloo, worker 1 has tensorflow." in said, said


def test_data_that_runs_out_ends_the_run_with_a_word(tmp_path):
    """One worker cannot say it to the other, which waits in the exchange: the launcher ends both."""
    script = tmp_path / "short.py"
    script.write_text(
        "import tfpar\n"
        "tfpar.init_cluster()\n"
        "import keras, numpy as np, tensorflow as tf\n"
        "model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "model.compile(tfpar.DistributedOptimizer(keras.optimizers.SGD()), 'mse', jit_compile=False)\n"
        "batches = 10 - 4 * tfpar.rank()\n"
        "data = tf.data.Dataset.from_tensors((np.ones((4, 2)), np.ones((4, 1)))).repeat(batches)\n"
        "model.fit(data, steps_per_epoch=10, verbose=0, callbacks=[tfpar.BroadcastInitialWeights()])\n"
    )
    result = launch(2, str(script), timeout=300)
    assert result.returncode != 0
    assert "worker 1 ended epoch 1 after 6 of 10 steps" in result.stdout + result.stderr


def test_the_example_of_the_readme_learns():
    result = launch(2, "experiments/keras_fit.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "[worker 1]" not in result.stdout
    accuracy = re.findall(r"val_accuracy: ([\d.]+)", result.stdout)
    assert len(accuracy) == 10
    assert float(accuracy[-1]) > 0.93
