"""Runs a function once modules have been imported, without importing them."""

from __future__ import annotations

import abc
import importlib.abc
import importlib.machinery
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


def after_imports_below(package: str, function: Callable[[], bool]) -> None:
    """Runs a function whenever the import of a module below a package, with all that it imports, has ended.

    Args:
      package: Name of the package.
      function: What to run, until it returns True. It may import modules of the package.
    """
    sys.meta_path.insert(0, _EndOfImports(package, function))


def is_importing(package: str) -> bool:
    """Whether a module below a package is being imported, so that others may find it half there."""
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
    # CPython 3.11 marks the spec of a module until its body has run.
    return any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in modules)


class _EndOfImports(importlib.abc.MetaPathFinder):
    """Notices the end of the outermost import of a module below a package."""

    def __init__(self, package: str, function: Callable[[], bool]) -> None:
        self._prefix, self._function = f"{package}.", function
        self._depth = 0

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """The spec of a module below the package, with a loader that counts; None for any other module."""
        if not fullname.startswith(self._prefix):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        loader: Any = spec.loader if spec else None
        if loader is not None:
            load = loader.exec_module

            def load_and_count(module: Any) -> None:
                self._depth += 1
                try:
                    load(module)
                    # What the function imports is within this import, too.
                    if self._depth == 1 and self in sys.meta_path and self._function():
                        sys.meta_path.remove(self)
                finally:
                    self._depth -= 1

            loader.exec_module = load_and_count
        return spec


class FirstImport(importlib.abc.MetaPathFinder):
    """Takes part in the first import of a module, wherever it happens. Others may ask whether there is such a module.

    Args:
      name: Name of the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._asks = False

    @abc.abstractmethod
    def execute(self, load: Callable[[Any], object], module: Any) -> None:
        """Imports the module.

        Args:
          load: What executes a module.
          module: The module, which is empty yet.
        """

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """The other finders' answer, with a loader that calls `execute`; None for any other module."""
        if fullname != self._name or self._asks:
            return None
        self._asks = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asks = False
        loader: Any = spec.loader if spec else None
        if loader is not None:
            load = loader.exec_module

            def execute_first(module: Any) -> None:
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self.execute(load, module)
                else:
                    load(module)

            loader.exec_module = execute_first
        return spec


class _Notice(FirstImport):
    """Notices the first import of a module."""

    def __init__(self, name: str, function: Callable[[], object]) -> None:
        super().__init__(name)
        self._function = function

    def execute(self, load: Callable[[Any], object], module: Any) -> None:
        load(module)
        self._function()
