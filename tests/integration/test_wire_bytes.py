"""What an exchange sends, counted at the interface, against the formula that users are told."""

from __future__ import annotations

import sys

from experiments.benchmarks import netns
from experiments.benchmarks.exchange import workers

import pytest

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(bool(netns.missing()), reason=netns.missing()),
]

# 24 MB of float32, most of it in tensors that travel encoded, and vectors that do not.
SHAPES = [[3, 3, 256, 256], [1024, 2048], [4096], [25, 3, 7], [2048, 1000], [1000], [1024, 1500]]
CODECS = ["none", "bf16", "int4", "sign", "topk:0.01", "powersgd:4"]
PATTERNS = ["none", "int4", "int4:pattern=all_gather", "int4:pattern=ring", "int4:pattern=binary_blocks"]


@pytest.mark.parametrize(("hosts", "exchanges"), [(2, PATTERNS[:2]), (2, CODECS), (3, PATTERNS)])
def test_the_counter_of_the_interface_agrees_with_the_formula(hosts, exchanges):
    counted, told = {}, {}
    with netns.network(hosts) as network, workers(network, sys.executable, SHAPES) as (fleet, _):
        for spec in exchanges:
            built = fleet.ask({"do": "build", "exchange": spec}, 120)
            timed = fleet.ask({"do": "time", "times": 3}, 120)
            told[spec] = [reply["formula"] for reply in built]
            counted[spec] = [reply["sent"] for reply in timed]
    for spec in exchanges:
        assert counted[spec] == pytest.approx(told[spec], rel=0.05), spec
    assert told["none"][0] > 7 * told["int4"][0]
