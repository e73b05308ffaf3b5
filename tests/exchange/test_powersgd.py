"""PowerSGD: the size of the factors."""

from __future__ import annotations

from tfpar import models
from tfpar.exchange import Exchange

import pytest
import tensorflow as tf


@pytest.fixture(scope="module")
def resnet18_shapes() -> list[tf.TensorShape]:
    model = models.build("resnet18", models.TaskSpec("classification", (32, 32, 3), "float32", 10))
    return [tf.TensorShape(variable.shape) for variable in model.trainable_variables]


@pytest.mark.parametrize(("rank", "ratio"), [(1, 243), (2, 136), (4, 72)])
def test_ratios_of_the_paper(resnet18_shapes, rank, ratio):
    """Vogels et al. 2019, table 3: ResNet-18 on 32x32, 1-D tensors dense."""
    exchange = Exchange(f"powersgd:{rank}")
    exchange.build([tf.TensorSpec(shape) for shape in resnet18_shapes], workers=2, worker=0)
    dense = 4 * sum(shape.num_elements() for shape in resnet18_shapes)
    assert dense == 4 * 11_173_962
    assert dense / exchange.traffic(2, 0).payload_bytes == pytest.approx(ratio, rel=0.01)
