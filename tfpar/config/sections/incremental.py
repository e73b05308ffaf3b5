"""The options of incremental learning, which one program takes beside those of every experiment.

This module imports neither TensorFlow nor Keras.
"""

from __future__ import annotations

import dataclasses

from tfpar.config.errors import ConfigError
from tfpar.config.fields import ConfigBase, option

METHODS = ("finetune", "replay", "ewc", "lwf", "joint")
_KINDS = ("by_class", "by_file", "in_order")


@dataclasses.dataclass(frozen=True, kw_only=True)
class IncrementalConfig(ConfigBase):
    """Tasks that come one after the other, and what keeps a model from forgetting the earlier ones."""

    tasks: str = option(
        "by_class:2",
        "How examples come: by_class:N, N classes at a time; by_file:N, N files at a time; in_order:N, in N stretches "
        "of equal length, in the order of the data.",
    )
    method: str = option(
        "replay",
        "finetune trains on each task alone; replay also on kept examples of earlier tasks; ewc holds on to weights "
        "that earlier tasks need; lwf to the outputs of the earlier model; joint trains on all tasks so far.",
        choices=METHODS,
    )
    replay_examples: int = option(200, "replay: examples that are kept, of all earlier tasks together.", minimum=1)
    replay_bytes: int = option(
        0, "replay: memory that they may take, as they are stored; fewer are kept then. 0: no limit.", minimum=0
    )
    replay_policy: str = option(
        "balanced",
        "replay: which examples are kept: balanced, as many of each class; reservoir, each seen example with the same "
        "probability.",
        choices=("balanced", "reservoir"),
    )
    ewc_strength: float = option(1000.0, "ewc: weight of the penalty (lambda).", minimum=0.0)
    fisher_examples: int = option(
        200, "ewc: examples of a task from which the Fisher information is estimated.", minimum=1
    )
    lwf_strength: float = option(1.0, "lwf: weight of the earlier model's outputs.", minimum=0.0)
    lwf_temperature: float = option(2.0, "lwf: temperature at which outputs are compared.", minimum=0.1)
    grow_head: bool = option(
        False,
        "Begin with outputs for the classes of the first task alone, and add those of later tasks as they come. "
        "Earlier outputs keep their weights.",
    )
    watch: str = option(
        "",
        "Learn from files that arrive in this directory, each exactly once, instead of --tasks: images in folders of "
        "classes where --dataset is images:DIR, TFRecord shards where it is tfrecord:GLOB.",
        may_change_on_resume=True,
        per_host=True,
    )
    watch_every: float = option(
        2.0, "watch: seconds between looks into the directory.", minimum=0.05, may_change_on_resume=True
    )
    delivery_examples: int = option(
        0,
        "watch: examples that must have arrived before they are learned from. 0: --global_batch_size.",
        minimum=0,
        may_change_on_resume=True,
    )
    delivery_seconds: float = option(
        30.0, "watch: how long a file waits for others, at most.", minimum=0.0, may_change_on_resume=True
    )
    idle_seconds: float = option(
        0.0,
        "watch: end when nothing has arrived for so long. 0: wait on, until there is a file STOP in the directory.",
        minimum=0.0,
        may_change_on_resume=True,
    )
    export_every: int = option(1, "watch: deliveries between exported models.", minimum=1, may_change_on_resume=True)
    keep_exports: int = option(
        5, "watch: how many of the newest exported models to keep.", minimum=1, may_change_on_resume=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, _ = self.parts()
        if self.grow_head and kind != "by_class":
            raise ConfigError(f"--grow_head goes with --tasks=by_class:N, not with --tasks={self.tasks}. Leave it out.")

    def parts(self) -> tuple[str, int]:
        """`tasks` as the kind, and classes or files of a task, or number of stretches."""
        kind, _, number = self.tasks.partition(":")
        if kind not in _KINDS or not number.isdecimal() or int(number) < 1:
            raise ConfigError(
                f"--tasks={self.tasks!r} is not KIND:NUMBER with a kind of {', '.join(_KINDS)}. Write e.g. "
                "--tasks=by_class:2."
            )
        return kind, int(number)
