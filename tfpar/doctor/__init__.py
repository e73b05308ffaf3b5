"""`python -m tfpar.doctor`: reports the state of this machine and its problems."""

from __future__ import annotations

from tfpar.doctor.cli import describe_machine

__all__ = ["describe_machine"]
