"""The options of incremental learning, which one program takes in addition to those of every experiment.

This module imports neither TensorFlow nor Keras.
"""

from __future__ import annotations

import dataclasses

from tfpar.config.errors import ConfigError
from tfpar.config.fields import ConfigBase, option

# The options that each method uses, and no other method.
METHODS = {
    "finetune": (),
    "replay": ("replay_examples", "replay_bytes", "replay_policy"),
    "ewc": ("ewc_strength", "fisher_examples"),
    "lwf": ("lwf_strength", "lwf_temperature"),
    "joint": (),
}
_KINDS = ("by_class", "by_file", "in_order")


_OF_WATCHING = (
    "watch_every",
    "delivery_examples",
    "delivery_seconds",
    "idle_seconds",
    "export_every",
    "keep_exports",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IncrementalConfig(ConfigBase):
    """Tasks that are learned one after the other, and methods that keep the model from forgetting earlier ones."""

    tasks: str = option(
        "by_class:2",
        "How examples are divided into tasks: by_class:N, N classes per task; by_file:N, N files per task; "
        "in_order:N, N parts of equal length, in the order of the data.",
    )
    method: str = option(
        "replay",
        "finetune trains on each task alone; replay also on kept examples of earlier tasks; ewc penalises changes of "
        "weights that earlier tasks need; lwf penalises changes of the earlier model's outputs; joint trains on all "
        "tasks so far.",
        choices=METHODS,
    )
    replay_examples: int = option(200, "replay: number of examples to keep, over all earlier tasks.", minimum=1)
    replay_bytes: int = option(
        0, "replay: limit on the stored bytes of the kept examples; lowers their number. 0: no limit.", minimum=0
    )
    replay_policy: str = option(
        "balanced",
        "replay: which examples are kept: balanced, equally many of each class; reservoir, each seen example with the "
        "same probability.",
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
        "Begin with outputs for the classes of the first task only, and add outputs when a later task begins. Earlier "
        "outputs keep their weights.",
    )
    watch: str = option(
        "",
        "Instead of --tasks, learn from files that arrive in this directory, from each exactly once: images in one "
        "folder per class with --dataset=images:DIR, TFRecord shards with --dataset=tfrecord:GLOB.",
        may_change_on_resume=True,
        per_host=True,
    )
    watch_every: float = option(
        2.0, "watch: seconds between scans of the directory.", minimum=0.05, may_change_on_resume=True
    )
    delivery_examples: int = option(
        0,
        "watch: number of new examples that starts a delivery. 0: --global_batch_size.",
        minimum=0,
        may_change_on_resume=True,
    )
    delivery_seconds: float = option(
        30.0,
        "watch: seconds after which a file is learned from even if fewer examples have arrived.",
        minimum=0.0,
        may_change_on_resume=True,
    )
    idle_seconds: float = option(
        0.0,
        "watch: end after this many seconds without a new file. 0: wait until there is a file STOP in the directory.",
        minimum=0.0,
        may_change_on_resume=True,
    )
    export_every: int = option(1, "watch: deliveries between exported models.", minimum=1, may_change_on_resume=True)
    keep_exports: int = option(
        5, "watch: how many of the newest exported models to keep.", minimum=1, may_change_on_resume=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for method, names in METHODS.items():
            for name in names if method != self.method else ():
                if getattr(self, name) != defaults[name]:
                    raise ConfigError(
                        f"--{name}={getattr(self, name)} is an option of --method={method}, and --method={self.method} "
                        f"does not use it. Leave it out, or use --method={method}."
                    )
        for name in ("tasks",) if self.watch else _OF_WATCHING:
            if (value := getattr(self, name)) != defaults[name]:
                instead = "learns from the files that arrive, instead of tasks" if self.watch else "is not given"
                raise ConfigError(f"--{name}={value} has no effect, because --watch {instead}. Leave it out.")
        kind, _ = self.parts()
        if self.grow_head and kind != "by_class":
            raise ConfigError(f"--grow_head needs --tasks=by_class:N, not --tasks={self.tasks}. Leave it out.")

    def parts(self) -> tuple[str, int]:
        """The kind in `tasks`, and its number: classes or files per task, or the number of parts."""
        kind, _, number = self.tasks.partition(":")
        if kind not in _KINDS or not number.isdecimal() or int(number) < 1:
            raise ConfigError(
                f"--tasks={self.tasks!r} is not KIND:NUMBER, where KIND is one of {', '.join(_KINDS)}. Write e.g. "
                "--tasks=by_class:2."
            )
        return kind, int(number)
