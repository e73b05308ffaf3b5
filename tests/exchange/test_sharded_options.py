"""What goes beside sharded state, and what sharded weights cost on the wire."""

from __future__ import annotations

from tfpar.config import ConfigError
from tfpar.exchange import spec as specs
from tfpar.exchange.reducer import GatheredWeights, dense_traffic
from tfpar.exchange.sharding.codecs import check_exchange

import pytest


@pytest.mark.parametrize(
    ("exchange", "shard", "words"),
    [
        ("int4", "weights", "--exchange=int4 does not work with --shard=weights.*--shard=gradients"),
        ("auto", "weights", "--exchange=auto does not work with --shard=weights"),
        ("topk:0.01", "gradients", "--exchange=topk:0.01 does not work with --shard"),
        ("int4:pattern=ring", "optimizer", "pattern=two_phase"),
    ],
)
def test_exchanges_that_do_not_go_with_shards_are_refused(exchange, shard, words):
    with pytest.raises(ConfigError, match=words):
        check_exchange(specs.parse(exchange), shard)


@pytest.mark.parametrize(("exchange", "shard"), [("none", "weights"), ("int4", "gradients"), ("bf16", "optimizer")])
def test_others_go_with_shards(exchange, shard):
    check_exchange(specs.parse(exchange), shard)


def test_weights_that_are_gathered_count_on_the_wire():
    """Two gathers and a scatter for each micro-batch, of which a replica sends what it does not keep."""
    small = dense_traffic(10, 4, 5)
    assert GatheredWeights().added(small, 4) == small
    found = GatheredWeights(elements=1000, micro_batches=2).added(small, 4)
    assert found.payload_bytes == small.payload_bytes + 3 * 2 * 4000
    assert found.wire_bytes == small.wire_bytes + 3 * 2 * 3000
    assert found.dense_bytes == small.dense_bytes + 2 * 3000
    counted = GatheredWeights(elements=1000, micro_batches=2, sent=900).added(small, 4)
    assert (counted.wire_bytes, counted.payload_bytes) == (small.wire_bytes + 900, small.payload_bytes + 1200)
    assert counted.dense_bytes == found.dense_bytes
