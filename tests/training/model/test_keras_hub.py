"""Models of keras-hub with random weights: one epoch gives the loss, metrics and weights of `fit`."""

from __future__ import annotations

import tfpar

import keras
import keras_hub
import numpy as np
import pytest

EXAMPLES, BATCH, LENGTH, WORDS, CLASSES = 12, 4, 6, 20, 3
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def tokens():
    """Token ids and padding mask `[EXAMPLES, LENGTH]`, some examples shorter than others."""
    mask = np.ones((EXAMPLES, LENGTH), np.int32)
    mask[::3, 4:] = 0
    return {"token_ids": np.random.default_rng(0).integers(1, WORDS, mask.shape).astype(np.int32), "padding_mask": mask}


def next_tokens():
    """Inputs, labels and weights of a causal language model."""
    x = tokens()
    return x, np.roll(x["token_ids"], -1, 1), x["padding_mask"].astype(np.float32)


def classes():
    return np.random.default_rng(1).integers(0, CLASSES, EXAMPLES).astype(np.int32)


def gpt2():
    """A causal language model; positions of padding have weight 0."""
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=WORDS,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=LENGTH,
        dropout=0.0,
    )
    return keras_hub.models.GPT2CausalLM(backbone), *next_tokens()


def bert():
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=WORDS,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=LENGTH,
        dropout=0.0,
    )
    x = {**tokens(), "segment_ids": np.zeros((EXAMPLES, LENGTH), np.int32)}
    return keras_hub.models.BertTextClassifier(backbone, num_classes=CLASSES, dropout=0.0), x, classes(), None


def llama():
    """Attention with fewer heads of keys and values than of queries, and gated feed-forward layers."""
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=WORDS,
        num_layers=1,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        dropout=0.0,
    )
    return keras_hub.models.LlamaCausalLM(backbone), *next_tokens()


def resnet():
    backbone = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64],
        stackwise_num_blocks=[1],
        stackwise_num_strides=[1],
        block_type="basic_block",
        image_shape=(8, 8, 3),
    )
    x = np.random.default_rng(2).normal(size=(EXAMPLES, 8, 8, 3)).astype(np.float32)
    return keras_hub.models.ResNetImageClassifier(backbone, num_classes=CLASSES), x, classes(), None


@pytest.mark.parametrize(
    ("build", "mesh"), [(gpt2, ""), (bert, ""), (resnet, ""), (gpt2, "model:2"), (bert, "model:2"), (llama, "model:2")]
)
def test_an_epoch_gives_the_numbers_of_fit(build, mesh):
    reference, x, y, weight = build()
    ours = build()[0]
    ours.set_weights(reference.get_weights())
    # metrics=[]: keras-hub adds some of its own otherwise.
    chosen = {"metrics": [], "weighted_metrics": ["accuracy"]}
    reference.compile(keras.optimizers.SGD(0.01), SPARSE, **chosen, jit_compile=False)
    options = {"epochs": 1, "sample_weight": weight}
    expected = reference.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, **options).history
    trainer = tfpar.Trainer(
        ours,
        keras.optimizers.SGD(0.01),
        SPARSE,
        **chosen,
        strategy="mirrored" if mesh else "one_device",
        mesh=mesh,
        global_batch_size=BATCH,
        shuffle=False,
        jit_compile=False,
    )
    history = trainer.fit(x, y, **options).history
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-4, err_msg=name)
    for one, other in zip(ours.weights, reference.weights, strict=True):
        if one.dtype == "float32":
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-3, atol=1e-5, err_msg=one.path)
    np.testing.assert_allclose(trainer.predict(x), reference.predict(x, verbose=0), rtol=1e-3, atol=1e-4)


SIDE, BOXES = 64, 2


def retinanet():
    """A detector on two levels of 8 x 8 and 4 x 4 anchors, with one convolution in each head."""
    backbone = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[7],
        stackwise_num_filters=[64, 64, 64],
        stackwise_num_blocks=[1, 1, 1],
        stackwise_num_strides=[1, 2, 2],
        block_type="basic_block",
        image_shape=(SIDE, SIDE, 3),
    )
    levels = {"min_level": 3, "max_level": 4}
    pyramid = keras_hub.models.RetinaNetBackbone(backbone, use_p5=False, image_shape=(SIDE, SIDE, 3), **levels)
    anchors = keras_hub.layers.AnchorGenerator("yxyx", num_scales=1, aspect_ratios=[1.0], anchor_size=2.0, **levels)
    return keras_hub.models.RetinaNetObjectDetector(
        pyramid, num_classes=CLASSES, anchor_generator=anchors, pre_logits_num_conv_layers=1
    )


def boxes():
    """Images, and a dict of labels: boxes `[n, BOXES, 4]` and their classes."""
    generator = np.random.default_rng(3)
    corner = generator.uniform(0, SIDE / 2, (EXAMPLES // 2, BOXES, 2))
    opposite = corner + generator.uniform(8, SIDE / 2, corner.shape)
    return generator.uniform(size=(len(corner), SIDE, SIDE, 3)).astype(np.float32), {
        "boxes": np.concatenate([corner, opposite], -1).astype(np.float32),
        "labels": generator.integers(0, CLASSES, corner.shape[:2]).astype(np.float32),
    }


def test_a_detector_gives_the_numbers_of_fit(messages):
    """keras-hub compiles it with losses of its own, which `loss` replaces; its labels become those of the anchors."""
    reference, (x, y) = retinanet(), boxes()
    ours = retinanet()
    ours.set_weights(reference.get_weights())
    box_loss = keras.losses.Huber(delta=0.5, reduction="sum")
    class_loss = keras.losses.BinaryCrossentropy(from_logits=True, reduction="sum")
    reference.compile(keras.optimizers.SGD(1e-3), box_loss, class_loss, jit_compile=False)
    expected = reference.fit(x, y, batch_size=2, epochs=2, shuffle=False, verbose=0).history["loss"]
    made = tfpar.Trainer(
        ours,
        keras.optimizers.SGD(1e-3),
        {"bbox_regression": box_loss, "cls_logits": class_loss},
        strategy="one_device",
        global_batch_size=2,
        shuffle=False,
        jit_compile=False,
    )
    np.testing.assert_allclose(made.fit(x, y, epochs=2).history["loss"], expected, rtol=1e-5)
    for one, other in zip(ours.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
    evaluated = reference.evaluate(x, y, batch_size=2, verbose=0, return_dict=True)
    assert made.evaluate(x, y)["loss"] == pytest.approx(evaluated["loss"], rel=1e-4)
    assert made.predict(x)["bbox_regression"].shape == (len(x), 80, 4)
    assert sum("overrides predict_step" in line for line in messages) == 1
