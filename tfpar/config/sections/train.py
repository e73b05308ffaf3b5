"""The section of training."""

from __future__ import annotations

import dataclasses
import re

from tfpar.config.errors import ConfigError
from tfpar.config.fields import ConfigBase, option

ALL_WEIGHTS = "all"  # of --trainable
AUTO_SEGMENTS = -1


def check_pattern(flag: str, pattern: str, remedy: str, *, value: str = "") -> None:
    """Refuses a pattern that is not a regular expression.

    Args:
      flag: The flag that gave it.
      pattern: The pattern.
      remedy: What to write instead.
      value: The whole value of the flag, if the pattern is a part of it.

    Raises:
      ConfigError: The pattern is invalid; says why.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        given = f"{flag}={value!r}: {pattern!r}" if value else f"{flag}={pattern!r}"
        raise ConfigError(f"{given} is not a regular expression ({error}). {remedy}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(ConfigBase):
    """How to train, and for how long."""

    steps: int = option(0, "Steps to train for. 0: --epochs decides.", minimum=0, may_change_on_resume=True)
    epochs: float = option(
        0.0, "Passes over the training examples. 0: --steps decides.", minimum=0.0, may_change_on_resume=True
    )
    stop_after: int = option(
        0,
        "Save a checkpoint and stop after this many steps of this process; the next start resumes there. 0: off.",
        minimum=0,
        may_change_on_resume=True,
    )
    accumulate_steps: int = option(
        1,
        "Micro-batches per step; their gradients are summed locally in float32.",
        minimum=1,
        may_change_on_resume=True,
    )
    loss_weighting: str = option(
        "positions",
        "How losses with masks are averaged: 'positions', over all positions, as in Keras; 'examples', over the "
        "positions of each example first.",
        choices=("positions", "examples"),
    )
    jit_compile: str = option(
        "auto",
        "Compile the forward and backward pass and the optimizer step with XLA. 'auto' does, except for convolutional "
        "models on CPUs, where XLA is slower. Where XLA cannot compile the passes (a model axis, synchronised batch "
        "statistics), 'auto' compiles only the optimizer step. Without XLA, a compressed exchange overlaps the "
        "backward pass, which helps on slow links.",
        choices=("auto", "true", "false"),
        may_change_on_resume=True,
    )
    jit_segments: int = option(
        1,
        "XLA programs that the forward pass is cut into at the borders of layers, and the backward pass as well. With "
        "several, gradients of the last layers are exchanged while the first ones are computed, which helps on slow "
        "links. 1: one program for both. auto: as many as should be fastest, measured at the start, which compiles the "
        "passes once more.",
        minimum=1,
        words={"auto": AUTO_SEGMENTS},
        may_change_on_resume=True,
    )
    trainable: str = option(
        "",
        "Weights that are trained: a regular expression, searched in their paths, or all. The others are frozen: they "
        "are not exchanged and have no optimizer state. Empty: as the model says; with --lora, only the adapters.",
    )
    lora: str = option(
        "",
        "Low-rank adapters (Hu et al. 2022) that are trained in place of the kernels beside them: RANK, or RANK:REGEX "
        "with a regular expression that is searched in the paths of layers, e.g. 8:(query|value)$. RANK alone: queries "
        "and values of attention; in a model without them, every Dense and EinsumDense layer.",
        numeral=True,
    )
    recompute: str = option(
        "none",
        "Activations that the backward pass computes again instead of keeping them, so that a larger batch or model "
        "fits: none; blocks (layers that consist of layers, as in a transformer, or else segments of the model's "
        "graph); or a regular expression that is searched in the paths of layers. A step takes up to a third longer.",
        may_change_on_resume=True,
    )
    shard: str = option(
        "none",
        "State that replicas divide among themselves, instead of a full copy on each: none; optimizer, the optimizer "
        "state; gradients, the optimizer state and the sums of gradients; weights, all three, not beside a pipeline. "
        "With optimizer and gradients, a replica updates its share of the weights and receives the other new weights, "
        "for the same bytes on the network; a codec then encodes changes of weights instead of sums of gradients. With "
        "gradients and weights, the gradients of each micro-batch of --accumulate_steps are sent separately. With "
        "weights, both passes gather the weights of each block, and the backward pass recomputes the block as with "
        "--recompute=blocks.",
        choices=("none", "optimizer", "gradients", "weights"),
        may_change_on_resume=True,
    )
    offload: str = option(
        "none",
        "State that is kept in the memory of the host: none; optimizer, the optimizer state. For the optimizer step, "
        "the state of one block of weights after the other is copied to the device and back, so that the device holds "
        "the state of one block at a time. A step takes longer by the time of the copies. For one GPU per worker. "
        "Its results were tested on a GPU; memory and speed were not measured there.",
        choices=("none", "optimizer"),
        may_change_on_resume=True,
    )
    steps_per_loop: int = option(
        0,
        "Steps per call from Python. 0: enough to make the overhead of the call negligible.",
        minimum=0,
        may_change_on_resume=True,
    )
    eval_every: int = option(
        0, "Steps between evaluations. 0: at the end of every epoch.", minimum=0, may_change_on_resume=True
    )
    eval_batch_size: int = option(
        0,
        "Examples in a batch of evaluation and prediction, over all replicas. 0: --global_batch_size.",
        minimum=0,
        may_change_on_resume=True,
    )
    eval_steps: int = option(
        0,
        "Batches of each evaluation during training, and of `tfpar evaluate`, from the beginning of the validation "
        "examples. 0: all.",
        minimum=0,
        may_change_on_resume=True,
    )
    seed: int = option(0, "Seed of initialisation, shuffling, augmentation and dropout.", minimum=0, maximum=2**62 - 1)
    deterministic: bool = option(
        False, "Use deterministic kernels only, so that a repeated run gives the same bits.", may_change_on_resume=True
    )
    max_bad_steps: int = option(
        50,
        "Consecutive steps that may be skipped because the loss or a gradient is not finite, or no example is usable. "
        "After more, the run ends with an error that names the examples. 0: no limit.",
        minimum=0,
        may_change_on_resume=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps and self.epochs:
            raise ConfigError(
                f"--steps={self.steps} and --epochs={self.epochs} contradict each other: give one of them. If the "
                "other is in a flagfile, --epochs=0 or --steps=0 after it turns it off."
            )
        check_pattern("--trainable", self.trainable, "Write e.g. --trainable=head, or all.")
        self.adapters()

    @property
    def written_segments(self) -> int | str:
        """`jit_segments`, as it is written."""
        return "auto" if self.jit_segments == AUTO_SEGMENTS else self.jit_segments

    def adapters(self) -> tuple[int, str]:
        """The rank in `lora` (0: no adapters) and its expression (empty: the layers are chosen by the kind of
        model)."""
        rank, _, pattern = self.lora.partition(":")
        if not self.lora:
            return 0, ""
        if not rank.isdecimal() or int(rank) < 1 or self.lora.endswith(":"):
            raise ConfigError(
                f"--lora={self.lora!r} is not RANK or RANK:REGEX. Write e.g. --lora=8 or --lora=8:query$."
            )
        check_pattern("--lora", pattern, "Write e.g. --lora=8:(query|value)$.", value=self.lora)
        return int(rank), pattern
