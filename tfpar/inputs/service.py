"""Input batches prepared by tf.data service workers instead of the training worker.

Each training worker has its own job at the dispatcher. With dynamic sharding the service
distributes the steps of the pipeline's counter, so one service worker prepares each step, exactly
once as long as no service worker fails.

Order: with one service worker, the order is that of the pipeline without the service, bit for
bit. With several, elements arrive from the service workers as fast as they deliver: every example
still occurs once per epoch, but which examples share a step may differ by up to the prefetched
range, and from run to run. Use one service worker per training worker where runs must repeat.
"""

from __future__ import annotations

import socket
import time

from tfpar.config import ConfigError
from tfpar.inputs.source import Source

import tensorflow as tf

# The graph contains the examples that are kept in memory, and a graph message is limited to 2 GiB.
_MAX_GRAPH_BYTES = 512 << 20
_REACH_SECONDS = 20.0
_RETRY_SECONDS = 0.5


def check_source(address: str, source: Source) -> None:
    """Refuses a source that a tf.data service cannot read.

    Args:
      address: `--data_service`.
      source: The source to read there.

    Raises:
      ConfigError: The address has no protocol, or the source reads through Python or is too large
        to send in the graph.
    """
    if not address.startswith("grpc://") or len(address) == len("grpc://"):
        raise _not_an_address(address)
    info = source.info
    if not source.portable:
        raise ConfigError(
            f"--data_service={address!r} cannot read --dataset={info.name}: Python code in this "
            "process reads its records, and cannot be sent to service workers. Leave out --data_service, or keep the "
            "examples in memory (--cache=memory), which sends them with the graph."
        )
    if source.kept_bytes > _MAX_GRAPH_BYTES:
        raise ConfigError(
            f"--data_service={address!r} cannot read --dataset={info.name}: its {source.kept_bytes / 2**20:.0f} MiB in "
            f"memory would be sent in the graph, which may hold {_MAX_GRAPH_BYTES >> 20} MiB. Leave out "
            "--data_service, or use --cache=none if the source is images:DIR."
        )


def check_reachable(address: str) -> None:
    """Waits until the dispatcher answers, with a time limit: TensorFlow would wait forever.

    Args:
      address: `grpc://HOST:PORT`.

    Raises:
      ConfigError: `address` does not have this form, or nothing listens there within 20 seconds, which is
        enough for a dispatcher that starts together with the workers.
    """
    host, separator, port = address.removeprefix("grpc://").rpartition(":")
    if not address.startswith("grpc://") or not separator or not host or not port.isdecimal():
        raise _not_an_address(address)
    deadline = time.monotonic() + _REACH_SECONDS
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_SECONDS).close()
            return
        except (OSError, OverflowError) as error:
            if time.monotonic() + _RETRY_SECONDS > deadline:
                raise ConfigError(
                    f"--data_service={address!r}: no dispatcher answers there ({error}; tried for "
                    f"{_REACH_SECONDS:g} s). Start it first, correct the address, or leave out --data_service."
                ) from error
        time.sleep(_RETRY_SECONDS)


def _not_an_address(address: str) -> ConfigError:
    return ConfigError(f"--data_service={address!r} must be grpc://HOST:PORT, the address of the dispatcher.")


def distribute(elements: tf.data.Dataset, address: str) -> tf.data.Dataset:
    """Returns the same elements, prepared by the service.

    Args:
      elements: The pipeline up to its batches.
      address: `grpc://HOST:PORT` of the dispatcher.
    """
    return elements.apply(
        tf.data.experimental.service.distribute(
            processing_mode=tf.data.experimental.service.ShardingPolicy.DYNAMIC,
            service=address,
            # Floats hardly compress; compressing a batch costs more time than it saves.
            compression=None,
        )
    )
