"""Finding and loading the library of the transport, which is built where Gloo is, or saying why it cannot be used."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from pathlib import Path
from typing import Any

from tfpar_ops.built_for import LibraryError, read

import tensorflow as tf

__all__ = ["FILE", "LibraryError", "TransportLibrary", "transport_library", "why_unusable"]

FILE = "libtfpar_transport.so"
OPERATIONS = (
    "TfparAllReduce",
    "TfparReduceScatter",
    "TfparAllToAll",
    "TfparAllGather",
    "TfparBroadcast",
    "TfparSend",
    "TfparReceive",
    "TfparBarrier",
    "TfparExchange",
    "TfparExchangeResource",
)
ABI_VERSION = 5  # TFPAR_TRANSPORT_ABI_VERSION of transport/transport.h
_TEXTS = ctypes.POINTER(ctypes.c_char_p)
_MESSAGE = [ctypes.c_char_p, ctypes.c_size_t]
_MESSAGE_BYTES = 1024
# C functions: result and arguments.
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "tfpar_transport_listen": (
        ctypes.c_int64,
        [*[ctypes.c_int32] * 2, _TEXTS, *[ctypes.c_char_p] * 2, *[ctypes.c_int64] * 2, *_MESSAGE],
    ),
    "tfpar_transport_address": (ctypes.c_int64, [ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64]),
    "tfpar_transport_connect": (ctypes.c_int, [ctypes.c_int64, _TEXTS, *_MESSAGE]),
    "tfpar_transport_dropped": (ctypes.c_int64, [ctypes.c_int64]),
    "tfpar_transport_waiting_ms": (ctypes.c_int64, [ctypes.c_int64]),
    "tfpar_transport_abort": (None, [ctypes.c_int64, ctypes.c_int32, ctypes.c_char_p]),
    "tfpar_transport_close": (None, [ctypes.c_int64]),
}


class MeshError(RuntimeError):
    """A mesh of workers could not be brought up; the message names the worker."""


@dataclasses.dataclass(frozen=True)
class TransportLibrary:
    """The library of the transport.

    A *mesh* is a connection from each worker to each other. It has a number in this process, which its operations have
    as an attribute.

    Attributes:
      operations: The module of its operations.
      gloo: The version of Gloo that it was built with.
    """

    operations: Any
    gloo: str
    _core: ctypes.CDLL

    def listen(self, rank: int, names: list[str], host: str, token: str, timeout: float, silence: float = 30.0) -> int:
        """Listens on one port until all workers are connected; returns the number of the mesh.

        Args:
          rank: Of this worker.
          names: Of all workers, for error messages.
          host: Name or address of this machine; the port is open on it alone.
          token: The same on all workers, at most 64 bytes. Connections that do not know it are dropped.
          timeout: Seconds for `connect`.
          silence: Seconds after which a connection is lost if the machine of the peer does not answer on it, from 2.

        Raises:
          MeshError: It is no address of this machine.
        """
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        limits = [round(1e3 * seconds) for seconds in (timeout, silence)]
        number = self._core.tfpar_transport_listen(
            rank, len(names), _texts(names), host.encode(), token.encode(), *limits, message, len(message)
        )
        if not number:
            raise MeshError(message.value.decode(errors="replace"))
        return int(number)

    def address(self, mesh: int) -> str:
        """Where this worker listens, in the form that `connect` takes from each worker; empty once it is connected."""
        buffer = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._core.tfpar_transport_address(mesh, buffer, len(buffer))
        return buffer.value.decode()

    def connect(self, mesh: int, addresses: list[str]) -> None:
        """Connects to all others, and stops to listen.

        Args:
          mesh: Its number.
          addresses: Of all workers, by rank.

        Raises:
          MeshError: A connection failed.
        """
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        if self._core.tfpar_transport_connect(mesh, _texts(addresses), message, len(message)):
            raise MeshError(message.value.decode(errors="replace"))

    def dropped(self, mesh: int) -> int:
        """Connections to this worker that were dropped because they did not have the token."""
        return int(self._core.tfpar_transport_dropped(mesh))

    def waiting_seconds(self, mesh: int) -> float:
        """Seconds that the oldest call has been under way; 0 where there is none."""
        return float(1e-3 * self._core.tfpar_transport_waiting_ms(mesh))

    def abort(self, mesh: int, reason: str, *, own: bool = False) -> None:
        """Ends all calls, and those to come, also of the other workers, which get the reason. The first one stays.

        Args:
          mesh: Its number.
          reason: The reason.
          own: Whether this worker is the cause. Otherwise calls end with an `UnavailableError`, here and there.
        """
        self._core.tfpar_transport_abort(mesh, own, reason.encode(errors="replace"))

    def close(self, mesh: int) -> None:
        """Ends all calls, and closes the connections."""
        self._core.tfpar_transport_close(mesh)


def _texts(texts: list[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


@functools.cache
def transport_library() -> TransportLibrary:
    """The library, loaded at the first call.

    Raises:
      LibraryError: It is not built, was built for another TensorFlow or from other sources, or does not load.
    """
    return load(Path(__file__).parent)


def why_unusable() -> str:
    """Why this process cannot use the library; empty where it can."""
    try:
        transport_library()
    except LibraryError as error:
        return str(error)
    return ""


def load(folder: Path) -> TransportLibrary:
    """Loads the library of a folder.

    Raises:
      LibraryError: See `transport_library`.
    """
    path = folder / FILE
    facts = read(folder)
    if not path.exists() or not facts.get("gloo"):
        raise LibraryError(
            "it was built without Gloo. Install Gloo (Debian and Ubuntu: apt-get install libgloo-dev), then build it "
            "again with TFPAR_GLOO=1: `make setup TFPAR_GLOO=1`."
        )
    if facts.get("tensorflow") != tf.__version__:
        raise LibraryError(f"it was built for TensorFlow {facts.get('tensorflow')}, and this is {tf.__version__}.")
    try:
        operations = tf.load_op_library(str(path))
        core = ctypes.CDLL(str(path))
    except (tf.errors.OpError, RuntimeError, OSError) as error:
        raise LibraryError(f"{FILE} does not load: {error}") from error
    version = core.tfpar_transport_abi_version() if hasattr(core, "tfpar_transport_abi_version") else None
    if version != ABI_VERSION:
        raise LibraryError(f"{FILE} was built from other sources than this code. `make setup` builds it again.")
    for name, (result, taken) in _FUNCTIONS.items():
        function = getattr(core, name)
        function.restype, function.argtypes = result, taken
    _declare_no_gradients()
    return TransportLibrary(operations, str(facts["gloo"]), core)


@functools.cache
def _declare_no_gradients() -> None:
    """Says of all operations that nothing is differentiable; TensorFlow takes that once in a process."""
    for name in OPERATIONS:
        tf.no_gradient(name)
