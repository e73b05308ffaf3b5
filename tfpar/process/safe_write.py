"""Output that survives a full disk, a full or a closed pipe, none of which is a reason to end a run."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
from typing import IO, Any

# EAGAIN: a full pipe that another process, which shares it, has made non-blocking.
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EAGAIN})
_full: list[IO[Any]] = []


def put(stream: IO[Any], content: Any) -> bool:
    """Writes and flushes; what does not fit on a full disk or into a full pipe is dropped, and characters that the
    stream cannot encode are escaped.

    Args:
      stream: Of text or bytes.
      content: Text or bytes.

    Returns:
      False if the reader of a pipe has closed it.
    """
    try:
        try:
            stream.write(content)
        except UnicodeEncodeError as error:  # another locale than UTF-8, or a file name that is no text
            encoding = getattr(stream, "encoding", None) or error.encoding  # an error of KOI8-R says "charmap"
            stream.write(content.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        return False
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        if not _full:
            atexit.register(_empty)
        if stream not in _full:
            _full.append(stream)
    return True


def shortened(text: str, limit: int = 200) -> str:
    """The beginning of a text, with `…` where something was left out.

    Args:
      text: Any text.
      limit: Characters at most.
    """
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def escaped(text: str) -> str:
    """A text with escapes in place of what UTF-8 cannot encode, such as bytes of a path that is no text."""
    return text.encode(errors="backslashreplace").decode()


def _empty() -> None:
    """Flushes the streams before Python does, which turns a failure into exit code 120."""
    for stream in _full:
        try:
            if not stream.closed:
                stream.flush()
        except OSError:
            to_nowhere(stream)


def to_nowhere(stream: IO[Any]) -> None:
    """Sends the rest of a stream, including its buffer, to /dev/null."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
