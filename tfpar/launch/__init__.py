"""`python -m tfpar.launch`: a local cluster, one process a task."""

from __future__ import annotations

from tfpar.launch.cli import free_ports, main

__all__ = ["free_ports", "main"]
