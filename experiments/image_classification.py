r"""Trains an image classifier.

python experiments/image_classification.py --dataset=digits --model=convnet --epochs=20 --workdir=runs/digits
python -m tfpar.launch --workers=2 -- experiments/image_classification.py \
    --flagfile=experiments/recipes/quickstart.flags
"""

from __future__ import annotations

import tfpar
from tfpar.config import flags

flags.define(defaults={"dataset": "digits", "model": "convnet", "epochs": 10.0})


def main(_: list[str]) -> None:
    import keras  # here, so that --help and a wrong flag need not wait for TensorFlow

    config = flags.experiment_config()
    tfpar.validate(config)
    train, validation = tfpar.inputs.build_splits(config.input, config.train.seed)
    runtime = tfpar.initialize(config, train, validation)
    trainer = tfpar.Trainer(
        lambda: tfpar.models.build(config.model.model, tfpar.task_spec(train), **config.model.arguments()),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        config=config,
        runtime=runtime,
    )
    trainer.fit(train, validation=validation)


if __name__ == "__main__":
    flags.run(main)
