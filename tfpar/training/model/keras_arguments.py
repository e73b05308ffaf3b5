"""Arguments that Keras' methods take and those of `Trainer` do not: what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from tfpar.config import ConfigError

_INSTEAD = {
    "batch_size": "the batch is Trainer(global_batch_size=...), over all replicas, or Trainer(eval_batch_size=...)",
    "initial_epoch": "a run resumes by itself where its Trainer(workdir=...) has a checkpoint",
    "max_queue_size": "the input pipeline is Trainer(prefetch=..., input_threads=...)",
    "return_dict": "the result always is a dict",
    "sample_weights": "sample_weight=",
    "shuffle": "Trainer(shuffle=...)",
    "steps_per_epoch": "the length of a run is steps=, and Trainer(eval_every=...) steps lie between evaluations",
    "use_multiprocessing": "Trainer(input_threads=...)",
    "validation_batch_size": "Trainer(eval_batch_size=...)",
    "validation_data": "validation=",
    "validation_freq": "Trainer(eval_every=...), in steps",
    "validation_split": "validation=, with examples that you have held out",
    "validation_steps": "Trainer(eval_steps=...)",
    "verbose": "Trainer(verbose=...)",
    "workers": "Trainer(input_threads=...)",
    "x": "the first argument, without a name",
}


_KNOWN = {
    "fit": ("y", "sample_weight", "class_weight", "steps", "epochs", "validation", "hooks", "callbacks"),
    "evaluate": ("y", "sample_weight"),
    "predict": (),
}


def refuse(method: str, given: Mapping[str, Any]) -> None:
    """Refuses arguments that a method does not have.

    Args:
      method: `fit`, `evaluate` or `predict`.
      given: The arguments.

    Raises:
      ConfigError: There is one, with what to write instead.
    """
    known = _KNOWN[method]
    for name in given:
        near = difflib.get_close_matches(name, known, n=1)
        others = f"besides the examples it takes {', '.join(known)}." if known else "it takes the examples alone."
        instead = f"{_INSTEAD[name]}." if name in _INSTEAD else f"did you mean {near[0]}=?" if near else others
        raise ConfigError(f"Trainer.{method} takes no {name}=: {instead}")
