"""Learning from files as they arrive in a directory, each exactly once."""

from __future__ import annotations
