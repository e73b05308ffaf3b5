"""Exchange algorithms by name. Each registers itself with its own options, its bucket and its cost.

```python
@dataclasses.dataclass(frozen=True, kw_only=True)
class EveryOtherOptions(Options):
    every: int = whole(2, "Elements of which one is sent.", minimum=1)

register("every_other", EveryOtherOptions, EveryOther, cost=cost, example="every=4")
```

Then `--exchange=every_other:every=4` works, is proposed in errors, and is listed by `python -m tfpar.exchange`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpar.collectives.cost_model import COPYING, NOTHING, Cost, Link, Speed
from tfpar.collectives.group import Group
from tfpar.config import ConfigError, unknown_name
from tfpar.exchange.buckets import Bucket
from tfpar.exchange.options import Options

import tensorflow as tf

# Name of the exchange that compresses nothing.
DENSE = "none"

# Share of the predicted time that another plan must save: a new plan is traced again, and measurements of one link vary
# by a few percent.
LEAST_GAIN = 0.03


@dataclasses.dataclass(frozen=True, eq=False)
class Algorithm:
    """How buckets of gradients are summed; see `register`."""

    name: str
    options: type[Options]
    build: Callable[[Any, Sequence[tf.TensorShape], Group, int, str], Bucket]
    cost: Callable[[Any, int, int, Link, Speed], Cost]
    measure: Callable[[Spec, Group, str], Any] | None
    choose: Callable[[Spec, Sequence[int], Group, Any], TuningResult]
    candidates: Callable[[Mapping[str, Any], Group], Sequence[Options]]
    summary: str
    example: str
    fixed: Mapping[str, Any]

    def measured(self, spec: Spec, group: Group, device: str) -> Any:
        """What `choose` needs to know of the workers of a group, which call it together."""
        return self.measure(spec, group, device) if self.measure else None

    def make_options(self, **values: Any) -> Any:
        """The options with these values, and with those that the name implies."""
        return self.options(**self.fixed, **values)

    @property
    def fields(self) -> list[dataclasses.Field[Any]]:
        """The options that can be given by name."""
        fields = [field for field in dataclasses.fields(self.options) if field.metadata]
        return [field for field in fields if field.name not in self.fixed and not field.metadata["read"]]

    @property
    def first_field(self) -> dataclasses.Field[Any] | None:
        """The option that may come first without its name, as in `topk:0.01`."""
        fields = (field for field in dataclasses.fields(self.options) if field.metadata.get("read"))
        return next(fields, None)


@dataclasses.dataclass(frozen=True)
class Spec:
    """An exchange as the user described it.

    Attributes:
      text: The given text, e.g. `int4:block=512,pattern=all_gather`.
      algorithm: The algorithm that it names.
      options: Its options.
    """

    text: str
    algorithm: Algorithm
    options: Any

    @property
    def name(self) -> str:
        """Name of the algorithm; `none` for the dense all-reduce."""
        return self.algorithm.name

    @property
    def compresses(self) -> bool:
        """Whether this is anything but the dense all-reduce."""
        return self.name != DENSE

    def build(self, shapes: Sequence[tf.TensorShape], group: Group, seed: int, name: str) -> Bucket:
        """The bucket that sums tensors of these shapes; see `register`."""
        return self.algorithm.build(self.options, shapes, group, seed, name)

    def check_group(self, group: Group) -> None:
        """Refuses a group that the exchange does not work in.

        Raises:
          ConfigError: The exchange does not work for this number of workers, or on their devices.
        """
        try:
            self.options.check_group(group)
        except ValueError as error:
            raise ConfigError(f"--exchange={self.text}: {error}") from error

    def cost(self, elements: int, workers: int, link: Link, speed: Speed = COPYING) -> Cost:
        """The cost of exchanging one vector.

        Args:
          elements: Float32 elements of the vector.
          workers: Number of workers N.
          link: The link from each of them to the others.
          speed: How fast a worker encodes and decodes; by default as fast as it copies.
        """
        return self.algorithm.cost(self.options, elements, workers, link, speed) if workers > 1 else NOTHING

    def describe(self) -> str:
        """One line: codec, options that matter, pattern."""
        if not self.compresses:
            return f"{self.name} (dense float32 all-reduce)"
        feedback = "error feedback" if self.options.error_feedback else "no error feedback"
        warmup = f", dense for the first {self.options.warmup_steps} steps" if self.options.warmup_steps else ""
        return f"{self.text} ({self.options.description}, {feedback}{warmup})"


@dataclasses.dataclass(frozen=True)
class TuningResult:
    """A spec for each bucket, the same on all workers.

    Attributes:
      specs: The exchange of each bucket.
      table: The measurements, and the expected cost of each bucket, as text; empty if nothing was measured.
      seconds: The predicted time of any plan, a spec for each bucket; None if nothing was measured.
    """

    specs: list[Spec]
    table: str = ""
    seconds: Callable[[Sequence[Spec]], float] | None = None

    def improves_on(self, current: Sequence[Spec]) -> bool:
        """Whether to replace another plan by `specs`: the measurements predict a gain of at least `LEAST_GAIN`."""
        if self.specs == current or self.seconds is None:
            return self.specs != current
        return self.seconds(self.specs) <= (1.0 - LEAST_GAIN) * self.seconds(current)


def _as_given(spec: Spec, elements: Sequence[int], group: Group, measured: Any) -> TuningResult:
    """The same spec for every bucket."""
    del group, measured
    return TuningResult([spec] * len(elements))


def _no_candidates(common: Mapping[str, Any], group: Group) -> Sequence[Options]:
    del common, group
    return ()


_ALGORITHMS: dict[str, Algorithm] = {}


def register(
    name: str,
    options: type[Options],
    build: Callable[[Any, Sequence[tf.TensorShape], Group, int, str], Bucket],
    *,
    cost: Callable[[Any, int, int, Link, Speed], Cost],
    measure: Callable[[Spec, Group, str], Any] | None = None,
    choose: Callable[[Spec, Sequence[int], Group, Any], TuningResult] = _as_given,
    candidates: Callable[[Mapping[str, Any], Group], Sequence[Options]] = _no_candidates,
    summary: str = "",
    example: str = "",
    fixed: Mapping[str, Any] | None = None,
) -> None:
    """Registers `--exchange=NAME`.

    Args:
      name: The name; must be new.
      options: Frozen dataclass of its options, a subclass of `tfpar.exchange.options.Options`.
      build: `(options, shapes, group, seed, name) -> Bucket`: makes the bucket that sums tensors of these shapes over
        the group. `seed` is a distinct number for each bucket; `name` is a prefix for the names of its variables.
      cost: `(options, elements, workers, link, speed) -> Cost` of exchanging a vector, for two workers and more.
      measure: `(spec, group, device)`: what `choose` needs to know of the workers, which call it together; by default
        nothing. The group is of all workers, of which the one that exchanges may be a part.
      choose: `(spec, elements of each bucket, group, measured) -> TuningResult`: decides how each bucket is exchanged;
        by default, by this algorithm. Depends on its arguments alone, so that workers decide the same.
      candidates: `(common options, group) -> list of options` with which `auto` considers the algorithm. By default
        `auto` does not. Without a codec it counts as exact, and its speed as that of copying.
      summary: What it does, in a few words, for `python -m tfpar.exchange`.
      example: Example options, for errors.
      fixed: Options that the name implies. They cannot be given.

    Raises:
      ValueError: The name is taken, or contains a colon.
    """
    if not name or ":" in name or name in _ALGORITHMS:
        raise ValueError(f"exchange algorithm {name!r} is taken, empty, or contains a colon")
    _ALGORITHMS[name] = Algorithm(
        name, options, build, cost, measure, choose, candidates, summary, example, dict(fixed or {})
    )


def unregister(name: str) -> None:
    """Removes `--exchange=NAME` again."""
    del _ALGORITHMS[name]


def names() -> tuple[str, ...]:
    """The names that `--exchange` may start with, in the order in which they were registered."""
    return tuple(_ALGORITHMS)


def get(name: str, flag: str = "--exchange") -> Algorithm:
    """The algorithm of a name.

    Args:
      name: The name.
      flag: The flag that gave the name; named in errors.

    Raises:
      ConfigError: An unknown name, with the nearest known ones.
    """
    if name not in _ALGORITHMS:
        raise unknown_name(flag, name, _ALGORITHMS)
    return _ALGORITHMS[name]


def help_text() -> str:
    """All algorithms with their options; options that several share are listed once."""
    shared = [field.name for field in dataclasses.fields(Options)]
    by_options: dict[type[Options], list[Algorithm]] = {}
    for algorithm in _ALGORITHMS.values():
        by_options.setdefault(algorithm.options, []).append(algorithm)
    lines = []
    for algorithms in by_options.values():
        first = algorithms[0].first_field
        lines += [f"{one.name}{f'[:{first.name}]' if first else ''}: {one.summary}" for one in algorithms]
        own = [field for field in algorithms[0].fields if field.name not in shared or field.metadata["alias"]]
        lines += [_option_line(field) for field in [*([first] if first else []), *own]]
    shared_fields = [field for field in dataclasses.fields(Options) if field.metadata]
    return "\n".join([*lines, "All that compress:", *map(_option_line, shared_fields)])


def _option_line(field: dataclasses.Field[Any]) -> str:
    alias = f" (or {field.metadata['alias']})" if field.metadata["alias"] else ""
    default = str(field.default).lower() if isinstance(field.default, bool) else field.default
    return f"  {field.name}{alias}: {field.metadata['help']} Default {default}."
