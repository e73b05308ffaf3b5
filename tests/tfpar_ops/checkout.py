"""Where this checkout is, and in it the package with the native library."""

from __future__ import annotations

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tfpar_ops"
