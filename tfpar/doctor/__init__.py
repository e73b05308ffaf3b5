"""`python -m tfpar.doctor`: what this machine has, and what would go wrong."""

from __future__ import annotations

from tfpar.doctor.cli import describe_machine

__all__ = ["describe_machine"]
