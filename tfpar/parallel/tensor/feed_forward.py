"""keras-hub's feed-forward layers, which are recognised by the names of their Dense layers.

Names say nothing of what is between two layers, so they count only in keras-hub's own layers, between whose first and
last Dense layers there are only activations and products of units.
"""

from __future__ import annotations

import re

from tfpar.optim import keras_internals
from tfpar.parallel.tensor.experts import is_of_keras_hub
from tfpar.parallel.tensor.ways import COLUMN, ROW

import keras

_NAMES = (
    (re.compile(r"(feedforward|mlp)_(intermediate|gate)_dense\d*$|feedforward_gate$"), COLUMN),
    (re.compile(r"(feedforward|mlp)_output_dense\d*$"), ROW),
    # Of Gemma and Falcon.
    (re.compile(r"^ffw_gating(_2)?$|^dense_h_to_4h$"), COLUMN),
    (re.compile(r"^ffw_linear$|^dense_4h_to_h$"), ROW),
)
# keras-hub 0.32 calls one dropout both between the two layers and after the second.
_WITH_DROPOUT_BETWEEN = "XLNetEncoder"


def ways_of_feed_forward(layer: keras.layers.Layer) -> dict[keras.layers.Layer, str]:
    """Returns the ways of the Dense layers of one of keras-hub's layers, divided by hidden units; empty for others."""
    if not is_of_keras_hub(layer) or (type(layer).__name__ == _WITH_DROPOUT_BETWEEN and layer.dropout):
        return {}
    inner = keras_internals.all_layers(layer, include_self=False, recursive=False)
    ways = {child: way for child in inner for pattern, way in _NAMES if pattern.search(child.name)}
    return ways if {*ways.values()} == {COLUMN, ROW} else {}  # the router of experts alone has such a name, too
