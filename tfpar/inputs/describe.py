"""The input report: which worker reads which examples, in which order, in a few lines of text."""

from __future__ import annotations

from tfpar.config import InputConfig
from tfpar.inputs import structures
from tfpar.inputs.epoch_order import EpochOrder
from tfpar.inputs.source import LANGUAGE_MODEL, UNKNOWN, Source, SourceInfo
from tfpar.process.listing import listed

import tensorflow as tf

_LISTED_WORKERS = 16
_LISTED_INPUTS = 6
_OF_INDICES = ("cache", "input_threads", "on_bad_record")  # options of sources whose examples have numbers


def describe(
    source: Source,
    config: InputConfig,
    order: EpochOrder,
    *,
    workers: int,
    by_file: bool,
    training: bool,
    asynchronous: bool,
) -> str:
    """Returns the report of one pipeline.

    Args:
      source: The examples.
      config: The input options.
      order: The order of the examples.
      workers: Number of workers that read.
      by_file: Whether each worker reads whole files.
      training: Whether the pipeline trains.
      asynchronous: Whether each replica's share of a batch is a separate step.

    Returns:
      Lines of `name: value`, indented under a title.
    """
    lines = {
        "examples": _examples(source.info),
        "per worker": _workers(order, source, workers, by_file),
        "batch": _pushes(order) if asynchronous else _batch(order, config, workers if by_file else 1),
        "epoch": _epoch(order, source.info.num_examples, order.replicas if asynchronous else 1),
        "order": _order(order, by_file, training),
        "storage": _storage(source, config),
    }
    if config.augment not in ("", "none") and training:
        lines["augment"] = f"{config.augment}, on the device inside the step"
    if source.skip or config.on_bad_record == "skip":
        lines["bad records"] = "skipped at weight 0, and counted (on_bad_record=skip)"
    if config.data_service:
        lines["service"] = f"{config.data_service}; in order with one service worker, interleaved with more"
    width = max(map(len, lines))
    body = "\n".join(f"  {name:<{width}}  {value}" for name, value in lines.items())
    return f"input {source.info.name}, {source.info.split} split\n{body}"


def describe_stream(
    info: SourceInfo,
    config: InputConfig,
    order: EpochOrder,
    *,
    workers: int,
    own_streams: bool,
    steps_per_epoch: int | None,
    own_batch: int | None,
    training: bool,
) -> str:
    """Returns the report of the pipeline of a stream.

    Args:
      info: The examples.
      config: The input options.
      order: The division of a batch over workers and replicas.
      workers: Number of workers that read.
      own_streams: Whether each worker has its own stream.
      steps_per_epoch: Steps of one pass; None if unknown.
      own_batch: Examples in the stream's own batches; None if it has none.
      training: Whether the pipeline trains.
    """
    if steps_per_epoch is None:
        epoch = "of a length that is not known"
    else:
        rest = info.num_examples % config.global_batch_size
        what = "dropped" if order.drop_remainder else "a batch that is not full"
        epoch = f"{steps_per_epoch:,} steps" + (f"; the last {rest} examples are {what}" if rest else "")
    lines = {
        "examples": _examples(info),
        "per worker": "a tf.data stream of its own"
        if own_streams
        else "the whole tf.data stream, of which each takes its rows"
        if workers > 1
        else "a tf.data stream",
        "batch": _batch(order, config, workers if own_streams else 1),
        **_own_batches(own_batch, config.global_batch_size // (workers if own_streams else 1), config),
        "epoch": epoch,
        "order": "as the stream gives them" + ("; only its own shuffle applies" if training else ""),
    }
    if unused := [f"--{name}={getattr(config, name)}" for name in _OF_INDICES if training and _is_set(config, name)]:
        lines["without use"] = f"{', '.join(unused)}: the stream caches, reads and leaves out examples itself"
    width = max(map(len, lines))
    body = "\n".join(f"  {name:<{width}}  {value}" for name, value in lines.items())
    return f"input {info.name}, {info.split} split\n{body}"


def _is_set(config: InputConfig, name: str) -> bool:
    return bool(getattr(config, name) != getattr(InputConfig(), name))


def _examples(info: SourceInfo) -> str:
    parts = [f"{path} {_spec(spec)}".strip() for path, spec in structures.named_leaves(info.input_spec)]
    shown = listed(parts, _LISTED_INPUTS, "; ")
    files = f" in {len(info.files):,} files" if info.files else ""
    weights = "" if structures.is_empty(info.weight_spec) else ", with sample weights"
    count = "not counted" if info.num_examples == UNKNOWN else f"{info.num_examples:,}"
    return f"{count}{files}, {shown}, {_labels(info)}{weights}"


def _spec(spec: tf.TensorSpec) -> str:
    return f"{'x'.join(map(str, spec.shape.as_list())) or 'scalar'} {spec.dtype.name}"


def _labels(info: SourceInfo) -> str:
    if structures.is_empty(info.label_spec):
        return "no labels"
    if not structures.is_single(info.label_spec):
        parts = [f"{path} {_spec(spec)}" for path, spec in structures.named_leaves(info.label_spec)]
        return f"{len(parts)} labels ({listed(parts, _LISTED_INPUTS, '; ')})"
    if not info.num_classes:
        return f"labels {_spec(info.label_spec)}"
    return f"{info.num_classes:,} {'tokens' if info.task == LANGUAGE_MODEL else 'classes'}"


def _workers(order: EpochOrder, source: Source, workers: int, by_file: bool) -> str:
    if by_file:
        shares = enumerate(order.shards)
        parts = [f"worker {worker}: {shard.size:,} examples in {shard.files} files" for worker, shard in shares]
        return f"sharded by file: {listed(parts, _LISTED_WORKERS, '; ')}"
    if workers == 1:
        return "sharded by example: one worker reads all"
    share = source.info.num_examples / workers
    files = f" from any of {len(source.info.files):,} files" if source.info.files else ""
    about = "" if source.info.num_examples % workers == 0 else "about "
    return (
        f"sharded by example: {about}{share:,.0f} examples{files} for each of {workers} workers, reassigned each epoch"
    )


def _batch(order: EpochOrder, config: InputConfig, groups: int) -> str:
    micro_batches = order.accumulate_steps
    replicas = order.replicas * groups
    micro = f"{micro_batches} micro-batches x " if micro_batches > 1 else ""
    batch = sum(shard.batch for shard in order.shards)
    padded = micro_batches * replicas * order.micro_batch - batch
    note = f", {padded} of them padding with weight 0" if padded > 0 else ""
    if batch < config.global_batch_size:
        note += f"; all examples, which are fewer than --global_batch_size={config.global_batch_size}"
    across = f"{replicas} replicas" if replicas > 1 else "1 replica"
    return f"{batch} per step = {micro}{across} x {order.micro_batch} examples{note}"


def _pushes(order: EpochOrder) -> str:
    return (
        f"{order.accumulate_steps * order.micro_batch} examples per step, each the push of one worker = "
        f"{sum(shard.batch for shard in order.shards)} / {order.replicas} workers"
    )


def _epoch(order: EpochOrder, examples: int, steps_per_batch: int) -> str:
    steps = order.steps_per_epoch * steps_per_batch
    dropped = examples - order.examples_per_epoch
    if order.drop_remainder:
        rest = f"{dropped} examples of the last batch are dropped" if dropped else "no remainder"
        return f"{steps:,} steps; remainder=drop: {rest}"
    partial = [
        (worker, shard.size % shard.batch) for worker, shard in enumerate(order.shards) if shard.size % shard.batch
    ]
    if not partial and len({shard.size // shard.batch for shard in order.shards}) == 1:
        return f"{steps:,} steps; no remainder"
    if steps_per_batch > 1:
        return f"{steps:,} steps; remainder=pad: the last {steps_per_batch} share {partial[0][1]} examples"
    if len(order.shards) == 1:
        last, full = partial[0][1], order.shards[0].batch
        return f"{steps:,} steps; remainder=pad: the last has {last} of {full} examples, correctly weighted"
    return f"{steps:,} steps; remainder=pad: workers that run out of examples add padding at weight 0"


def _order(order: EpochOrder, by_file: bool, training: bool) -> str:
    if not training:
        return "as stored, each example once"
    if not order.shuffle:
        return "as stored, the same each epoch (--shuffle=false)"
    scope = "within each worker's files" if by_file else "over all examples"
    if order.shards[0].block > 1:
        scope = f"in blocks of {order.shards[0].block} examples"
    return f"permuted {scope}, differently each epoch, from seed {order.seed}"


def _storage(source: Source, config: InputConfig) -> str:
    if source.info.storage == "memory":
        return f"kept decoded in memory, {source.kept_bytes / 2**20:,.1f} MiB in each worker (cache={config.cache})"
    if source.info.storage == "generated":
        return "generated on demand"
    threads = config.input_threads or "tuned by tf.data"
    return f"read and decoded each epoch (cache={config.cache}), parallel reads: {threads}"


def _own_batches(own: int | None, read: int, config: InputConfig) -> dict[str, str]:
    """Returns a line if a stream's batches are regrouped: Keras would use them as they are."""
    if own is None or own == read:
        return {}
    there = f"batches of {own} in the dataset are regrouped; global_batch_size={own * config.global_batch_size // read}"
    return {"its own": f"{there} keeps them"}
