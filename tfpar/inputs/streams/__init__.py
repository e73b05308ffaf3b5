"""Streams: examples in the order in which a `tf.data.Dataset` or an iterable gives them, without random access."""

from tfpar.inputs.streams.iterables import from_iterable
from tfpar.inputs.streams.pipeline import ENDLESS, StreamPipeline
from tfpar.inputs.streams.position import POSITION
from tfpar.inputs.streams.source import StreamSource, from_dataset, stream_ended, stream_error

__all__ = [
    "ENDLESS",
    "POSITION",
    "StreamPipeline",
    "StreamSource",
    "from_dataset",
    "from_iterable",
    "stream_ended",
    "stream_error",
]
