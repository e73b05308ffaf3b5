"""What sharded state saves and costs: bytes of weights and state, memory, bytes on the network, time of a step.

Each pair of --shard and --exchange trains on a cluster of its own on this machine. The pairs take turns, and the
fastest turn of each counts. Bytes of weights and optimizer state are counted from the variables of a worker, those on
the network follow from the formula that summary.json has; the peak is what a worker's process held at most above what
it held before it built the model (resident set, as the operating system counts it). None of them needs a quiet machine.
With several --seeds, the table has the mean of the last losses and their standard deviation.

  python experiments/benchmarks/shard.py --model=transformer_lm_small --workers=2
  python experiments/benchmarks/shard.py --model=transformer_lm --model_args='{"width": 512, "layers": 8, "heads": 8}' \
    --workers=4 --shards=none,optimizer,gradients,weights --exchanges=none --xla=false --turns=1
  python experiments/benchmarks/shard.py --model=mlp --dataset=digits --batch=64 --measured_steps=300 --seeds=5
"""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the module beside it, when started as a script

import tfpar
from experiments.benchmarks.loops import process_bytes
from tfpar import inputs, models
from tfpar.config import flags
from tfpar.doctor import describe_machine

from absl import flags as absl_flags

flags.define(sections=[])
MODEL = absl_flags.DEFINE_string("model", "transformer_lm_small", "Model to train.")
DATASET = absl_flags.DEFINE_string("dataset", "text", "Data to train it on.")
BATCH = absl_flags.DEFINE_integer("batch", 8, "Examples in a step, over all workers.", lower_bound=1)
OPTIMIZER = absl_flags.DEFINE_string("optimizer", "adamw", "Optimizer.")
WORKERS = absl_flags.DEFINE_integer("workers", 2, "Workers of the cluster.", lower_bound=2)
MODEL_ARGS = absl_flags.DEFINE_string("model_args", "{}", "Arguments of the model, JSON.")
SHARDS = absl_flags.DEFINE_list("shards", ["none", "optimizer"], "Values of --shard.")
XLA = absl_flags.DEFINE_string("xla", "auto", "Value of --jit_compile; false compares all with the same kernels.")
EXCHANGES = absl_flags.DEFINE_list("exchanges", ["none", "int4"], "Values of --exchange.")
STEPS = absl_flags.DEFINE_integer("measured_steps", 6, "Steps of a turn, after the first.", lower_bound=1)
SEEDS = absl_flags.DEFINE_integer("seeds", 1, "Runs from different seeds.", lower_bound=1)
TURNS = absl_flags.DEFINE_integer("turns", 2, "Turns of each pair.", lower_bound=1)
CHILD = absl_flags.DEFINE_string("child", "", "Internal: 'SHARD EXCHANGE' that this process measures.")


def measure(shard: str, exchange: str) -> dict[str, Any]:
    """Trains in this process, one of the workers."""
    import keras

    runtime: tfpar.Runtime | None = None
    losses = []
    before = 0
    for seed in range(SEEDS.value):
        config = tfpar.ExperimentConfig.from_flat_dict(
            {
                "dataset": DATASET.value,
                "global_batch_size": BATCH.value,
                "optimizer": OPTIMIZER.value,
                "shard": shard,
                "exchange": exchange,
                "jit_compile": XLA.value,
                "seed": seed,
                "verbose": 0,
            }
        )
        runtime = runtime or tfpar.initialize(config)
        source, validation = inputs.build_splits(config.input, 0)
        keras.utils.set_random_seed(seed)
        before = before or process_bytes("VmHWM")
        trainer = tfpar.Trainer(
            functools.partial(models.build, MODEL.value, tfpar.task_spec(source), **json.loads(MODEL_ARGS.value)),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            config=config,
            runtime=runtime,
        )
        trainer.fit(source, steps=1)
        began = time.perf_counter()
        trainer.fit(source, steps=STEPS.value)
        seconds = (time.perf_counter() - began) / STEPS.value
        losses.append(trainer.evaluate(validation)["loss"])
    assert runtime is not None
    program, replicas = trainer.program, runtime.topology.replicas
    gathered = program.placing.gathered(trainer.model, program.config)
    traffic = gathered.added(program.exchange.traffic(replicas, 0), replicas)
    return {
        "seconds": seconds,
        "losses": losses,
        "peak": process_bytes("VmHWM") - before,
        "weights": sum(variable.numpy().nbytes for variable in trainer.model.trainable_variables),
        "state": sum(variable.numpy().nbytes for variable in trainer.optimizer.variables),
        "wire": traffic.wire_bytes,
        "chief": runtime.topology.is_chief,
    }


def on_cluster(shard: str, exchange: str) -> dict[str, Any]:
    """`measure` on a cluster of its own, as the chief found it."""
    launcher = [sys.executable, "-m", "tfpar.launch", f"--workers={WORKERS.value}", "--"]
    command = [*launcher, __file__, f"--child={shard} {exchange}", *sys.argv[1:]]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if '"seconds"' in line]
    if done.returncode or not lines:
        raise SystemExit(f"--shard={shard} --exchange={exchange} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return json.loads(lines[-1][lines[-1].index("{") :])


def main(_: list[str]) -> None:
    """Measures every pair in turn and prints a table."""
    if CHILD.value:
        found = measure(*CHILD.value.split())
        if found.pop("chief"):
            print(json.dumps(found), flush=True)
        return
    print(f"{MODEL.value}, {OPTIMIZER.value}, batch {BATCH.value}, {WORKERS.value} workers; {describe_machine()}")
    pairs = [(shard, exchange) for exchange in EXCHANGES.value for shard in SHARDS.value]
    pairs = [pair for pair in pairs if pair[0] != "weights" or pair[1] == "none"]
    turns = [(pair, on_cluster(*pair)) for _ in range(TURNS.value) for pair in pairs]
    last = dict(turns)
    fastest = {pair: min(found["seconds"] for each, found in turns if each == pair) for pair in pairs}
    names = f"{'exchange':<10}{'shard':<11}{'weights MiB':>12}{'state MiB':>10}{'peak MiB':>10}{'sent MiB':>10}"
    print(names + f"{'step ms':>10}{'ratio':>7}{'loss':>10}{'+-':>9}")
    for pair in pairs:
        shard, exchange = pair
        found, base = last[pair], fastest[SHARDS.value[0], exchange]
        loss, spread = statistics.mean(found["losses"]), statistics.pstdev(found["losses"])
        print(
            f"{exchange:<10}{shard:<11}{found['weights'] / 2**20:>12.1f}{found['state'] / 2**20:>10.1f}"
            f"{found['peak'] / 2**20:>10.0f}{found['wire'] / 2**20:>10.2f}"
            f"{1e3 * fastest[pair]:>10.1f}{fastest[pair] / base:>7.2f}{loss:>10.5f}{spread:>9.5f}"
        )


if __name__ == "__main__":
    flags.run(main)
