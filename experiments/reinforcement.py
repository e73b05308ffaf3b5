r"""Learns a policy by acting: the script of `tfpar train reinforcement`, for checkouts.

python experiments/reinforcement.py --env=CartPole-v1 --workdir=runs/cartpole
python -m tfpar.launch --workers=2 -- experiments/reinforcement.py --env=Acrobot-v1 --workdir=runs/acrobot

`tfpar/commands/train_reinforcement.py` is the program.
"""

from __future__ import annotations

from tfpar.commands import train_reinforcement

if __name__ == "__main__":
    train_reinforcement.run()
