"""The probes of parameter servers."""

from __future__ import annotations

import inspect
import re

from tfpar.cluster import heartbeat

from tensorflow.python.distribute import parameter_server_strategy_v2


def test_no_variable_of_the_environment_appears_while_the_thread_reads_it():
    """Else gRPC, which reads the environment for every channel, may end the process with a segmentation fault."""
    source = inspect.getsource(parameter_server_strategy_v2.ParameterServerStrategyV2)
    assert set(re.findall(r'os\.environ\["(\w+)"\] = ', source)) == set(heartbeat._SET_BY_STRATEGY)
