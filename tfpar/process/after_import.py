"""Runs a function once a module has been imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from typing import Any


def after_import(name: str, function: Callable[[], object]) -> None:
    """Runs a function when a module has been imported: now, if it has been already.

    Args:
      name: Name of the module.
      function: What to run, once. It may import what imports the module.
    """
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _Notice(name, function))


def is_importing(package: str) -> bool:
    """Whether a module below a package is being imported, so that others may find it half there."""
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
    # CPython 3.11 marks the spec of a module until its body has run.
    return any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in modules)


class _Notice(importlib.abc.MetaPathFinder):
    """Notices the first import of a module, wherever it happens."""

    def __init__(self, name: str, function: Callable[[], object]) -> None:
        self._name, self._function = name, function

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """The other finders' answer, with a loader that runs the function; None for any other module."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = spec.loader if spec else None
        if loader is not None:
            load = loader.exec_module

            def load_and_run(module: Any) -> None:
                load(module)
                self._function()

            loader.exec_module = load_and_run
        return spec
