"""Exports a trained model as SavedModel or ONNX: the script of `tfpar export`, for checkouts.

  python experiments/export.py --model_file=runs/quickstart/model.keras --output=runs/quickstart/saved_model
  python experiments/export.py --model_file=runs/quickstart/model.keras --format=onnx --output=runs/digits.onnx

`tfpar/commands/export.py` is the program.
"""

from __future__ import annotations

from tfpar.commands import export

if __name__ == "__main__":
    export.run()
