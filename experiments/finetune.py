r"""Fine-tunes a model on another data set: a new head on top of it, and as many of its weights as you say.

--trainable says which weights train, by default the new head alone; --lora=8 trains adapters of rank 8 beside it.

--preset names a keras-hub preset directory (pip install 'tfpar[hub]') or a .keras file; nothing is downloaded. Without
it, --model starts from random weights.

python experiments/finetune.py --preset=presets/resnet_18 --dataset=images:flowers --image_size=224 --workdir=runs/a
python experiments/finetune.py --preset=runs/quickstart/model.keras --dataset=digits --trainable=all
"""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

import tfpar
from tfpar.config import CUSTOM, ConfigError, flags

from absl import flags as absl_flags

if TYPE_CHECKING:
    import keras

flags.define(defaults={"dataset": "digits", "model": "convnet", "epochs": 5.0, "trainable": "^head/"})
PRESET = absl_flags.DEFINE_string("preset", "", "Directory of a keras-hub preset, or a .keras file; empty for --model.")


def main(_: list[str]) -> None:
    import keras  # here, so that --help and a wrong flag need not wait for TensorFlow

    config = flags.experiment_config()
    if PRESET.value:
        if given := [name for name in ("model", "model_args") if flags.is_given(name)]:
            raise ConfigError(f"--{given[0]} builds a model, and --preset names one. Leave one of the two out.")
        config = tfpar.ExperimentConfig.from_flat_dict({**config.as_flat_dict(), "model": CUSTOM})
    tfpar.validate(config)
    check(PRESET.value)
    train, validation = tfpar.inputs.build_splits(config.input, config.train.seed)
    # What a preset takes is known once it is built.
    data = (None, None) if PRESET.value else (train, validation)

    def build() -> keras.Model:
        spec = tfpar.task_spec(train)
        return with_head(backbone_of(PRESET.value, config, spec), spec)

    runtime = tfpar.initialize(config, *data, complete=True, model=build)
    trainer = tfpar.Trainer(
        build,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        config=config,
        runtime=runtime,
    )
    trainer.fit(train, validation=validation)


def check(preset: str) -> None:
    """Refuses, before anything is read, a preset that is not there."""
    path = pathlib.Path(preset)
    if preset.endswith(".keras"):
        tfpar.check_model_file(preset, flag="--preset")
    elif preset and not (path / "config.json").is_file():
        raise ConfigError(
            f"--preset={preset} is neither a .keras file nor a directory with a keras-hub preset (config.json). Save "
            "one with backbone.save_to_preset(directory)."
        )


def backbone_of(preset: str, config: tfpar.ExperimentConfig, spec: tfpar.models.TaskSpec) -> keras.Model:
    """The model without its last layer, or the backbone of a preset."""
    import keras

    if preset and not preset.endswith(".keras"):
        try:
            import keras_hub
        except ImportError as error:
            raise ConfigError(f"--preset={preset} needs keras-hub: pip install 'tfpar[hub]'.") from error
        weights = any(pathlib.Path(preset).glob("*.weights.*"))
        return keras_hub.models.Backbone.from_preset(preset, load_weights=weights)
    if preset:
        whole = tfpar.load_model(preset, flag="--preset")
    else:
        whole = tfpar.models.build(config.model.model, spec, **config.model.arguments())
    flag = f"--preset={preset}" if preset else f"--model={config.model.model}"
    graph, features = before_last_weights(whole, flag)
    return keras.Model(graph.input, features, name="backbone")


def before_last_weights(whole: keras.Model, flag: str) -> tuple[keras.Model, Any]:
    """The graph of a model, and what its last call of a layer with weights takes.

    `layers` has another order: each layer comes where it is called first, and the table of token embeddings may also
    make the logits.
    """
    from tfpar.optim import keras_calls

    graph = keras_calls.graph_of(whole)
    calls = {} if graph is None else {id(one): call for call in keras_calls.graph_nodes(graph) for one in call.outputs}
    tensors = [] if graph is None else graph.outputs
    while len(tensors) == 1 and (call := calls.get(id(tensors[0]))):
        tensors = call.input_tensors
        if len(tensors) == 1 and getattr(call.operation, "weights", False):
            return graph, tensors[0]
    raise ConfigError(
        f"{flag}: the model has no single last layer with weights that a new head could replace: it is not a graph of "
        "layers (keras.Sequential, or keras.Model(inputs, outputs)), or its outputs come from several. Give a model "
        "that ends in one, such as its backbone with one Dense layer."
    )


def with_head(backbone: keras.Model, spec: tfpar.models.TaskSpec) -> keras.Model:
    """A classifier with the backbone's features, averaged over places unless each has a label of its own."""
    import keras

    inputs = keras.Input(spec.input_shape, dtype=spec.input_dtype)
    features = backbone(backbone_inputs(backbone, inputs, spec))
    if isinstance(features, dict):  # of text: one vector for each position, and sometimes one for all
        features = features.get("sequence_output", next(iter(features.values())))
    if spec.task != "language_model" and len(features.shape) > 2:
        features = keras.ops.mean(features, axis=tuple(range(1, len(features.shape) - 1)))
    outputs = keras.layers.Dense(spec.num_classes, name="head", dtype="float32")(features)
    return keras.Model(inputs, outputs, name="finetuned")


def backbone_inputs(backbone: keras.Model, inputs: Any, spec: tfpar.models.TaskSpec) -> Any:
    """What a backbone of images or of tokens takes, from the inputs of the data."""
    import keras
    import tensorflow as tf

    if isinstance(backbone.input, dict):  # tokens, no padding, in one segment
        constants = {"token_ids": inputs, "padding_mask": keras.ops.ones_like(inputs)}
        return {name: constants.get(name, keras.ops.zeros_like(inputs)) for name in backbone.input}
    expected = backbone.input.shape[1:]
    if tf.TensorShape(expected).is_compatible_with(spec.input_shape):
        return inputs
    coloured = (*spec.input_shape[:-1], 3)
    if spec.input_shape[-1:] == (1,) and tf.TensorShape(expected).is_compatible_with(coloured):
        return keras.ops.repeat(inputs, 3, axis=-1)  # grey as colours
    raise ConfigError(
        f"--preset: the model takes inputs of shape {tuple(expected)}, the data have {spec.input_shape}. Give images "
        "of that size with --image_size, or another --preset."
    )


if __name__ == "__main__":
    flags.run(main)
