"""What cannot work is refused before the first step: in plain words, running no operation, writing nothing."""

from __future__ import annotations

import inspect
import json
import re
import sys
import threading

import tfpar
from tests import nursery
from tests.integration.test_multi_worker import ROOT, launch
from tests.training.trainers import model, source, trainer_of
from tfpar import inputs
from tfpar.checkpoint.checkpointer import Checkpoint, Checkpointer
from tfpar.config import RESUME_MAY_CHANGE, ConfigError, ExperimentConfig
from tfpar.parallel.topology import Topology
from tfpar.training import validate
from tfpar.training.placing.check import check_on_topology

import numpy as np
import pytest

DIGITS = {"dataset": "digits", "steps": 20}
TEXT = {"dataset": "text:README.md", "model": "transformer_lm_tiny", "global_batch_size": 2, "steps": 20}


def check(options: dict) -> None:
    """What a script does before it starts the strategy."""
    config = ExperimentConfig.from_flat_dict(options)
    tfpar.validate(config)
    tfpar.validate(config, *inputs.build_splits(config.input, config.train.seed))


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
    ({**DIGITS, "warmup_steps": 20}, "--warmup_steps=20 takes up all of the run's 20 steps"),
    ({**DIGITS, "recompute": "block("}, r"--recompute='block\(' is neither none, blocks nor a regular expression"),
    ({**DIGITS, "device_memory": "lots"}, "--device_memory='?lots'?"),
    ({**DIGITS, "mesh": "pipeline:2", "stages": "block("}, r"--stages=block\(: 'block\(' is not a regular expression"),
    (
        {**DIGITS, "mesh": "pipeline:4", "stages": "a,b"},
        "2 expressions for a pipeline of 4 stages. Give 3",
    ),
    *(
        ({**DIGITS, "mesh": "data:2", "devices": 2, name: value}, f"--{name}={value} is for pipelines, and there is no")
        for name, value in {
            "stages": "dense",
            "stage_balance": "weights",
            "stages_per_device": 2,
            "pipeline_schedule": "gpipe",
        }.items()
    ),
    (
        {**DIGITS, "model": "mlp", "mesh": "model:2", "jit_compile": "true"},
        "--jit_compile=true does not work with --mesh=model:2: the devices of a replica .* Use --jit_compile=auto",
    ),
    ({**DIGITS, "steps": 0}, "give --steps or --epochs"),
    ({**DIGITS, "warm_start": "/nonesuch"}, "--warm_start=/nonesuch: no checkpoint and no .keras file"),
    ({**DIGITS, "augment": "crop:8"}, "--augment=crop:8 mirrors more .* Use at most crop:7"),
    ({**DIGITS, "dataset": "synthetic:30", "model": "mlp", "augment": "flip"}, r"--augment=flip .* shape \(30,\)"),
    ({**DIGITS, "global_batch_size": 4000, "remainder": "drop"}, "more than the 1437 examples"),
    ({**DIGITS, "workdir": "/proc/nonesuch"}, "--workdir=/proc/nonesuch: /proc cannot be written to"),
    ({**TEXT, "sequence_length": 10**9}, "the train split is empty.*--sequence_length=1000000000"),
    ({**TEXT, "validation_fraction": 0.001}, "the validation split is empty.*evaluation: --validation_fraction=0"),
    ({**TEXT, "validation_fraction": 0.0, "schedule": "plateau"}, "--schedule=plateau needs evaluations"),
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


# The stages.


def test_the_public_functions_are_the_seven_stages_in_order():
    stages = [
        function
        for name, function in vars(validate).items()
        if inspect.isfunction(function) and function.__module__ == validate.__name__ and not name.startswith("_")
    ]
    names = ["config", "data", "model", "workdir", "saved_run", "same_goal", "workers_agree"]
    assert [stage.__name__ for stage in stages] == [f"validate_{name}" for name in names]
    for number, stage in enumerate(stages, 1):
        assert stage.__doc__.startswith(f"Stage {number}: refuses ")


@pytest.mark.parametrize(("old", "new"), [("check", "validate"), ("start", "initialize")])
def test_the_old_verbs_are_deprecated(old, new):
    with pytest.warns(DeprecationWarning, match=f"tfpar.{old} is deprecated; use tfpar.{new}"):
        assert getattr(tfpar, old) is getattr(tfpar, new)


ONE_DEVICE = Topology(name="one_device")


def of_shape(shape, split="train", num_classes=3):
    x, y = np.zeros([8, *shape], np.float32), np.arange(8, dtype=np.int32) % 3
    return inputs.from_arrays(x, y, num_classes=num_classes, split=split)


def test_validation_examples_of_another_shape_are_refused():
    config = ExperimentConfig.from_flat_dict({"dataset": "custom", "global_batch_size": 4, "steps": 3})
    validate.validate_data(config, ONE_DEVICE, of_shape([6]), of_shape([6], "validation"))
    with pytest.raises(ConfigError, match=r"the validation inputs have shape \(5,\), the training inputs \(6,\)"):
        validate.validate_data(config, ONE_DEVICE, of_shape([6]), of_shape([5], "validation"))
    unlabelled = inputs.from_arrays(np.zeros([8, 6], np.float32), split="validation")
    with pytest.raises(ConfigError, match=r"the validation examples have no labels\. Give validation=\(x, y\)"):
        validate.validate_data(config, ONE_DEVICE, of_shape([6]), unlabelled)


def test_parameter_servers_refuse_what_needs_an_order_or_agreement():
    topology = Topology(name="parameter_server", workers=2)
    for options, message in (
        ({"precision": "mixed_float16"}, "--precision=mixed_float16: loss scaling"),
        ({"deterministic": True}, "--deterministic: asynchronous steps"),
        ({"ema": 0.9}, "--ema and --schedule=plateau need steps in order"),
    ):
        config = ExperimentConfig.from_flat_dict({"global_batch_size": 4, "steps": 3, **options})
        with pytest.raises(ConfigError, match=message):
            validate.validate_data(config, topology, of_shape([6]), None)


@pytest.mark.parametrize(
    ("options", "message", "instead"),
    [
        ({"exchange_retune_every": 9}, "every=9 has no effect with --exchange=none, wh", {"exchange": "auto"}),
        (
            {"exchange_retune_every": 9, "exchange": "int8:block=64"},
            "every=9 has no effect with --exchange=int8:block=64, which measures nothing. Use --exchange=auto, or",
            {"exchange": "auto:max_error=0.2"},
        ),
        ({"initial_loss_scale": 4.0}, "scale=4 has no effect with --precision=float32", {"precision": "mixed_float16"}),
        (
            {"loss_scale_growth_steps": 5, "precision": "mixed_bfloat16"},
            "growth_steps=5 has no effect with --precision=mixed_bfloat16, which needs no loss scale. Use --precision=",
            {"precision": "mixed_float16"},
        ),
    ],
)
def test_options_without_effect_are_refused(options, message, instead):
    common = {"dataset": "digits", "steps": 3}
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_on_topology(ExperimentConfig.from_flat_dict(common | options), ONE_DEVICE)
    check_on_topology(ExperimentConfig.from_flat_dict(common | options | instead), ONE_DEVICE)


def test_whole_tensors_are_refused_only_where_nobody_puts_them_together():
    def check(shard: str, stages: int, parts: int) -> None:
        spans = {"pipeline_devices": stages, "model_devices": parts, "replica_workers": stages * parts}
        topology = Topology(name="multi_worker", workers=2 * stages * parts, **spans)
        flat = {"optimizer": "muon", "shard": shard, "global_batch_size": 4, "steps": 3}
        check_on_topology(ExperimentConfig.from_flat_dict(flat), topology)

    for shard in ("none", "optimizer", "gradients"):
        for stages, parts in ((2, 1), (1, 2), (2, 2)):
            check(shard, stages, parts)
    check("weights", 1, 1)
    with pytest.raises(ConfigError, match=r"--optimizer=muon needs whole tensors.*or --shard=gradients\."):
        check("weights", 1, 2)


def test_more_classes_than_outputs_are_refused_where_labels_are_indices():
    config = ExperimentConfig.from_flat_dict({"global_batch_size": 4, "steps": 3})
    built = model()
    outputs = built.outputs[0].shape[-1]
    wide = of_shape([6], "validation", num_classes=outputs + 1)
    arguments = (config, ONE_DEVICE, of_shape([6]), wide)
    validate.validate_model(*arguments, model=built, integer_labels=False)
    validate.validate_model(*arguments[:3], model=built, integer_labels=True)
    with pytest.raises(
        ConfigError, match=rf"the validation labels lie in \[0, {outputs + 1}\), but the model .* outputs"
    ):
        validate.validate_model(*arguments, model=built, integer_labels=True)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (-np.ones(8), "the train labels range from -1 to -1, but the loss reads labels as class numbers"),
        (np.full(8, 50.0), "the train labels range from 50 to 50, .* must be 0 to"),
    ],
)
def test_targets_that_are_no_classes_are_refused_where_labels_are_indices(labels, message):
    """Every step on `-np.ones(...)` used to be skipped, and the run to end with exit code 0."""
    config = ExperimentConfig.from_flat_dict({"global_batch_size": 4, "steps": 3})
    source = inputs.from_arrays(np.zeros((8, 6)), labels)
    validate.validate_model(config, ONE_DEVICE, source, None, model=model(), integer_labels=False)
    with pytest.raises(ConfigError, match=message):
        validate.validate_model(config, ONE_DEVICE, source, None, model=model(), integer_labels=True)


def test_a_workdir_of_another_configuration_is_refused_with_the_difference(tmp_path):
    config = {"workdir": str(tmp_path), "steps": 20}
    flat = ExperimentConfig.from_flat_dict(config).as_flat_dict()
    writer = Checkpointer(tmp_path)
    writer.save(Checkpoint(step=1, arrays={"a": np.zeros(2, np.float32)}, exchange={}, run={}, config=flat))
    writer.close()
    for same in (config, {**config, "strategy": "mirrored"}, {"workdir": str(tmp_path), "epochs": 9.0}):
        validate.validate_workdir(ExperimentConfig.from_flat_dict(same))
    with pytest.raises(ConfigError, match=rf"--learning_rate: 0.001 -> 0.5\. .*--warm_start={tmp_path}"):
        validate.validate_workdir(ExperimentConfig.from_flat_dict({**config, "learning_rate": 0.5}))


OTHER = {
    bool: lambda value: not value,
    int: lambda value: value + 1,
    float: lambda value: value + 0.5,
    str: "x".__add__,
}


def test_every_option_that_says_what_is_trained_is_compared(tmp_path, monkeypatch):
    # With rounds: a run that had none, or had some, is not resumed otherwise (`check_resumed_rounds`).
    config = ExperimentConfig.from_flat_dict({"workdir": str(tmp_path), "local_steps": 8})
    current = json.loads(json.dumps(config.as_flat_dict()))
    for name in sorted(current):
        saved = {**current, name: OTHER[type(current[name])](current[name])}
        monkeypatch.setattr(validate.checkpointer, "saved_config", lambda _, saved=saved: saved)
        if name in RESUME_MAY_CHANGE:
            validate.validate_workdir(config)
            continue
        with pytest.raises(ConfigError) as caught:
            validate.validate_workdir(config)
        assert f"--{name}: {saved[name]!r} -> {current[name]!r}" in str(caught.value)


@pytest.mark.parametrize(("saved", "now", "way"), [(-1.0, 0.0, "a momentum above 0"), (0.0, 0.5, "a momentum of 0")])
def test_momentum_is_not_added_to_a_run_nor_taken_away(tmp_path, monkeypatch, saved, now, way):
    def options(momentum: float, optimizer: str = "auto") -> ExperimentConfig:
        flat = {"local_steps": 8, "outer_optimizer": optimizer, "outer_momentum": momentum}
        return ExperimentConfig.from_flat_dict({"workdir": str(tmp_path), **flat})

    before = options(saved).as_flat_dict()
    monkeypatch.setattr(validate.checkpointer, "saved_config", lambda _: before)
    with pytest.raises(ConfigError, match=rf"--outer_momentum={now:g}: the run in .* Resume it with {way}"):
        validate.validate_workdir(options(now))
    validate.validate_workdir(options(saved))
    before = options(saved, "adam").as_flat_dict()  # has slots with any momentum
    validate.validate_workdir(options(now, "adam"))


@pytest.mark.parametrize(("saved", "now", "way"), [(-1, 2, "a delay of 0"), (2, 0, "a delay of 1 or more")])
def test_a_delay_is_not_added_to_a_run_nor_taken_away(tmp_path, monkeypatch, saved, now, way):
    def options(delay: int) -> ExperimentConfig:
        return ExperimentConfig.from_flat_dict({"workdir": str(tmp_path), "local_steps": 8, "outer_delay": delay})

    monkeypatch.setattr(validate.checkpointer, "saved_config", lambda _: options(saved).as_flat_dict())
    with pytest.raises(ConfigError, match=rf"--outer_delay={now}: the run in .* Resume it with {way}"):
        validate.validate_workdir(options(now))


class Meeting:
    """An `Agreement` between threads."""

    def __init__(self, workers: int) -> None:
        self.barrier = threading.Barrier(workers, timeout=300)
        self.values: dict[threading.Thread, list[int]] = {}

    def all_equal(self, values: list[int]) -> bool:
        self.values[threading.current_thread()] = values
        self.barrier.wait()
        equal = all(other == values for other in self.values.values())
        self.barrier.wait()
        return equal


def refusals(*workers: tuple[dict, dict]) -> list[str]:
    """What `validate_workers_agree` says on workers with these (options, facts); empty where it passes."""
    meeting, messages = Meeting(len(workers)), [""] * len(workers)

    def work(rank: int, options: dict, facts: dict) -> None:
        config = ExperimentConfig.from_flat_dict(options)
        try:
            validate.validate_workers_agree(meeting, config, facts, {"training data": f"data of worker {rank}"})
        except ConfigError as error:
            messages[rank] = str(error)

    threads = [threading.Thread(target=work, args=(rank, *worker)) for rank, worker in enumerate(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return messages


def test_workers_that_were_given_the_same_pass_whatever_belongs_to_a_host():
    facts = {"training data": "abc"}
    first = {"dataset": "images:/a", "workdir": "/a", "devices": 1}
    second = {"dataset": "images:/b", "workdir": "/b", "devices": 2}
    assert refusals((first, facts), (second, facts)) == ["", ""]


def test_workers_that_were_given_different_flags_or_data_all_say_so():
    first, second = refusals(({"seed": 1}, {"training data": "abc"}), ({"seed": 2}, {"training data": "abd"}))
    assert "not given the same: --seed (here 1), training data (here data of worker 0). Each worker" in first
    assert "not given the same: --seed (here 2), training data (here data of worker 1). Each worker" in second


@pytest.mark.cluster
def test_all_workers_of_a_cluster_refuse_at_once(tmp_path):
    flags = ["--dataset=digits", "--steps=20", "--warmup_steps=20", f"--workdir={tmp_path / 'run'}"]
    result = launch(2, "experiments/image_classification.py", *flags, timeout=300)
    assert result.returncode == 2
    assert "--warmup_steps=20 takes up all" in result.stdout + result.stderr
    assert "strategy multi_worker" not in result.stdout
    assert not (tmp_path / "run").exists()
