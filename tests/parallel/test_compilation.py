"""Which parts of a step are XLA programs, for every kind of strategy."""

from __future__ import annotations

from tfpar.parallel.compilation import CompilationPlan, compilation_plan

import pytest

ONE_CPU = ("/job:localhost/replica:0/task:0/device:CPU:0",)
TWO_CPUS = (*ONE_CPU, "/job:localhost/replica:0/task:0/device:CPU:1")
ONE_GPU = ("/job:worker/replica:0/task:1/device:GPU:0",)
TWO_GPUS = (*ONE_GPU, "/job:worker/replica:0/task:1/device:GPU:1")
TWO_TPUS = ("/job:localhost/replica:0/task:0/device:TPU:0", "/job:localhost/replica:0/task:0/device:TPU:1")

NAMES = (
    "single_xla_program",
    "strategy_compiles",
    "compiles_gradients",
    "compiles_update",
    "prefetches_in_loop",
)
NOTHING = ("prefetches_in_loop",)
WHOLE = ("single_xla_program", "prefetches_in_loop")
HALVES = ("compiles_gradients", "compiles_update")


@pytest.mark.parametrize(
    ("replicas", "devices", "on_tpu", "jit_compile", "expected"),
    [
        # one_device, and a cluster of one worker
        (1, ONE_CPU, False, False, NOTHING),
        (1, ONE_CPU, False, True, WHOLE),
        (1, ONE_GPU, False, False, NOTHING),
        (1, ONE_GPU, False, True, WHOLE),
        # mirrored
        (2, TWO_CPUS, False, False, NOTHING),
        (2, TWO_CPUS, False, True, (*HALVES, "prefetches_in_loop")),
        (2, TWO_GPUS, False, False, ()),
        (2, TWO_GPUS, False, True, HALVES),
        # multi_worker
        (2, ONE_CPU, False, False, NOTHING),
        (2, ONE_CPU, False, True, (*HALVES, "prefetches_in_loop")),
        (4, TWO_CPUS, False, True, (*HALVES, "prefetches_in_loop")),
        (2, ONE_GPU, False, True, (*HALVES, "prefetches_in_loop")),
        (4, TWO_GPUS, False, True, HALVES),
        # tpu
        (2, TWO_TPUS, True, False, ("single_xla_program", "strategy_compiles")),
        (2, TWO_TPUS, True, True, ("single_xla_program", "strategy_compiles")),
        (1, TWO_TPUS[:1], True, True, ("single_xla_program", "strategy_compiles")),
    ],
)
def test_the_plan_of_every_strategy(replicas, devices, on_tpu, jit_compile, expected):
    plan = compilation_plan(replicas=replicas, local_devices=devices, on_tpu=on_tpu, jit_compile=jit_compile)
    assert plan == CompilationPlan(**{name: name in expected for name in NAMES})


def test_the_update_alone_can_be_a_program():
    of = {"local_devices": ONE_CPU, "on_tpu": False}
    plan = compilation_plan(replicas=2, jit_compile=False, compiles_update=True, **of)
    assert plan == CompilationPlan(**{name: name in ("compiles_update", "prefetches_in_loop") for name in NAMES})
    assert compilation_plan(replicas=1, jit_compile=True, compiles_update=True, **of).single_xla_program
