r"""Trains an image classifier: the script of `tfpar train image`, for checkouts.

python experiments/image_classification.py --dataset=digits --model=convnet --epochs=20 --workdir=runs/digits
python -m tfpar.launch --workers=2 -- experiments/image_classification.py \
    --flagfile=experiments/recipes/quickstart.flags

`tfpar/commands/train_image.py` is the program.
"""

from __future__ import annotations

from tfpar.commands import train_image

if __name__ == "__main__":
    train_image.run()
