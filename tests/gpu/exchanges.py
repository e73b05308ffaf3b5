"""One worker of tests/gpu/test_gpu.py: exchanges known gradients with every spec, over the native transport.

python -m tests.gpu.exchanges OUTPUT_DIR DEVICES SPEC...
"""

from __future__ import annotations

from typing import Any

import tfpar
from tests.integration.scripts import every_spec
from tests.integration.scripts.exchange_sums import exchange_all

import tensorflow as tf


def reported(spec: str, runtime: tfpar.Runtime) -> dict[str, Any]:
    tf.config.experimental.enable_tensor_float_32_execution(False)  # in the products of PowerSGD
    print(f"{spec} on {runtime.topology.device_type}", flush=True)
    return exchange_all(spec, runtime)


if __name__ == "__main__":
    every_spec.main(reported, transport="gloo")
