"""Losses of the user's own in a pipeline over several workers, the last of which alone has the outputs."""

from __future__ import annotations

import types

from tests.integration.scripts import divided, own_losses
from tests.integration.test_multi_worker import launch
from tests.integration.test_tensor_parallel import assert_close
from tfpar.config import ConfigError
from tfpar.parallel.held import Held, mark_held
from tfpar.parallel.tensor.obstacles import check_read, reading_parts
from tfpar.training.model.own_loss import objective_of
from tfpar.training.objective import Goal
from tfpar.training.pipeline.between_workers import Messages
from tfpar.training.pipeline.own_losses import check_loss_over_workers

import keras
import numpy as np
import pytest
import tensorflow as tf

# Of each of `REFUSED`, on both workers.
SAID = (
    "'halved' does not add self.losses as Keras does",
    "'reading' reads the weight 'first/kernel'",
    "'calling' calls the model again",
    "objective=... (SquaredError) calls the model and sums over examples by itself",
)


class OfEight(keras.Model):
    """Its loss takes batches of eight examples."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        del x, sample_weight, training
        return tf.reduce_mean(tf.square(tf.reshape(y_pred, [8, 1]) - y))


def test_a_loss_that_cannot_be_tried_is_warned_of(messages):
    objective = objective_of(own_losses.model(OfEight), Goal())
    check_loss_over_workers(objective, tf.TensorSpec([12]), tf.TensorSpec([1]), last=1)
    assert "compute_loss of model 'of_eight' could not be tried on 7 examples" in messages[0], messages


@pytest.mark.cluster
def test_what_the_last_worker_cannot_compute_alone_is_refused(tmp_path):
    """On every worker, before any waits for another. A loss that adds those of layers trains as on one device."""
    result = launch(2, "-m", "tests.integration.scripts.own_losses", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    for text in SAID:
        assert result.stdout.count(text) == 2, result.stdout
    expected = own_losses.found_by(
        own_losses.fitted(own_losses.Added, divided.runtime_of("one_device"), {"loss": "mse"})
    )
    for worker in range(2):
        assert_close(dict(np.load(tmp_path / f"{worker}.npz")), expected)


WORKER = types.SimpleNamespace(peers=types.SimpleNamespace(size=2, rank=1), rank=1)


def test_a_weight_of_another_worker_is_not_read():
    weight = keras.Variable(np.zeros((0, 0), np.float32), name="kernel")
    check_read(weight)
    mark_held(weight, Held((3, 4), (0,), WORKER.peers))
    with pytest.raises(ConfigError, match=r"reads the weight 'kernel'.*on a worker of the pipeline that does not have"):
        check_read(weight)
    with reading_parts([weight]):  # by what knows that it is not here
        check_read(weight)


def test_a_second_call_of_a_micro_batch_is_refused():
    """The other workers make only one, so this one would wait forever."""
    messages = Messages(WORKER, [], [], "CPU:0", "1f1b", 1)
    for messages.micro_batch in range(2):
        messages.starts_call("--mesh")
    with pytest.raises(ConfigError, match="--mesh: the loss calls the model again"):
        messages.starts_call("--mesh")
