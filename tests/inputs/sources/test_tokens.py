"""Documents as tokens of any tokenizer: windows, packing, and weights of positions."""

from __future__ import annotations

import itertools
import types

from tfpar import inputs
from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import Pipeline, Weighted

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st


def letters(text: str) -> list[int]:
    """'b' is 2: token 0 is padding, 1 the end of a document."""
    return [ord(letter) - ord("a") + 1 for letter in text]


def windows(source: inputs.Source) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x, y = source.fetch(tf.range(source.info.num_examples, dtype=tf.int64))
    assert isinstance(y, Weighted)
    return np.asarray(x), y.y.numpy(), y.sample_weight.numpy()


def test_without_packing_a_window_holds_one_document():
    source = inputs.from_text(["bcdefgh", "ij", "k"], letters, sequence_length=4)
    x, y, weight = windows(source)
    assert x.tolist() == [[2, 3, 4, 5], [6, 7, 8, 0], [9, 10, 0, 0]]
    assert y.tolist() == [[3, 4, 5, 6], [7, 8, 0, 0], [10, 0, 0, 0]]
    assert weight.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert source.info.task == inputs.LANGUAGE_MODEL
    assert source.info.num_classes == 12
    assert source.info.input_spec == source.info.label_spec == tf.TensorSpec([4], tf.int32)
    assert source.info.weight_spec == tf.TensorSpec([4], tf.float32)


def test_joined_documents_fill_windows_and_do_not_predict_each_other():
    source = inputs.from_text(["bcd", "ef", "ghi"], letters, sequence_length=4, packing="join", end_token=1)
    x, y, weight = windows(source)
    assert x.tolist() == [[2, 3, 4, 1], [5, 6, 1, 7], [8, 9, 1, 0]]
    assert y.tolist() == [[3, 4, 1, 5], [6, 1, 7, 8], [9, 1, 0, 0]]
    assert weight.tolist() == [[1, 1, 1, 0], [1, 1, 0, 1], [1, 1, 0, 0]]


def test_whole_documents_share_windows_where_they_fit():
    source = inputs.from_text(
        ["bc", "defghi", "jkl", "mn"], letters, sequence_length=4, packing="fit", segment_ids=True
    )
    x, y = source.fetch(tf.range(source.info.num_examples, dtype=tf.int64))
    assert x["token_ids"].numpy().tolist() == [[4, 5, 6, 7], [10, 11, 12, 2], [8, 9, 13, 14]]
    assert x["segment_ids"].numpy().tolist() == [[1, 1, 1, 1], [1, 1, 1, 2], [1, 1, 2, 2]]
    assert y.sample_weight.numpy().tolist() == [[1, 1, 1, 1], [1, 1, 0, 1], [1, 0, 1, 0]]
    assert source.info.input_spec["segment_ids"] == tf.TensorSpec([4], tf.int32)


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.text("bcdefg", max_size=14), max_size=8),
    length=st.integers(1, 6),
    packing=st.sampled_from(["none", "fit", "join"]),
    end=st.sampled_from([None, 1]),
)
def test_every_token_but_the_first_of_a_document_is_predicted_once(documents, length, packing, end):
    source = inputs.from_text(documents, letters, sequence_length=length, packing=packing, end_token=end)
    expected = []
    for document in filter(None, documents):
        ids = letters(document) + ([] if end is None else [end])
        expected += list(itertools.pairwise(ids))
    found = []
    if source.info.num_examples:
        x, y, weight = windows(source)
        found = list(zip(x[weight > 0].tolist(), y[weight > 0].tolist(), strict=True))
        assert packing == "join" or weight.any(axis=1).all(), "no window is padding alone"
    assert sorted(found) == sorted(expected)


class KerasHub:
    """By the protocol of keras-hub's tokenizers."""

    def tokenize(self, text: str) -> tf.Tensor:
        return tf.constant(letters(text))

    def detokenize(self, ids: list[int]) -> tf.Tensor:
        return tf.constant("".join(chr(ord("a") - 1 + number) for number in ids).encode())

    def vocabulary_size(self) -> int:
        return 30


class SentencePiece:
    """By the protocol of `sentencepiece.SentencePieceProcessor`."""

    def encode(self, text: str) -> list[int]:
        return letters(text)

    def decode(self, ids: list[int]) -> str:
        assert all(type(number) is int for number in ids)
        return "".join(chr(ord("a") - 1 + number) for number in ids)

    def get_piece_size(self) -> int:
        return 31


class HuggingFace:
    """By the protocol of `tokenizers.Tokenizer`."""

    def encode(self, text: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(ids=letters(text))

    def decode(self, ids: list[int]) -> str:
        return SentencePiece().decode(ids)

    def get_vocab_size(self) -> int:
        return 32


class Transformers:
    """By the protocol of the tokenizers of `transformers`, whose `tokenize` returns strings."""

    vocab_size = 33

    def tokenize(self, text: str) -> list[str]:
        return list(text)

    def encode(self, text: str) -> list[int]:
        return letters(text)

    def decode(self, ids: list[int]) -> str:
        return SentencePiece().decode(ids)


@pytest.mark.parametrize(
    ("tokenizer", "size"), [(KerasHub(), 30), (SentencePiece(), 31), (HuggingFace(), 32), (Transformers(), 33)]
)
def test_tokenizers_of_several_packages(tokenizer, size):
    source = inputs.from_text(["bcdef"], tokenizer, sequence_length=4)
    assert source.info.num_classes == size
    x, _, _ = windows(source)
    assert source.info.decode(x[0]) == "bcde"
    assert inputs.from_text(["bcdef"], tokenizer, sequence_length=4, vocabulary_size=70000).info.num_classes == 70000
    assert inputs.from_text(["bc"], letters).info.decode is None


def test_files_are_documents_and_go_through_a_pipeline(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("bcdefghij"[number:])
    source = inputs.from_text(f"{tmp_path}/*.txt", letters, sequence_length=3, name="files")
    config = InputConfig(global_batch_size=4, shuffle=False, uneven_batches=True)
    pipeline = Pipeline(source, config, replicas=2)
    elements = pipeline.dataset().take(2 * pipeline.steps_per_epoch).as_numpy_iterator()
    predicted = sum((y.sample_weight * weight[..., None]).sum() for _, y, weight in elements)
    assert predicted == sum(len("bcdefghij") - number - 1 for number in range(5))
    assert "tokens, with sample weights" in pipeline.report()
    with pytest.raises(ConfigError, match="files: no file matches"):
        inputs.from_text(str(tmp_path / "none" / "*"), letters, name="files")


def test_other_documents_are_other_data():
    fingerprints = {inputs.from_text([text], letters).info.fingerprint for text in ("bcd", "bce", "bc")}
    assert len(fingerprints) == 3


@pytest.mark.parametrize(
    ("tokenizer", "options", "message"),
    [
        (3, {}, "tokenizer=int is neither callable nor has one of the methods encode, tokenize"),
        (lambda text: list(text), {}, r"the tokenizer returned <U1 \[3\] for document 0"),
        (lambda text: [[1, 2]], {}, r"returned int64 \[1, 2\] for document 0"),
        (letters, {"vocabulary_size": 4}, r"token 4 is outside the vocabulary of 4 tokens \(0 to 3\)"),
        (letters, {"pad_token": -1}, "token -1 is outside the vocabulary"),
        (letters, {"vocabulary_size": 9, "end_token": 9}, "token 9 is outside the vocabulary of 9"),
        (letters, {"packing": "tight"}, "packing='tight' is not known"),
        (letters, {"sequence_length": 0}, "sequence_length=0 must be at least 1"),
    ],
)
def test_unsuitable_arguments_are_refused(tokenizer, options, message):
    with pytest.raises(ConfigError, match=message):
        inputs.from_text(["bcd"], tokenizer, **options)
    with pytest.raises(ConfigError, match="document 0 is int, but must be a str"):
        inputs.from_text([3], letters)
