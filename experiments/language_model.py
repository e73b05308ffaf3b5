r"""Trains a byte-level language model: the script of `tfpar train language`, for checkouts.

  python experiments/language_model.py --workdir=runs/bytes
  python -m tfpar.launch --workers=2 -- experiments/language_model.py \
    --flagfile=experiments/recipes/language_model.flags

`tfpar/commands/train_language.py` is the program.
"""

from __future__ import annotations

from tfpar.commands import train_language

if __name__ == "__main__":
    train_language.run()
