"""Input batches prepared by tf.data service workers instead of the training worker.

Each training worker has a job of its own at the dispatcher. With dynamic sharding the service
hands out the updates of its position counter, so each update that is visited is prepared by one
service worker, exactly once while no service worker fails.

Order: with one service worker, that of the pipeline without the service, bit for bit. With
several, elements arrive in turn from the workers, as fast as they deliver: every example still
occurs once an epoch, but which ones share an update may differ by up to the prefetched range,
and from run to run. Use one service worker per training worker where runs must repeat.
"""

from __future__ import annotations

import socket
import time

from tfpar.config import ConfigError
from tfpar.inputs.source import Source

import tensorflow as tf

# Examples kept in memory travel inside the graph, and a graph message is limited to 2 GiB.
_TRAVEL_BYTES = 512 << 20
_REACH_SECONDS = 20.0
_RETRY_SECONDS = 0.5


def check_source(address: str, source: Source) -> None:
    """Refuses what a tf.data service cannot run.

    Args:
      address: `--data_service`.
      source: The source that would be read there.

    Raises:
      ConfigError: The address has no protocol, or the source reads through Python or is too large
        to be sent along.
    """
    if not address.startswith("grpc://") or len(address) == len("grpc://"):
        raise _not_an_address(address)
    info = source.info
    if not source.portable:
        raise ConfigError(
            f"--data_service={address!r} cannot read --dataset={info.name}: its records are read through Python in "
            "this process, which cannot be sent to service workers. Leave out --data_service, or let the examples be "
            "kept in memory (--cache=memory), where they travel along."
        )
    if source.kept_bytes > _TRAVEL_BYTES:
        raise ConfigError(
            f"--data_service={address!r} cannot take --dataset={info.name}: its {source.kept_bytes / 2**20:.0f} MiB in "
            f"memory would travel in the graph, which may hold {_TRAVEL_BYTES >> 20} MiB. Leave out --data_service, or "
            "use --cache=none if the source is images:DIR."
        )


def check_reachable(address: str) -> None:
    """Waits until the dispatcher answers, which TensorFlow would do for ever.

    Args:
      address: `grpc://HOST:PORT`.

    Raises:
      ConfigError: Not such an address, or nothing listens there within 20 seconds: time for a dispatcher that is
        started together with the workers.
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
    return ConfigError(f"--data_service={address!r} must be grpc://HOST:PORT, the dispatcher's address.")


def distribute(elements: tf.data.Dataset, address: str) -> tf.data.Dataset:
    """The same elements, prepared by the service.

    Args:
      elements: The pipeline up to its batches.
      address: `grpc://HOST:PORT` of the dispatcher.
    """
    return elements.apply(
        tf.data.experimental.service.distribute(
            processing_mode=tf.data.experimental.service.ShardingPolicy.DYNAMIC,
            service=address,
            # Batches of floats hardly shrink; compressing them costs more time than it saves.
            compression=None,
        )
    )
