"""What cannot work is refused before a strategy starts: in plain words, running no operation, writing nothing."""

from __future__ import annotations

import sys

from tests import nursery
from tests.integration.test_multi_worker import ROOT, launch
from tests.training.test_trainer import model, source, trainer_of
from tfpar import inputs
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.training import start, validate

import numpy as np
import pytest

DIGITS = {"dataset": "digits", "steps": 20}
TEXT = {"dataset": "text:README.md", "model": "transformer_lm_tiny", "global_batch_size": 2, "steps": 20}


def check(options: dict) -> None:
    """What a script does before it starts the strategy."""
    config = ExperimentConfig.from_flat_dict(options)
    plan = start.check(config)
    validate.check_run(config, plan, *inputs.build_splits(config.input, config.train.seed))


WRONG = [
    ({**DIGITS, "dataset": "tfds:nonesuch"}, "tfds:nonesuch is not prepared"),
    ({**DIGITS, "model_args": "width=3"}, "--model_args: 'width' is not an option of --model=convnet"),
    ({**DIGITS, "model_args": "activation=rellu"}, "--model_args activation='rellu' is not known"),
    ({**DIGITS, "model": "vit", "model_args": "patch_size=3"}, "--model_args=patch_size=3 cannot be built"),
    ({**DIGITS, "model": "transformer_lm_tiny"}, "transformer_lm is for the task 'language_model'"),
    ({**DIGITS, "model": "resnet18", "model_args": "bottleneck=no"}, "bottleneck='no': .* is true or false"),
    ({**DIGITS, "model_args": "kernel_size=[3,3]"}, r"kernel_size=\[3, 3\]: .* is a whole number"),
    ({**DIGITS, "model_args": "widths=[64,2.5]"}, r"widths=\[64, 2.5\]: .* is a list, each a whole number"),
    ({**DIGITS, "model": "vit", "model_args": "patch_size=four"}, "patch_size='four': .* is a whole number or none"),
    (
        {**DIGITS, "model_args": "normalization=sync_batch", "jit_compile": "true", "devices": 2},
        "--jit_compile=true: the model synchronises",
    ),
    ({**DIGITS, "model_args": "widths=[]"}, "a convnet needs at least one stage"),
    ({**TEXT, "model": "convnet"}, "convnet is for the task 'classification'"),
    ({**DIGITS, "optimizer_args": "beta_1=abc"}, "beta_1 of adamw is a number, not 'abc'"),
    ({**DIGITS, "optimizer": "sgd", "optimizer_args": "nesterov=7"}, "nesterov of sgd is true or false, not 7"),
    ({**DIGITS, "optimizer_args": "beta=0.9"}, "--optimizer_args='beta' is not known"),
    ({**DIGITS, "warmup_steps": 20}, "--warmup_steps=20 leaves nothing of the run's 20 updates"),
    ({**DIGITS, "steps": 0}, "give --steps or --epochs"),
    ({**DIGITS, "warm_start": "/nonesuch"}, "--warm_start=/nonesuch: no checkpoint and no .keras file"),
    ({**DIGITS, "augment": "crop:8"}, "--augment=crop:8 mirrors more .* Use at most crop:7"),
    ({**DIGITS, "dataset": "synthetic:30", "model": "mlp", "augment": "flip"}, r"--augment=flip .* shape \(30,\)"),
    ({**DIGITS, "global_batch_size": 4000}, "more than the 1437 examples"),
    ({**DIGITS, "workdir": "/proc/nonesuch"}, "--workdir=/proc/nonesuch: /proc cannot be written to"),
    ({**TEXT, "sequence_length": 10**9}, "the train split is empty.*--sequence_length=1000000000"),
    ({**TEXT, "validation_fraction": 0.001}, "the validation split is empty.*evaluation: --validation_fraction=0"),
    ({**TEXT, "validation_fraction": 0.0, "schedule": "plateau"}, "--schedule=plateau waits for evaluations"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_refusals(options, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=message):
        check(options)


def test_checking_runs_no_tensorflow_operation():
    program = """
from tests.training.test_validate import DIGITS, TEXT, WRONG, ConfigError, check
from tensorflow.python.eager import context

check(DIGITS)
check(TEXT)
for options, _ in WRONG:
    try:
        check(options)
    except ConfigError:
        pass
assert context.context()._context_handle is None, "TensorFlow was initialised"
"""
    result = nursery.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr


def test_without_validation_fraction_there_is_no_evaluation():
    config = ExperimentConfig.from_flat_dict({**TEXT, "dataset": f"text:{ROOT}/README.md", "validation_fraction": 0.0})
    assert inputs.build_splits(config.input)[1] is None
    digits = ExperimentConfig.from_flat_dict({**DIGITS, "validation_fraction": 0.0})
    assert inputs.build_splits(digits.input)[1].info.num_examples == 360  # they have a split of their own


@pytest.mark.parametrize("split", ["train", "validation"])
def test_arrays_are_named_by_what_fit_takes_them_for(tmp_path, split):
    nothing = inputs.from_arrays(np.zeros([0, 6], np.float32), np.zeros([0], np.int32), num_classes=3, split=split)
    with pytest.raises(ConfigError, match=r"fit\(validation=...\): arrays is empty.*leave validation out"):
        trainer_of(workdir=tmp_path / "run").fit(source(), steps=2, validation=nothing)
    assert not (tmp_path / "run").exists()


def test_augmentation_by_option_and_images_it_does_not_suit(tmp_path):
    with pytest.raises(ConfigError, match=r"--augment=flip changes images .* \(6,\)"):
        trainer_of(model, augment="flip", workdir=tmp_path / "run").fit(source(), steps=2)
    assert not (tmp_path / "run").exists()


@pytest.mark.cluster
def test_all_workers_of_a_cluster_refuse_at_once(tmp_path):
    flags = ["--dataset=digits", "--steps=20", "--warmup_steps=20", f"--workdir={tmp_path / 'run'}"]
    result = launch(2, "experiments/image_classification.py", *flags, timeout=60)
    assert result.returncode == 2
    assert "--warmup_steps=20 leaves nothing" in result.stdout + result.stderr
    assert "strategy multi_worker" not in result.stdout
    assert not (tmp_path / "run").exists()
