"""One worker of tests/integration/test_transport.py, with a transport of its own: transport_of_rank.py TRANSPORT..."""

from __future__ import annotations

import sys

from tfpar import cluster
from tfpar.config import ConfigError, StrategyConfig
from tfpar.parallel import strategies
from tfpar.parallel.topology import choose_topology

info = cluster.current()
config = StrategyConfig(strategy="multi_worker", transport=sys.argv[1 + info.worker_rank], start_timeout=60.0)
try:
    strategies.build(choose_topology(config, info))
except ConfigError as error:
    print("error:", error, flush=True)
