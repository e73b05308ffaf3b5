r"""Plays a trained policy in Gymnasium: the script of `tfpar play`, for checkouts.

python experiments/play.py --model_file=runs/cartpole/model.keras --episodes=100

`tfpar/commands/play.py` is the program.
"""

from __future__ import annotations

from tfpar.commands import play

if __name__ == "__main__":
    play.run()
