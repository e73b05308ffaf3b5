"""`python -m tfpar.inputs.write`: writes any source as TFRecord shards.

    python -m tfpar.inputs.write --dataset=images:photos --output=shards/photos --shards=64

Read the result back with `--dataset=tfrecord:shards/photos`. The program writes both splits, in
the order of the source; the pipeline shuffles. `--output` appears only when everything is
written. A bad example ends the program, or is skipped with `--on_bad_record=skip`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import NoReturn

from tfpar.config import ConfigError, InputConfig
from tfpar.config.errors import TrainingError
from tfpar.config.flags import run as run_program
from tfpar.inputs import bad_records, registry
from tfpar.inputs.source import Source, no_autograph
from tfpar.inputs.sources import tfrecord
from tfpar.inputs.structures import Structure
from tfpar.process.writable import unwritable, write_reason

import tensorflow as tf
from absl import flags

_OPTIONS = (
    "dataset",
    "data_dir",
    "sequence_length",
    "image_size",
    "resize",
    "crop",
    "validation_fraction",
    "on_bad_record",
)
_READ_AT_ONCE = 256


def write(
    config: InputConfig, output: str, shards: int, seed: int = 0, progress: Callable[[str], None] = lambda line: None
) -> dict[str, int]:
    """Writes the training and validation examples of a source as TFRecord shards.

    Args:
      config: The source and its options.
      output: The directory to create; parents are created too.
      shards: Files per split; a split with fewer examples gets as many files as examples.
      seed: Seed of generated sources.
      progress: Called with a line of text about ten times per split.

    Returns:
      Number of records by file name.

    Raises:
      ConfigError: `output` exists or cannot be created, `shards` is not positive, the source cannot be built or is
        empty, or an example is bad.
      TrainingError: A file could not be written, for example on a full disk; no file is left.
    """
    if shards < 1:
        raise ConfigError(f"--shards={shards} must be at least 1.")
    if os.path.exists(output):
        raise ConfigError(f"--output={output!r} exists. Give a new directory, or remove that one first.")
    if problem := unwritable("--output", output):
        raise ConfigError(problem)
    sources = [registry.build_source(config, split, seed) for split in tfrecord.SPLITS]
    if not any(source.info.num_examples for source in sources):
        raise ConfigError(
            f"--dataset={config.dataset!r} has no examples to write. For text, a smaller --sequence_length may help."
        )
    parent = os.path.dirname(os.path.abspath(output))
    os.makedirs(parent, exist_ok=True)
    staging = tempfile.mkdtemp(prefix=f".{os.path.basename(output)}.", dir=parent)
    try:
        counts: dict[str, int] = {}
        for source in sources:
            counts |= _write_split(source, staging, shards, progress)
        x, y, _ = bad_records.read_with_mask(sources[0], tf.zeros([1], tf.int64))
        features = tfrecord.describe(sources[0], (x, y), counts)
        with open(os.path.join(staging, tfrecord.SIDECAR), "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(features), file, indent=1)
        os.chmod(staging, 0o777 & ~_umask())  # mkdtemp creates a private directory
        os.rename(staging, output)
    except (OSError, tf.errors.ResourceExhaustedError) as error:
        raise TrainingError(
            f"--output={output} could not be written ({write_reason(error)}); nothing was left there. Make room, or "
            "name another directory."
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return counts


def _write_split(source: Source, folder: str, shards: int, progress: Callable[[str], None]) -> dict[str, int]:
    total = source.info.num_examples
    shards = min(shards, total)
    names = [f"{source.info.split}-{shard:05d}-of-{shards:05d}.tfrecord" for shard in range(shards)]
    ends = [(shard + 1) * total // shards for shard in range(shards)]
    batches = tf.data.Dataset.range(total).batch(_READ_AT_ONCE)
    read = no_autograph(functools.partial(bad_records.read_with_mask, source))
    batches = batches.map(read, num_parallel_calls=tf.data.AUTOTUNE)
    examples = (row for parts in batches.prefetch(2).as_numpy_iterator() for row in _rows(parts))
    counts = dict.fromkeys(names, 0)
    done = 0
    for name, end in zip(names, ends, strict=True):
        with tf.io.TFRecordWriter(os.path.join(folder, name)) as writer:
            while done < end:
                x, y, usable = next(examples)
                if usable:
                    writer.write(tfrecord.serialise(x, y))
                    counts[name] += 1
                elif not source.skip:
                    raise bad_records.diagnose_read_error(source, [done])
                done += 1
                if done == total or done % max(1, total // 10) == 0:
                    progress(f"{source.info.split}: {done:,} of {total:,} examples")
    skipped = total - sum(counts.values())
    if skipped:
        progress(f"{source.info.split}: {skipped:,} of {total:,} examples are bad and were skipped")
    return counts


def _rows(parts: Structure) -> Iterator[Structure]:
    """Returns the examples of a batch of arrays [n, ...], one after the other."""
    for row in zip(*tf.nest.flatten(parts), strict=True):
        yield tf.nest.pack_sequence_as(parts, row)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _define_flags(values: flags.FlagValues) -> None:
    fields = {field.name: field for field in dataclasses.fields(InputConfig)}
    define = {"str": flags.DEFINE_string, "int": flags.DEFINE_integer, "float": flags.DEFINE_float}
    for name in _OPTIONS:
        field = fields[name]
        define[str(field.type)](name, field.default, field.metadata["help"], flag_values=values)
    flags.DEFINE_string("output", "", "Directory to write; must not exist.", flag_values=values)
    flags.DEFINE_integer("shards", 8, "Files per split.", flag_values=values)
    flags.DEFINE_integer("seed", 0, "Seed of synthetic sources.", flag_values=values)


def _main(arguments: list[str], values: flags.FlagValues = flags.FLAGS) -> None:
    try:
        if len(arguments) > 1:
            raise ConfigError(f"{arguments[1]!r} is not a flag. Write options as --name=value.")
        if not values.output:
            raise ConfigError("--output is missing: name the directory to write, e.g. --output=shards/digits.")
        config = InputConfig(cache="none", **{name: values[name].value for name in _OPTIONS})
        counts = write(config, values.output, values.shards, values.seed, lambda line: print(line, flush=True))
    except (ConfigError, TrainingError) as error:
        _fail(error, error.exit_code)
    print(
        f"wrote {sum(counts.values()):,} examples in {len(counts)} files; read them with "
        f"--dataset=tfrecord:{values.output}"
    )


def _fail(error: Exception, code: int) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    _define_flags(flags.FLAGS)
    run_program(_main, program="python -m tfpar.inputs.write")
