"""Which addresses TensorFlow's server answers on.

TensorFlow 2.21 binds its gRPC server to every address of the machine (`[::]:PORT`, whatever TF_CONFIG says: the host
is a constant in its `GrpcServer::Init`), and anyone who reaches it can run operations without authentication. There is
no option to change that. This module attaches a kernel filter to the listening socket instead: packets that are
addressed neither to the host of TF_CONFIG nor to the machine's loopback are dropped before the server sees them. The
filter needs no privileges and ends with the socket.

A socket can be filtered only once it exists, after TensorFlow has started its server: until all workers have joined,
the port is open. Set TFPAR_LISTEN=all to leave it open, e.g. where peers reach this machine by another address than the
one its own name resolves to.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence

from tfpar.config import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

VARIABLE = "TFPAR_LISTEN"
_LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
_MOST = 16  # addresses of one machine; a jump of classic BPF reaches 255 instructions

# Classic BPF (linux/filter.h). A listening socket's filter sees the TCP header; _NETWORK leads to the IP header.
_SO_ATTACH_FILTER = 26
_LOAD_WORD, _LOAD_BYTE, _AND, _JUMP_EQUAL, _JUMP, _RETURN = 0x20, 0x30, 0x54, 0x15, 0x05, 0x06
_NETWORK = 0xFFF00000
_ACCEPT, _DROP = (_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)
_Instruction = tuple[int, int, int, int]


class StillOpenError(Exception):
    """Why a port stays open on all addresses."""


class LoopbackNameError(StillOpenError):
    """A name of this machine that is a loopback address here, as Debian writes it to /etc/hosts."""


def is_open(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the port is to stay open on all addresses, as TFPAR_LISTEN says.

    Args:
      environ: The environment variables; `os.environ` by default.

    Raises:
      ConfigError: It says something else.
    """
    value = (os.environ if environ is None else environ).get(VARIABLE, "")
    if value not in ("", "all"):
        raise ConfigError(
            f"{VARIABLE}={value!r} is not known. Set it to all, which leaves TensorFlow's port open on every address "
            "of this machine, or unset it."
        )
    return value == "all"


def own_addresses(host: str, environ: Mapping[str, str] | None = None) -> list[Address]:
    """The addresses of this machine that a host name of TF_CONFIG stands for; none for loopback, always let in.

    Args:
      host: A name or an address, IPv6 in brackets or without.
      environ: The environment variables; `os.environ` by default.

    Raises:
      StillOpenError: TFPAR_LISTEN=all; or the name stands for no address of this machine, as behind a service's virtual
        address, or for loopback, which it cannot do elsewhere.
    """
    if is_open(environ):
        raise StillOpenError(f"{VARIABLE}=all")
    literal = host.strip("[]")
    if literal.lower() == "localhost":
        return []
    try:
        found = {ipaddress.ip_address(literal.partition("%")[0])}
        is_name = False
    except ValueError:
        is_name = True
        try:
            found = {ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in socket.getaddrinfo(host, None)}
        except OSError as error:
            raise StillOpenError(f"{host} does not resolve here: {error}") from None
    outside = [address for address in sorted(found, key=str) if not address.is_loopback]
    if not outside:
        if is_name:  # Debian gives a machine's name 127.0.1.1
            raise LoopbackNameError(f"{host} is a loopback address on this machine, and cannot be one for its peers")
        return []
    own = [address for address in outside if _is_own(address)]
    if not own or len(own) > _MOST:
        raise StillOpenError(f"{host} resolves to {', '.join(map(str, outside))}, which this machine does not have")
    return own


def restrict(address: str, environ: Mapping[str, str] | None = None) -> str:
    """Lets TensorFlow's server, in this process, answer on its address in TF_CONFIG and on loopback only.

    Args:
      address: `host:port` of this process in TF_CONFIG.
      environ: The environment variables; `os.environ` by default.

    Returns:
      One line describing the result.

    Raises:
      StillOpenError: The port stays open on all addresses.
    """
    host, _, port = address.rpartition(":")
    addresses = own_addresses(host, environ)
    sockets = list(_listening(int(port)))
    if not sockets:
        raise StillOpenError(f"no socket of this process listens on port {port}, as far as /proc tells")
    for descriptor in sockets:
        attach(descriptor, addresses)
    return f"port {port} answers on {describe(addresses)} only"


def describe(addresses: Sequence[Address]) -> str:
    """`10.0.0.1 and loopback`."""
    return " and ".join([*map(str, addresses), "loopback"])


def attach(descriptor: int, addresses: Sequence[Address]) -> None:
    """Drops connections to a TCP socket under addresses other than these and loopback.

    Args:
      descriptor: A socket; connections that it accepts from now on inherit the filter.
      addresses: Addresses of this machine.

    Raises:
      StillOpenError: The system does not support filters.
    """
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in _program(addresses))
    buffer = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        try:
            copy.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, head)
        except OSError as error:
            raise StillOpenError(f"the kernel takes no socket filter: {error.strerror}") from None


def _program(addresses: Sequence[Address]) -> list[_Instruction]:
    """Accepts packets for these destinations and for loopback."""
    four: list[_Instruction] = [(_LOAD_WORD, 0, 0, _NETWORK + 16)]  # the destination
    for address in addresses:
        if address.version == 4:
            four += [(_JUMP_EQUAL, 0, 1, int(address)), _ACCEPT]
    four += [(_AND, 0, 0, 0xFF000000), (_JUMP_EQUAL, 0, 1, 127 << 24), _ACCEPT, _DROP]
    six: list[_Instruction] = []
    for address in (*addresses, ipaddress.ip_address("::1")):
        if address.version == 6:
            words = struct.unpack(">4I", address.packed)
            for number, word in enumerate(words):
                rest = 2 * (len(words) - number) - 1  # to the next address
                six += [(_LOAD_WORD, 0, 0, _NETWORK + 24 + 4 * number), (_JUMP_EQUAL, 0, rest, word)]
            six.append(_ACCEPT)
    six.append(_DROP)
    return [
        (_LOAD_BYTE, 0, 0, _NETWORK),
        (_AND, 0, 0, 0xF0),
        (_JUMP_EQUAL, 1, 0, 0x40),
        (_JUMP, 0, 0, len(four)),
        *four,
        *six,
    ]


def _is_own(address: Address) -> bool:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((str(address), 0))
        return True
    return address.is_link_local  # needs its interface to be bound


def _listening(port: int) -> Iterator[int]:
    """Descriptors of this process's sockets that listen on a TCP port, as /proc shows them."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{table}") as lines:
            next(lines)
            for fields in map(str.split, lines):  # proc(5): 1 the local address, 3 the state (0A: listens), 9 the inode
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(fields[9])
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{name}"))
                if match and match[1] in inodes:
                    yield int(name)
