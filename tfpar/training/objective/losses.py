"""The loss of a model: one term for each output that has a loss, as Keras' `compile` takes them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.optim import keras_compile
from tfpar.optim.keras_compile import ResolvedLoss
from tfpar.training.objective.names import unknown_in_keras
from tfpar.training.objective.outputs import Outputs, examples_of
from tfpar.training.objective.weighting import BY_SAMPLE_WEIGHT, SUM, TermSums, called, overrides_reduction, term_sums
from tfpar.training.objective.whole_loss import is_mean, reads_other_examples

import keras
import tensorflow as tf

# Regression, and margins, whose targets are -1 and 1.
_OF_NUMBERS = (
    keras.losses.mean_squared_error,
    keras.losses.mean_absolute_error,
    keras.losses.mean_absolute_percentage_error,
    keras.losses.huber,
    keras.losses.log_cosh,
    keras.losses.cosine_similarity,
    keras.losses.hinge,
    keras.losses.squared_hinge,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Losses:
    """The terms of a loss.

    Attributes:
      terms: In the order in which Keras adds them.
      own_denominator: For each term, whether it is divided by something other than the number of examples.
      by_positions: See `weighting.term_sums`.
      whole: Names of the terms that are one value for a whole batch, and whether it is a mean over the examples.
      reading: Names of the terms with a value per example that depends on the other examples of the batch.
    """

    terms: tuple[ResolvedLoss, ...]
    own_denominator: tuple[bool, ...]
    by_positions: bool
    whole: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    reading: Sequence[str] = ()

    def sums(
        self, y: Sequence[Any], outputs: Sequence[Any], sample_weight: Sequence[Any], weight: tf.Tensor
    ) -> list[TermSums]:
        """Numerator and denominator of each term over one micro-batch.

        Args:
          y: Flat labels.
          outputs: Flat outputs.
          sample_weight: The sample weights of each label; None for a label without any.
          weight: Float32 `[m]`.
        """
        return [
            term_sums(
                term.loss,
                _taken(y, term.y),
                _taken(outputs, term.outputs),
                _taken(sample_weight, term.y),
                weight,
                by_positions=self.by_positions,
            )
            for term in self.terms
        ]

    def total(self, numerators: Sequence[tf.Tensor]) -> tf.Tensor:
        """The sum of the terms weighted by `loss_weights`, a scalar; zero if there are none."""
        parts = [
            value if term.weight is None else value * term.weight
            for term, value in zip(self.terms, numerators, strict=True)
        ]
        return tf.add_n(parts) if len(parts) > 1 else parts[0] if parts else tf.zeros([])


def build_losses(loss: Any, loss_weights: Any, y: Any, outputs: Outputs, *, by_positions: bool) -> Losses:
    """The losses of a model, assigned to its outputs and tried on dummy examples.

    Args:
      loss: As Keras' `compile` takes it: a loss, its name or a function `(y, outputs) -> values [m, ...]`; a list, or a
        dict by output name, of them; or a structure like that of the outputs. None for no loss.
      loss_weights: A factor for each loss, in the same structure, or None.
      y: Labels, a structure of `tf.TensorSpec` with static shapes; `()` for none.
      outputs: The model's outputs.
      by_positions: Whether to average over the unmasked positions; otherwise over examples.

    Raises:
      ConfigError: A name that Keras does not know, a structure other than that of the outputs, or labels that do not
        suit a loss.
    """
    if loss is None:
        return Losses((), (), by_positions)
    if not keras.tree.flatten(y):
        raise ConfigError(
            f"loss={_named(loss)} compares outputs with labels, but the data have none. Give labels, or leave the loss "
            "out if the model adds its own (add_loss)."
        )
    _check_outputs(loss, outputs)
    if names := [factor for factor in keras.tree.flatten(loss_weights) if isinstance(factor, str)]:
        raise ConfigError(f"loss_weights={loss_weights!r}: {names[0]!r} is not a number. Give a number for each loss.")
    try:
        terms = keras_compile.resolve_losses(loss, loss_weights, outputs.names, y, outputs.structure)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"loss={_named(loss)} does not fit the model's outputs {_shapes(outputs.structure)}"
            f"{f', named {outputs.names},' if outputs.names else ''} and the labels {_shapes(y)}: {error}"
        ) from error
    if len(terms) > 1 and not keras.tree.is_nested(outputs.structure):
        raise ConfigError(f"loss={_named(loss)}: {len(terms)} losses for one output. Add them up in one function.")
    found = Losses(tuple(terms), tuple(False for _ in terms), by_positions)
    return _tried(found, y, outputs)


def _check_outputs(loss: Any, outputs: Outputs) -> None:
    """Refuses losses for outputs that the model does not have."""
    if not isinstance(loss, dict):
        return
    known = {*(outputs.names or ()), *(outputs.structure if isinstance(outputs.structure, dict) else ())}
    unknown = [name for name in loss if name not in known]
    if not known and isinstance(outputs.structure, tf.TensorSpec):
        raise ConfigError(f"loss={_named(loss)} is a dict by output name, but the model has one output without a name.")
    if known and unknown:
        raise ConfigError(
            f"loss: {unknown[0]!r} is not an output of the model. Its outputs are: "
            f"{', '.join(map(repr, sorted(known)))}."
        )


def _tried(losses: Losses, y: Any, outputs: Outputs) -> Losses:
    """Computes each term on made-up examples, which shows its denominator and whether it keeps a value per example."""
    if any(leaf.dtype == tf.string for leaf in keras.tree.flatten(y)):
        raise ConfigError(
            f"the labels {_shapes(y)} are text, which no loss takes. Map them to class numbers, for example with "
            "keras.layers.StringLookup."
        )
    labels, values = examples_of(y), examples_of(outputs.structure)
    weight = tf.ones([keras.tree.flatten(outputs.structure)[0].shape[0]])
    own, whole, reading = [], {}, []
    for term in losses.terms:
        single = dataclasses.replace(losses, terms=(term,))
        try:
            (sums,) = single.sums(labels, values, [None] * len(labels), weight)
            given = _taken(labels, term.y), _taken(values, term.outputs)
            computed = functools.partial(called, term.loss)
            masked = sums.masked or any(keras.tree.flatten(_taken(outputs.masked, term.outputs)))
            if sums.whole:
                adds_up = term.loss.reduction != SUM and not (masked and overrides_reduction(term.loss))
                whole[term.name] = adds_up and is_mean(computed, *given)
            elif reads_other_examples(term.loss, computed, *given):
                reading.append(term.loss.name)
        except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(_unsuitable(term, y, outputs, error)) from error
        by_weight, plain = term.loss.reduction == BY_SAMPLE_WEIGHT, term.loss.reduction == SUM
        own.append(by_weight or plain or (masked and losses.by_positions and not sums.whole))
    return dataclasses.replace(losses, own_denominator=tuple(own), whole=whole, reading=reading)


def _unsuitable(term: ResolvedLoss, y: Any, outputs: Outputs, error: Exception) -> str:
    label, output = (
        _taken(keras.tree.flatten(part), places) for part, places in ((y, term.y), (outputs.structure, term.outputs))
    )
    advice = ""
    sparse = uses_integer_labels(term.loss)
    categorical = getattr(term.loss, "fn", None) is keras.losses.categorical_crossentropy
    if isinstance(label, tf.TensorSpec) and isinstance(output, tf.TensorSpec):
        if sparse and label.shape == output.shape:
            advice = " One-hot labels go with 'categorical_crossentropy'; or give class numbers."
        elif categorical and len(label.shape) < len(output.shape):
            advice = " Class numbers go with 'sparse_categorical_crossentropy'; or give one-hot labels."
    return (
        f"loss: {term.loss.name!r} does not suit labels {_shapes(label)} and outputs {_shapes(output)} of an example."
        f"{advice} ({error})"
    )


def check_names(loss: Any) -> None:
    """Refuses objects that are not losses, in any structure, before there are data.

    Raises:
      ConfigError: A name that Keras does not know, or an object that is not a loss.
    """
    for leaf in keras.tree.flatten(loss):
        if leaf is None or str(leaf).lower() in ("crossentropy", "ce"):
            continue
        try:
            resolved = keras.losses.get(leaf)
        except ValueError as error:
            raise unknown_in_keras("loss", leaf, keras.losses, error) from error
        if resolved is None or not callable(resolved):
            raise ConfigError(f"loss={leaf!r} is not a loss: give a Keras loss, its name, or a function (y, outputs).")


def uses_integer_labels(loss: Any) -> bool:
    """Whether a loss reads every label as a class index into the last dim of the outputs.

    Args:
      loss: A Keras loss, its name, or a function; False for a structure of several.
    """
    if keras.tree.is_nested(loss) or loss is None or str(loss).lower() in ("crossentropy", "ce"):
        return False
    resolved = keras.losses.get(loss)
    function = getattr(resolved, "fn", resolved)
    if function is not keras.losses.sparse_categorical_crossentropy:
        return False
    options = resolved.get_config() if isinstance(resolved, keras.losses.Loss) else {}
    return options.get("axis", -1) == -1 and options.get("ignore_class") is None


def takes_numbers(loss: Any) -> bool:
    """Whether every target of a loss is a number that may be negative, even if it is an integer; never a class number.

    Args:
      loss: As for `build_losses`. False for functions of the user's own, whose targets may be either.
    """

    def takes(leaf: Any) -> bool:
        if leaf is None or str(leaf).lower() in ("crossentropy", "ce"):
            return False
        resolved = keras.losses.get(leaf)
        return getattr(resolved, "fn", resolved) in _OF_NUMBERS

    leaves = keras.tree.flatten(loss)
    return bool(leaves) and all(map(takes, leaves))


def _taken(flat: Sequence[Any], places: Any) -> Any:
    return keras.tree.map_structure(lambda place: flat[place], places)


def _named(loss: Any) -> str:
    def name(leaf: Any) -> Any:
        return leaf if leaf is None or isinstance(leaf, str) else getattr(leaf, "__name__", type(leaf).__name__)

    return repr(keras.tree.map_structure(name, loss))


def _shapes(structure: Any) -> str:
    return str(keras.tree.map_structure(lambda leaf: f"{leaf.dtype.name}{list(leaf.shape[1:])}", structure))
