r"""Lists how a model could be laid out over devices, with predicted step time and memory, without training it.

  tfpar plan --model=transformer_lm_gpt2 --sequence_length=1024 --global_batch_size=512 --devices=8 --hosts=128 \
    --link=100gbit,20us --device_flops=150e12 --device_memory=80GiB
  tfpar plan --model=transformer_lm_small --devices=4 --device_memory=2GiB

Options that are given hold for every plan: --mesh=model:2 lists those with a model axis of 2. The others that a plan
decides (--mesh, --accumulate_steps, --recompute, --shard) vary, and with --exchange=auto the exchange. Without
--device_flops, forward and backward passes are timed on this machine's CPU.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence

from tfpar.config import catalog, flags

from absl import flags as absl_flags

_SECTIONS = ("model", "input", "strategy", "exchange", "precision", "optimizer", "train")
_DECIDED = ("accumulate_steps", "recompute", "shard")


def run(argv: Sequence[str] | None = None, program: str = "") -> None:
    """Defines the flags, reads them, prints the plans, and ends the process.

    Args:
      argv: The command line; `sys.argv` by default.
      program: How a user calls it; see `flags.run`.
    """
    absl_flags.DEFINE_integer("hosts", 1, "Number of hosts, each with one worker, which has --devices.", lower_bound=1)
    absl_flags.DEFINE_string("link", "10gbit", "Link between workers: a rate, or rate and latency: 100gbit,20us.")
    absl_flags.DEFINE_string(
        "device_link",
        "",
        "Link between the devices of a worker, in the form of --link. Empty: NVLink, or a CPU's memory where passes "
        "are timed on this machine.",
    )
    absl_flags.DEFINE_float(
        "device_flops", 0.0, "FLOP/s that a device reaches in training. 0: timed on this machine.", lower_bound=0.0
    )
    absl_flags.DEFINE_integer("rows", 5, "Number of plans to list.", lower_bound=1)
    absl_flags.DEFINE_bool("json", False, "Print the plans as JSON.")
    flags.define(sections=_SECTIONS, defaults={"dataset": "text", "model": "transformer_lm_tiny"})
    flags.run(main, argv, program=program)


def main(_: list[str]) -> None:
    config = flags.experiment_config()
    catalog.check_built_in(config)
    values = absl_flags.FLAGS
    from tfpar.parallel.planner import machine as machines
    from tfpar.parallel.planner.table import describe_machine, table
    from tfpar.training.planning.offline import plan_offline  # TensorFlow is not needed for --help and wrong flags

    link, device_link = values.link, values.device_link
    # So that standard output is the JSON alone.
    with contextlib.redirect_stdout(sys.stderr) if values.json else contextlib.nullcontext():
        answer = plan_offline(
            config,
            hosts=values.hosts,
            flops=values.device_flops,
            between=machines.parse_link(link, "--link", machines.Machine().between.latency),
            within=machines.parse_link(device_link, "--device_link", 2e-5) if device_link else None,
            fixed=[name for name in _DECIDED if flags.is_given(name)],
        )
    best = answer.best  # an error, if none fits
    if values.json:
        print(json.dumps([each.as_dict() for each in answer.fitting[: values.rows]], indent=2))
        return
    print(f"{answer.question.model.name}: {describe_machine(answer.question.machine)}")
    print(table(answer, values.rows))
    from tfpar.parallel.planner.search import describe

    print(f"flags of the first: {describe(best.plan)}")
