"""Evaluates a trained model on a data set: the script of `tfpar evaluate`, for checkouts.

python experiments/evaluate.py --model_file=runs/quickstart/model.keras --dataset=digits

`tfpar/commands/evaluate.py` is the program.
"""

from __future__ import annotations

from tfpar.commands import evaluate

if __name__ == "__main__":
    evaluate.run()
