"""Asks an Agreement what the workers' values are; each worker prints its answers. Reads rounds from the arguments.

agree.py ROUNDS, a JSON list of rounds; a round lists each worker's numbers.
"""

from __future__ import annotations

import json
import sys

from tfpar import cluster
from tfpar.collectives.agreement import Agreement
from tfpar.config import StrategyConfig
from tfpar.parallel import strategies
from tfpar.parallel.topology import choose_topology

topology = choose_topology(StrategyConfig(strategy="multi_worker"), cluster.detect())
agreement = Agreement(strategies.build(topology).strategy, topology.workers)
answers = []
for held in json.loads(sys.argv[1]):
    mine = held[topology.worker]
    answers.append({"equal": agreement.all_equal(mine), "mean": agreement.mean(mine[0])})
    answers[-1] |= {"gathered": agreement.gather(mine[0])}
print("answers", json.dumps(answers), flush=True)
