"""The input section."""

from __future__ import annotations

import dataclasses

from tfpar.config.errors import ConfigError
from tfpar.config.fields import ConfigBase, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputConfig(ConfigBase):
    """Where examples come from and how they are batched."""

    dataset: str = option(
        "digits",
        "digits | tfds:NAME | text[:PATH] | images:DIR | csv:GLOB?label=COLUMN | "
        "parquet:GLOB?label=COLUMN | tfrecord:GLOB | synthetic:SHAPE. 'text' without a path "
        "reads the sources of the installed Python standard library.",
        per_host=True,  # it may be a path; workers compare fingerprints of the data instead
    )
    data_dir: str = option(
        "",
        "Directory of the data sets. Empty: TFDS' default, $TFDS_DATA_DIR or ~/tensorflow_datasets.",
        may_change_on_resume=True,
        per_host=True,
    )
    global_batch_size: int = option(64, "Examples per step, over all replicas and micro-batches.", minimum=1)
    shard_by: str = option(
        "example",
        "How examples are divided among workers: 'example' shuffles all examples globally; 'file' gives each worker "
        "whole files (fewer open files on network storage, but the order depends on the number of workers).",
        choices=("example", "file"),
    )
    remainder: str = option(
        "pad",
        "What to do with the partial batch at the end of an epoch: 'pad' trains on it, weighted by its examples; "
        "'drop' leaves it out.",
        choices=("pad", "drop"),
    )
    uneven_batches: bool = option(
        False,
        "Allow a global batch that is not divisible by replicas x accumulate_steps. Smaller shares are padded: the "
        "weighting stays exact, but some computation is wasted.",
        may_change_on_resume=True,
    )
    shuffle: bool = option(True, "Reshuffle the training examples every epoch; the order depends only on --seed.")
    sequence_length: int = option(128, "Tokens per example, for text.", minimum=1)
    validation_fraction: float = option(
        0.1,
        "Fraction of the examples held out for validation, where a source has no validation split.",
        minimum=0.0,
        maximum=0.9,
    )
    image_size: int = option(32, "Height and width, in pixels, to which images:DIR is resized.", minimum=1)
    resize: str = option(
        "", "Height and width to which images are resized, as HxW, e.g. 240x320. Empty: the square of --image_size."
    )
    crop: str = option(
        "central",
        "How images of other proportions are fitted to --resize: 'central' cuts out the largest central part of these "
        "proportions, 'none' stretches the whole image, 'pad' keeps the whole image on black.",
        choices=("central", "none", "pad"),
    )
    augment: str = option(
        "none", "Augmentation layers, e.g. 'crop:2,flip' or 'shift:1'. They run on the device, as part of the step."
    )
    cache: str = option(
        "auto",
        "'memory' decodes every example once and keeps it, 'none' decodes every epoch, 'auto' keeps what fits in "
        "1 GiB.",
        choices=("auto", "memory", "none"),
        may_change_on_resume=True,
        per_host=True,
    )
    on_bad_record: str = option(
        "fail",
        "What to do with an unusable example (damaged record, image that cannot be decoded, label out of range, NaN): "
        "'fail' ends the run and names the example; 'skip' gives it weight 0 and counts it.",
        choices=("fail", "skip"),
        may_change_on_resume=True,
    )
    prefetch: int = option(
        4, "Batches prepared in advance, per replica.", minimum=0, may_change_on_resume=True, per_host=True
    )
    input_threads: int = option(
        0,
        "Parallel calls in the input pipeline. 0: tuned by tf.data.",
        minimum=0,
        may_change_on_resume=True,
        per_host=True,
    )
    data_service: str = option(
        "",
        "Address of a tf.data service dispatcher, e.g. grpc://host:5050. Empty: every worker reads its own examples.",
        may_change_on_resume=True,
        per_host=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.image_shape()

    def image_shape(self) -> tuple[int, int]:
        """Height and width of images that are resized, in pixels."""
        if not self.resize:
            return self.image_size, self.image_size
        height, _, width = self.resize.partition("x")
        if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
            raise ConfigError(f"--resize={self.resize!r} must be HxW in pixels, e.g. --resize=240x320.")
        return int(height), int(width)
