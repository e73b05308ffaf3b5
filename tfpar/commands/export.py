"""Exports a trained model as SavedModel or ONNX, and checks the export against the model on real inputs.

Data set, held-out share, window and seed are by default those of the run in whose workdir the model is. A policy of
reinforcement learning, beside the checkpoints of its run, is checked on random observations; it has several outputs,
the first of which are logits or means.

  tfpar export --model_file=runs/quickstart/model.keras --output=runs/quickstart/saved_model
  tfpar export --model_file=runs/quickstart/model.keras --format=onnx --output=runs/digits.onnx

ONNX needs the packages of `pip install tfpar[onnx]`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import tfpar
from tfpar.commands import play
from tfpar.config import ConfigError, ExperimentConfig, catalog, flags
from tfpar.config.errors import TrainingError
from tfpar.process.writable import unwritable, write_reason

from absl import flags as absl_flags

if TYPE_CHECKING:
    from tfpar import inputs

    import keras
    import numpy as np


# Which examples are held out, and how they are read. The rest of these sections has no effect.
_OPTIONS = (
    *("dataset", "data_dir", "sequence_length", "validation_fraction", "image_size", "resize", "crop", "cache"),
    *("on_bad_record", "tf32", "seed", "verbose", "tensorflow_log"),
)
_OF_POLICY = ("tf32", "seed", "verbose", "tensorflow_log")


def run(argv: Sequence[str] | None = None, program: str = "") -> None:
    """Defines the flags, reads them, exports, and ends the process.

    Args:
      argv: The command line; `sys.argv` by default.
      program: How a user calls it; see `flags.run`.
    """
    flags.define(sections=["input", "precision", "train", "monitor"], options=_OPTIONS)
    absl_flags.DEFINE_string("model_file", "", "The .keras file to export.")
    absl_flags.DEFINE_enum("format", "saved_model", ["saved_model", "onnx"], "What to write.")
    absl_flags.DEFINE_string("output", "", "Directory (saved_model) or file (onnx) to write; must not exist.")
    absl_flags.DEFINE_integer("examples", 64, "Held-out examples that the check compares.", lower_bound=1)
    absl_flags.DEFINE_float(
        "tolerance",
        None,
        "Largest allowed difference, relative to the largest output; 1e-4, for 16-bit models 1e-2.",
        lower_bound=0.0,
    )
    flags.run(main, argv, program=program)


def saved_model(path: pathlib.Path) -> Callable[[np.ndarray], list[np.ndarray]]:
    """The serving function of a SavedModel; returns a list of its outputs."""
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path))  # kept: the function alone does not hold its variables
    return lambda x: [output.numpy() for output in tf.nest.flatten(loaded.serve(tf.constant(x)))]


def onnx(path: pathlib.Path) -> Callable[[np.ndarray], list[np.ndarray]]:
    """An ONNX model in onnxruntime, on the CPU; returns a list of its outputs."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: x})


def _loaded(config: ExperimentConfig, model_file: str, examples: int) -> tuple[keras.Model, np.ndarray]:
    """The model, and inputs to check its export on: held-out examples, or random observations for a policy."""
    import numpy as np

    if play.trained_in(model_file):
        play.check_options(model_file, {*_OPTIONS}.difference(_OF_POLICY))
        tfpar.initialize(config)
        policy = tfpar.load_model(model_file)
        shape = [examples, *policy.inputs[0].shape[1:]]
        return policy, np.random.default_rng(config.train.seed).normal(size=shape).astype(np.float32)
    config = tfpar.examples_of_run(config, model_file, flags.is_given)
    # No batch is trained on, so none need be divisible by the number of replicas.
    config = dataclasses.replace(config, input=dataclasses.replace(config.input, uneven_batches=True))
    source = tfpar.inputs.build_source(config.input, "validation", config.train.seed)
    if not source.info.num_examples:
        raise ConfigError(
            f"--dataset={config.input.dataset}: the validation split is empty, and the export is checked on it. Hold "
            "out more: --validation_fraction."
        )
    tfpar.initialize(config)
    model = tfpar.load_model(model_file, tfpar.task_spec(source))
    return model, _held_out(source, examples)


def _held_out(source: inputs.Source, examples: int) -> np.ndarray:
    """Inputs of the first examples of a source; without the bad ones if these are skipped.

    Args:
      source: Has examples.
      examples: How many to read at most.

    Raises:
      ConfigError: An example is bad, and `on_bad_record` is `fail`; or all are.
      TrainingError: One could not be read at first.
    """
    from tfpar.inputs.bad_records import diagnose_read_error, fetch_with_mask

    import tensorflow as tf

    count = min(examples, source.info.num_examples)
    # In a graph: read eagerly, the parts of a batch, which tf.data maps, are a warning of TensorFlow 2.21.
    read = tf.function(lambda indices: fetch_with_mask(source, indices), autograph=False)
    x, _, usable = read(tf.range(count, dtype=tf.int64))
    kept = usable.numpy()
    if not kept.all() and not source.skip:
        raise diagnose_read_error(source, (~kept).nonzero()[0].tolist())
    if not kept.any():
        raise ConfigError(
            f"--examples={examples}: the first {count} held-out examples of --dataset={source.info.name} are all bad, "
            "and the export is checked on them. Take more, or repair them."
        )
    return x.numpy()[kept]


def _difference(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The largest difference of an output, relative to the largest of its numbers."""
    import numpy as np

    # NumPy's maximum, which is NaN if any is; Python's may leave it out.
    return float(
        np.max(
            [
                np.max(np.abs(one - other)) / np.maximum(np.max(np.abs(other)), 1e-30)
                for one, other in zip(actual, expected, strict=True)
            ]
        )
    )


def _write(
    model: keras.Model, output: pathlib.Path, kind: str, check: Callable[[pathlib.Path], None] = lambda _: None
) -> None:
    """Exports a model, whole and checked or not at all: it gets its name after the check.

    Args:
      model: The model.
      output: The name.
      kind: Keras' name of the format.
      check: Raises an error if the export at a path must not be used.

    Raises:
      TrainingError: The export could not be written, for example on a full disk.
    """
    import tensorflow as tf

    unchecked = output.with_name(f".{output.stem}.unchecked{output.suffix}")
    try:
        _remove(unchecked)  # of a process that was killed
        output.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module="keras")  # Keras 3.15 asks for np.object
            model.export(str(unchecked), format=kind, verbose=False)
        check(unchecked)
        os.rename(unchecked, output)
    except BaseException as error:
        _remove(unchecked)  # it may be what fills the disk
        if isinstance(error, (OSError, tf.errors.ResourceExhaustedError)):
            raise TrainingError(
                f"--output={output} could not be written ({write_reason(error)}); nothing was left there. Make room, "
                "or name another place."
            ) from error
        raise


def _remove(path: pathlib.Path) -> None:
    """Removes a folder or a file, if there is one and it can be removed."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def main(_: list[str]) -> None:
    config, given = flags.experiment_config(), absl_flags.FLAGS
    if not given.model_file or not given.output:
        raise ConfigError(
            "--model_file and --output are both needed, e.g. --model_file=runs/a/model.keras --output=runs/a/export."
        )
    output = pathlib.Path(given.output)
    if os.path.exists(output):
        raise ConfigError(f"--output={output} exists; name another, or remove it first.")
    if problem := unwritable("--output", output):
        raise ConfigError(problem)
    if given.format == "onnx":
        try:
            import onnxruntime  # noqa: F401
            import tf2onnx  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"--format=onnx needs {error.name}: pip install 'tfpar[onnx]'.") from error
    tfpar.check_model_file(given.model_file)
    catalog.check_built_in(config)
    # Here, so that --help and a wrong flag need not wait for TensorFlow.
    from tfpar.optim import keras_internals
    from tfpar.training.model.adapting import merge_adapters

    import keras

    model, x = _loaded(config, given.model_file, given.examples)
    if merged := merge_adapters(model):
        print(f"adapters of {merged} layers are merged into their kernels")
    computed_in = {layer.compute_dtype for layer in keras_internals.all_layers(model)}
    if given.format == "onnx" and "bfloat16" in computed_in:
        raise ConfigError(
            f"--format=onnx: {given.model_file} computes in bfloat16, for which ONNX has no convolutions. Use "
            "--format=saved_model, or train with --precision=float32."
        )
    expected = keras.tree.flatten(model.predict_on_batch(x))  # also traces the model, which Keras' exporters need
    short = computed_in & {"float16", "bfloat16"}
    tolerance = given.tolerance if given.tolerance is not None else 1e-2 if short else 1e-4
    difference = 0.0

    def check(path: pathlib.Path) -> None:
        nonlocal difference
        difference = _difference((saved_model if given.format == "saved_model" else onnx)(path)(x), expected)
        if not difference <= tolerance:
            raise ConfigError(
                f"--output={output}: the export differs from the model by {difference:.2e}, more than "
                f"--tolerance={tolerance:g}; nothing was left there. Allow more, or export in another --format."
            )

    _write(model, output, "tf_saved_model" if given.format == "saved_model" else "onnx", check)
    print(f"{output}: {given.format}, checked on {len(x)} examples, largest relative difference {difference:.1e}")
