"""The random generators from which a task's model is initialised, saved so that a start that skips tasks goes on with
them.

Keras draws the seeds of initializers from Python's generator, and a model's own code may draw from NumPy's. What a task
draws depends on its method, which may build further models, so that drawing the numbers again would mean to build all
of them again.
"""

from __future__ import annotations

import json
import pathlib
import random

from tfpar.incremental.report import write_json

import numpy as np


def save(path: pathlib.Path) -> None:
    """Writes the states of the generators."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    write_json(path, {"python": [version, list(numbers), gauss], "numpy": [kind, np.asarray(keys).tolist(), *rest]})


def restore(path: pathlib.Path) -> None:
    """Sets the generators to states that `save` has written; does nothing without a file, as of an earlier version."""
    if not path.exists():
        return
    saved = json.loads(path.read_text())
    version, numbers, gauss = saved["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(saved["numpy"]))
