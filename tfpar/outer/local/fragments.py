"""Fragments of a model, exchanged one after the other while steps run (Streaming DiLoCo, Douillard et al. 2025)."""

from __future__ import annotations

import concurrent.futures
import itertools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpar.config import ConfigError, ExperimentConfig
from tfpar.exchange import DevicesOfReplica, Exchange, Traffic
from tfpar.parallel.split import whole_elements

import keras
import numpy as np

_PREFIX = "fragment/"


def exchange_of(config: ExperimentConfig) -> Exchange:
    """Creates the exchange of a configuration, in fragments if the configuration has them; it is not built yet."""
    spec, outer = config.exchange.exchange, config.outer
    return FragmentExchange(spec, outer.outer_fragments) if outer.streams else Exchange(spec)


def divide(weights: Sequence[keras.Variable], fragments: int) -> list[tuple[int, ...]]:
    """Divides a model into fragments of whole layers, in their order, with about the same number of bytes each.

    Args:
      weights: The trainable weights, in the order of the layers.
      fragments: Number of fragments, P.

    Returns:
      The indices of the weights of each fragment; no fragment is empty.

    Raises:
      ConfigError: The model has fewer than P layers with trainable weights.
    """
    layers: list[list[int]] = []
    names: list[str] = []
    for index, weight in enumerate(weights):
        name = weight.path.rpartition("/")[0] or weight.path
        if not names or names[-1] != name:
            layers.append([])
            names.append(name)
        layers[-1].append(index)
    if len(layers) < fragments:
        raise ConfigError(
            f"--outer_fragments={fragments}: the model has only {len(layers)} layers with trainable weights, and a "
            f"fragment is at least one. Use --outer_fragments={len(layers)} or less."
        )
    sizes = [whole_elements([weights[index] for index in layer]) for layer in layers]
    ends = np.cumsum(sizes)
    bounds = [0]
    for number in range(1, fragments):
        nearest = int(np.argmin(np.abs(ends - ends[-1] * number / fragments))) + 1
        bounds.append(min(max(nearest, bounds[-1] + 1), len(layers) - (fragments - number)))
    bounds.append(len(layers))
    pairs = itertools.pairwise(bounds)
    return [tuple(index for layer in layers[first:last] for index in layer) for first, last in pairs]


class FragmentExchange(Exchange):
    """An exchange for each fragment, and a thread that runs them concurrently with the training steps.

    Exchanges run in the order in which they are started, one at a time: the same on every worker.

    Args:
      spec: See `Exchange`.
      count: Number of fragments.

    Attributes:
      fragments: Indices of the weights of each fragment.
      parts: The exchange of each fragment.
    """

    def __init__(self, spec: str, count: int) -> None:
        super().__init__(spec)
        self._count = count
        self.fragments: list[tuple[int, ...]] = []
        self.parts: list[Exchange] = []
        self._background = _Background()

    def build(self, variables: Sequence[Any], **options: Any) -> None:
        """See `Exchange.build`. Movements are dense, so no rows of embeddings are sent.

        Raises:
          ConfigError: The model has fewer layers than fragments.
        """
        options.pop("sparse", None)
        replica = options.pop("per_device", None)
        self.fragments = divide(variables, self._count)
        self.parts = [Exchange(self.spec) for _ in self.fragments]
        for part, places in zip(self.parts, self.fragments, strict=True):
            own = _of_fragment(replica, places) if replica else None
            part.build([variables[place] for place in places], per_device=own, **options)

    def start(self, exchange: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        """Runs an exchange in the background, after the exchanges that were started earlier."""
        return self._background.start(exchange)

    @property
    def compresses(self) -> bool:
        """See `Exchange.compresses`."""
        return any(part.compresses for part in self.parts)

    @property
    def state(self) -> list[Any]:
        """See `Exchange.state`."""
        return [variable for part in self.parts for variable in part.state]

    @property
    def plan_table(self) -> str:
        """See `Exchange.plan_table`; contains the tables of all fragments."""
        return "\n".join(part.plan_table for part in self.parts if part.plan_table)

    def export(self) -> dict[str, np.ndarray]:
        """See `Exchange.export`; waits until running exchanges have ended."""
        self._background.wait()
        return {
            f"{_PREFIX}{number}/{name}": value
            for number, part in enumerate(self.parts)
            for name, value in part.export().items()
        }

    def restore(self, workers: int, read: Callable[[int], Mapping[str, np.ndarray]]) -> None:
        """See `Exchange.restore`."""
        self._background.wait()
        for number, part in enumerate(self.parts):
            part.restore(workers, _reader_of(read, f"{_PREFIX}{number}/"))

    def retune(self) -> bool:
        """See `Exchange.retune`."""
        self._background.wait()
        changed = [part.retune() for part in self.parts]  # all of them: `any` over a generator would stop at the first
        return any(changed)

    def observed(self) -> dict[str, float]:
        """See `Exchange.observed`; returns means over the fragments."""
        if not self._background.idle:
            return {}
        found: dict[str, list[float]] = {}
        for part in self.parts:  # of which some may not have compared their sums yet
            for name, value in part.observed().items():
                found.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in found.items()}

    def describe(self) -> str:
        """See `Exchange.describe`."""
        return self.parts[0].describe() if self.parts else super().describe()

    def traffic(self, replicas: int, sidecar_length: int) -> Traffic:
        """See `Exchange.traffic`; returns the total of all fragments."""
        every = [part.traffic(replicas, sidecar_length) for part in self.parts]
        payload, wire, dense = (
            sum(getattr(one, f"{name}_bytes") for one in every) for name in ("payload", "wire", "dense")
        )
        largest = max(every, key=lambda one: one.dense_bytes)
        return Traffic(largest.codec, largest.pattern, payload, wire, dense)


def _of_fragment(replica: DevicesOfReplica, fragment: Sequence[int]) -> DevicesOfReplica:
    """Returns how the devices of a replica divide the variables of a fragment, numbered within it."""
    numbers = {index: number for number, index in enumerate(fragment)}
    indices = [[numbers[index] for index in own if index in numbers] for own in replica.indices]
    kept = [place for place, own in enumerate(indices) if own or place == 0]  # the first also sends the vector

    def of_kept(values: Sequence[Any]) -> list[Any]:
        return [values[place] for place in kept]

    return replica._replace(
        indices=of_kept(indices),
        programs=of_kept(replica.programs),
        devices=of_kept(replica.devices) if replica.devices else (),
        per_replica=replica.program_count,
    )


def _reader_of(read: Callable[[int], Mapping[str, np.ndarray]], prefix: str) -> Callable[[int], dict[str, np.ndarray]]:
    def part(worker: int) -> dict[str, np.ndarray]:
        saved = read(worker)
        return {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}

    return part


_Call = tuple[Callable[[], Any], concurrent.futures.Future[Any], concurrent.futures.Future[None]]


class _Background:
    """One thread that makes calls in order. It does not keep the process alive: a lost peer may leave it waiting."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: concurrent.futures.Future[None] | None = None  # without the result, which would be kept

    @property
    def idle(self) -> bool:
        """Whether all calls have ended."""
        return self._last is None or self._last.done()

    def start(self, call: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        """Makes a call after the earlier ones; the future receives its result or its error."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fragments", daemon=True)
            self._thread.start()
        self._last, future = concurrent.futures.Future(), concurrent.futures.Future[Any]()
        self._calls.put((call, future, self._last))
        return future

    def wait(self) -> None:
        """Waits until all calls have ended; raises the error of the last call, if any."""
        if self._last is not None:
            self._last.result()

    def _run(self) -> None:
        while True:
            self._make(*self._calls.get())

    @staticmethod
    def _make(
        call: Callable[[], Any], future: concurrent.futures.Future[Any], done: concurrent.futures.Future[None]
    ) -> None:
        """Makes a call. Nothing of it is kept afterwards: it has the movement of a fragment."""
        try:
            future.set_result(call())
            done.set_result(None)
        except BaseException as error:
            future.set_exception(error)
            done.set_exception(error)
