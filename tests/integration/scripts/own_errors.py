"""Training in which a hook raises an error, on one worker or on all; the script catches it.

python -m tfpar.launch --workers=2 -- -m tests.integration.scripts.own_errors TRANSPORT RANK|all
"""

from __future__ import annotations

import contextlib
import sys
import time

import tfpar

import keras
import numpy as np


def model() -> keras.Model:
    return keras.Sequential([keras.Input([8]), keras.layers.Dense(1)])


def main(transport: str, who: str) -> None:
    options = {"strategy": "multi_worker", "transport": transport, "peer_timeout": 20.0, "jit_compile": False}
    trainer = tfpar.Trainer(model, "sgd", "mse", global_batch_size=32, log_every=1000, **options)
    rank = trainer.topology.worker
    x = np.ones([64, 8], "float32")

    def train_another(state: tfpar.LoopState) -> None:
        """An error of a model that one worker trains beside, on a device of its own, is no error of the run."""
        if who == "all" and rank == 0 and state.step == 2:
            alone = tfpar.Trainer(model, "sgd", "mse", strategy="one_device", global_batch_size=32, jit_compile=False)
            with contextlib.suppress(ZeroDivisionError):
                alone.fit((x, x[:, :1]), steps=1, hooks=[tfpar.Hook(1, lambda _: 1 / 0)])

    def fail(state: tfpar.LoopState) -> None:
        if state.step == 4 and who in ("all", f"{rank}"):
            raise ValueError(f"of a hook {'é' * 300}")

    try:
        trainer.fit((x, x[:, :1]), steps=8, hooks=[tfpar.Hook(2, train_another), tfpar.Hook(4, fail)])
    except ValueError:
        print(f"caught on worker {rank}", flush=True)
        if who != "all":
            time.sleep(3600)  # the launcher ends this worker once the other one has ended
    results = trainer.evaluate((x, x[:, :1]))
    trainer.fit((x, x[:, :1]), steps=2)
    print(f"went on with {results['examples']:.0f} examples", flush=True)
    # With options that differ, but not in what the running strategy depends on.
    another = tfpar.Trainer(model, "sgd", "mse", global_batch_size=32, log_every=1000, jit_compile=False)
    another.fit((x, x[:, :1]), steps=2)
    print("another trainer went on", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
