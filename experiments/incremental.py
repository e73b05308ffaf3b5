r"""Learns tasks that come one after the other: the script of `tfpar train incremental`, for checkouts.

python experiments/incremental.py --dataset=digits --tasks=by_class:2 --method=replay --workdir=runs/tasks

`tfpar/commands/train_incremental.py` is the program.
"""

from __future__ import annotations

from tfpar.commands import train_incremental

if __name__ == "__main__":
    train_incremental.run()
