"""The usual objective: losses of a model's outputs against labels, and losses that the model adds (`add_loss`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.inputs import Weighted
from tfpar.parallel.tensor.divided_logits import check_returned, kept_divided
from tfpar.training.model.call import call_model
from tfpar.training.objective import losses as loss_terms
from tfpar.training.objective import metrics as additive_metrics
from tfpar.training.objective.losses import Losses, build_losses
from tfpar.training.objective.metrics import MetricTerm, build_metrics
from tfpar.training.objective.names import unknown_in_keras
from tfpar.training.objective.outputs import check_inputs, check_labels, layers_adding_losses, outputs_of, with_examples
from tfpar.training.objective.protocol import Batch, ObjectiveSums, Tensors, Totals
from tfpar.training.objective.weighting import SUM

import keras
import tensorflow as tf

# A prime that is unlikely to be a size of labels or outputs, so that the dim of examples is not mistaken for another.
_TRIED_EXAMPLES = (7, 11, 13, 17)
# Names of metrics that `compile` chooses by the loss or the shapes.
_CHOSEN_BY_LOSS = ("accuracy", "acc", "crossentropy", "ce")


@dataclasses.dataclass(frozen=True, eq=False)
class Goal:
    """The goal of training, as the arguments of Keras' `compile`.

    Attributes:
      loss: See `losses.build_losses`.
      loss_weights: A factor for each loss, or None.
      metrics: See `metrics.build_metrics`.
      weighted_metrics: Metrics in which sample weights count.
      loss_weighting: `positions` or `examples`: what a loss with a mask is averaged over.
    """

    loss: Any = None
    loss_weights: Any = None
    metrics: Any = None
    weighted_metrics: Any = None
    loss_weighting: str = "positions"

    def label_options(self) -> dict[str, Any]:
        """What the loss says of labels, as arguments of `tfpar.inputs.from_arrays`: `ignore_class`, `num_classes`."""
        classes = 0 if loss_terms.takes_numbers(self.loss) else None
        return {"ignore_class": getattr(self.loss, "ignore_class", None), "num_classes": classes}

    def metric_names(self) -> list[str]:
        """Names of the metric objects among the metrics."""
        leaves = keras.tree.flatten([self.metrics, self.weighted_metrics])
        return [leaf.name for leaf in leaves if isinstance(leaf, keras.metrics.Metric)]

    def check_names(self) -> None:
        """Refuses losses and metrics that Keras does not know, before there are data; and a metric object that is given
        twice, whose only state would get both sums.

        Raises:
          ConfigError: Names the first.
        """
        loss_terms.check_names(self.loss)
        seen: set[int] = set()
        for leaf in keras.tree.flatten([self.metrics, self.weighted_metrics]):
            if isinstance(leaf, keras.metrics.Metric):
                if id(leaf) in seen:
                    raise ConfigError(
                        f"metrics: the object {leaf.name!r} is given twice. Give an object for each output, and one "
                        "each in metrics and weighted_metrics."
                    )
                seen.add(id(leaf))
            try:
                leaf if leaf is None or str(leaf).lower() in _CHOSEN_BY_LOSS else keras.metrics.get(leaf)
            except ValueError as error:
                raise unknown_in_keras("metrics", leaf, keras.metrics, error) from error


@dataclasses.dataclass(frozen=True, eq=False)
class _Bound:
    """A goal that is assigned to the labels and outputs of a model."""

    losses: Losses
    metrics: Sequence[MetricTerm]
    totals: Totals
    labels: Any
    inputs: list[Any]
    adding: Callable[[], Sequence[str]]


@dataclasses.dataclass(frozen=True, eq=False)
class SupervisedObjective:
    """The loss of a model's outputs against labels, weighted by example or position.

    Which loss belongs to which output depends on the structure and shapes of labels and outputs: `bind` assigns them.

    Attributes:
      model: A built Keras model.
      goal: Losses and metrics.
    """

    model: keras.Model
    goal: Goal
    _bound: list[_Bound] = dataclasses.field(default_factory=list, repr=False)

    def bind(self, input_spec: Any, label_spec: Any) -> None:
        """Assigns losses and metrics to the outputs; once, for labels of one structure.

        Args:
          input_spec: Structure of `tf.TensorSpec` of the inputs of one example.
          label_spec: The same of its labels; `()` for none.

        Raises:
          ConfigError: Losses, metrics, labels and outputs that do not fit; the first of them.
        """
        if self._bound:
            check_labels(label_spec, self._bound[0].labels)
            check_inputs(self.model, input_spec, self._bound[0].inputs)
            return
        sizes = {size for spec in tf.nest.flatten([input_spec, label_spec]) for size in spec.shape}
        examples = next(size for size in _TRIED_EXAMPLES if size not in sizes)
        outputs = outputs_of(self.model, input_spec, examples)
        y, goal = with_examples(label_spec, examples), self.goal
        if goal.loss is None and not outputs.adds_losses():
            raise ConfigError(
                "loss is missing: give a Keras loss, its name, or a function (y, outputs); without one the model must "
                "add a loss itself (add_loss). The arguments of compile count if the compiled model itself is given, "
                "Trainer(model), not a function that returns it."
            )
        by_positions = goal.loss_weighting == "positions"
        losses = build_losses(goal.loss, goal.loss_weights, y, outputs, by_positions=by_positions)
        metrics = build_metrics(goal.metrics, goal.weighted_metrics, losses.terms, outputs.names, y, outputs.structure)
        totals = _totals(losses, metrics, adds_losses=any(losses.own_denominator) and outputs.adds_losses())
        adding = functools.cache(lambda: layers_adding_losses(self.model, input_spec, examples))
        self._bound.append(_Bound(losses, metrics, totals, label_spec, [input_spec], adding))

    @property
    def totals(self) -> Totals:
        """The sums beside the loss. Only after `bind`."""
        return self._bound[0].totals

    @property
    def whole_losses(self) -> Mapping[str, bool]:
        """Losses of one value for a whole batch, see `Losses.whole`; none before `bind`."""
        return self._bound[0].losses.whole if self._bound else {}

    @property
    def reading_losses(self) -> Sequence[str]:
        """Losses whose values depend on other examples, see `Losses.reading`; none before `bind`."""
        return self._bound[0].losses.reading if self._bound else ()

    @property
    def layers_adding_losses(self) -> Sequence[str]:
        """Names of the layers that add losses of examples, see `outputs.layers_adding_losses`; none before `bind`."""
        return self._bound[0].adding() if self._bound else ()

    def __call__(
        self, params: Tensors, state: Tensors, batch: Batch, *, training: bool, scales: tf.Tensor | None = None
    ) -> ObjectiveSums:
        """See `Objective`.

        Raises:
          ConfigError: Sample weights or masks that do not fit the values of a loss.
        """
        x, y, weight = batch
        y, sample_weight = y if isinstance(y, Weighted) else (y, None)
        with kept_divided() as kept:
            outputs, new_state, extra = call_model(self.model, params, state, x, training=training)
        labels, flat = keras.tree.flatten(y), keras.tree.flatten(outputs)
        check_returned(kept, flat)
        weights = weight_of_each(sample_weight, len(labels))
        bound = self._bound[0]
        count = tf.reduce_sum(weight)
        terms = bound.losses.sums(labels, flat, weights, weight)
        numerators, denominators = [term.numerator for term in terms], [term.denominator for term in terms]
        if bound.totals.needs_scales and scales is not None:
            numerators = [value * scales[index] for index, value in enumerate(numerators)]
            denominators = [count] * len(terms)
        summable = not bound.totals.needs_scales or scales is not None
        loss = bound.losses.total(numerators) if summable else tf.zeros([])
        if extra:  # add_loss and regularisers are per batch; the division by the count undoes this product
            loss += count * tf.add_n([tf.cast(tf.reduce_sum(value), tf.float32) for value in extra])
        metrics = [part for pair in zip(numerators, denominators, strict=True) for part in pair]
        metrics = metrics[: 2 * bound.totals.terms]
        if bound.totals.needs_scales:
            metrics.append(terms[_main_term(bound.losses)].denominator)
        for metric in bound.metrics:
            sums = metric.sums(labels[metric.y], flat[metric.outputs], weights[metric.y], weight)
            metrics += [tf.cast(value, tf.float32) for value in sums]
        return ObjectiveSums(loss, count, list(new_state), metrics)


def _totals(losses: Losses, metrics: Sequence[MetricTerm], *, adds_losses: bool) -> Totals:
    """How to read sums of these losses and metrics."""
    several = len(losses.terms) > 1
    own = any(losses.own_denominator)
    is_sum = tuple(term.loss.reduction == SUM for term in losses.terms)
    terms = len(losses.terms) if several or own else 0
    needs_scales = own and (several or adds_losses or any(is_sum))
    means = [keras.metrics.Mean(name=f"{term.name}_loss") for term in losses.terms[:terms]]
    by_name = {term.name: term.metric for term in metrics}
    # With scales, the sums of each term have the count in place of its denominator.
    loss_counts = [keras.metrics.Sum(name="loss_count")] if needs_scales else []
    sums = 2 * terms + len(loss_counts)

    def by_term(values: Sequence[float]) -> dict[str, Any]:
        return {mean.name: value for mean, value in zip(means, values, strict=True)} if several else {}

    def results(state: Sequence[Any]) -> dict[str, Any]:
        values = [_quotient(*state[2 * index : 2 * index + 2]) for index in range(terms)]
        return by_term(values) | additive_metrics.results(by_name, state[sums:])

    def evaluated_losses(loss: Any, count: Any, state: Sequence[Any]) -> dict[str, Any]:
        pairs = zip(state[0 : 2 * terms : 2], state[1 : 2 * terms : 2], is_sum, strict=False)
        values = [_quotient(total, 1.0 if undivided else divisor) for total, divisor, undivided in pairs]
        total = float(loss / count)
        if own:  # the sum of the loss omits terms with their own divisor
            factors = [1.0 if term.weight is None else term.weight for term in losses.terms]
            weighted = sum(factor * value for factor, value in zip(factors, values, strict=True))
            total = weighted + (total if needs_scales else 0.0)
        return {"loss": total, **by_term(values)}

    def evaluation(loss: Any, count: Any, state: Sequence[Any]) -> dict[str, Any]:
        return evaluated_losses(loss, count, state) | additive_metrics.results(by_name, state[sums:])

    return Totals(
        metrics=by_name,
        variables=additive_metrics.variables([*means, *loss_counts, *by_name.values()]),
        terms=terms,
        results=results,
        evaluation=evaluation,
        own_denominator=own and not needs_scales,
        needs_scales=needs_scales,
        loss_count=sums - 1 if own else None,
        takes_count=is_sum,
        batch_losses=evaluated_losses if own else None,
    )


def _main_term(losses: Losses) -> int:
    """The index of the term with the largest factor; of equal ones, the first that is not a mean over examples.

    Workers that train by themselves have one share each, which is exact for one denominator only. Penalties of weights
    do not matter here: they are the same on every worker, so any shares are exact for them.
    """
    factors = [1.0 if term.weight is None else abs(term.weight) for term in losses.terms]
    return max(range(len(factors)), key=lambda index: (factors[index], losses.own_denominator[index]))


def _quotient(total: Any, count: Any) -> float:
    return float(total) / float(count) if count else 0.0


def weight_of_each(sample_weight: Any, labels: int) -> list[Any]:
    """The sample weights for each label: one for all, or one each."""
    if sample_weight is None:
        return [None] * labels
    flat = keras.tree.flatten(sample_weight)
    if len(flat) not in (1, labels):
        raise ConfigError(f"{len(flat)} sample weights for {labels} labels. Give one for all of them, or one for each.")
    return flat * labels if len(flat) == 1 else flat
