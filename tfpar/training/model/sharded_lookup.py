"""Lookups in tables of which replicas have shards (`--shard=weights`).

If a step looks up fewer rows than a table has, replicas exchange these rows instead of the table: the places of the
rows go to all replicas, each answers with the rows that it has, and the gradients of the rows come back. With n lookups
of each of R replicas in a table of V rows, these are n R / V of the bytes that gathering the table and scattering its
gradient takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfpar.models.transformer import TokenEmbedding
from tfpar.parallel import weight_shards
from tfpar.parallel.division import Shards
from tfpar.parallel.model_axis import Place
from tfpar.parallel.split import split_of

import keras
import tensorflow as tf

# They only take rows of `embeddings` if they are called with integers (Keras 3.15).
_LOOKUPS = (keras.layers.Embedding.call, keras.layers.ReversibleEmbedding.call, TokenEmbedding.call)


def rows_of_lookup(
    layer: keras.layers.Layer, inputs: Any, values: Mapping[int, Any]
) -> tuple[keras.Variable, tf.Tensor, tf.Tensor] | None:
    """Returns the rows that a call of a layer looks up, from all replicas that have some of them.

    Args:
      layer: The layer.
      inputs: The places of the rows in the table.
      values: Values of variables, by `id`.

    Returns:
      The table; n rows [n, ...], one for each place; and the numbers of these rows, in the shape of `inputs`. The layer
      computes the same with these rows and numbers as with the table and `inputs`. None if the table must be gathered.
    """
    place, table = weight_shards.current_replica_place(), _table(layer)
    if place is None or table is None or not _has_static_shape(inputs):
        return None
    shards, shard, count = split_of(table), values.get(id(table)), inputs.shape.num_elements()
    if not isinstance(shards, Shards) or shards.within or shards.split.axis or shard is None:
        return None
    # With as many rows as the shard has, they would be taken for the shard.
    if not weight_shards.is_shard(table, shard) or count * place.size >= table.shape[0] or count == shard.shape[0]:
        return None
    rows = _exchanged(place, shard, tf.reshape(inputs, [-1]), table.shape[0])
    return table, rows, tf.reshape(tf.range(count, dtype=inputs.dtype), inputs.shape)


def _table(layer: keras.layers.Layer) -> keras.Variable | None:
    """Returns the table of a layer of which a call only reads rows."""
    call = type(layer).call
    # A reversible layer computes the mask within the call.
    needs_places = getattr(layer, "mask_zero", False) and call is not keras.layers.Embedding.call
    adds_to_table = getattr(layer, "lora_enabled", False)
    if needs_places or adds_to_table or call not in _LOOKUPS:
        return None
    return next((weight for weight in layer.weights if weight.name == "embeddings"), None)


def _has_static_shape(inputs: Any) -> bool:
    return isinstance(inputs, tf.Tensor) and inputs.dtype in (tf.int32, tf.int64) and inputs.shape.is_fully_defined()


def _exchanged(place: Place, shard: tf.Tensor, places: tf.Tensor, length: int) -> tf.Tensor:
    """Returns the rows at these places of the table; their gradients reach the replicas that have them.

    Args:
      place: This device among those that have the shards.
      shard: Its shard of the table, `[rows, ...]`.
      places: Places in the table, int32 or int64 [n]. Negative ones count from its end, as Keras does it.
      length: Number of rows of the table.
    """
    rows = shard.shape[0]
    places = place.all_gather(tf.where(places < 0, places + length, places))
    own = places - place.rank * rows
    is_own = (own >= 0) & (own < rows)
    # Places outside of the table are outside of every shard. On CPUs, all replicas refuse them, so that none waits.
    is_anywhere = (places >= 0) & (places < length)
    readable = tf.where(is_own & is_anywhere, own, tf.where(is_anywhere, tf.zeros_like(own), places))

    @tf.custom_gradient
    def operator(shard: tf.Tensor) -> Any:
        with tf.name_scope(f"shard_of_{length}_rows"):  # for the error message, which has the length of the shard
            found = tf.gather(shard, readable)
        mask = tf.reshape(is_own, [*is_own.shape, *[1] * (shard.shape.rank - 1)])

        def backward(upstream: Any) -> tf.Tensor:
            gradients = place.all_gather(tf.convert_to_tensor(upstream))
            # Negative numbers are left out.
            return tf.math.unsorted_segment_sum(gradients, tf.where(is_own, own, -tf.ones_like(own)), rows)

        # One replica has the row, the others add zeros.
        return place.share_of_sum(tf.where(mask, found, 0.0))[0], backward

    return operator(shard)
