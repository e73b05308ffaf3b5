"""Digits in files that arrive in a directory, and a learner that watches it."""

from __future__ import annotations

import os
import pathlib
import shutil

import tfpar
from tfpar.config import ExperimentConfig
from tfpar.incremental import OnlineLearner, check

import keras
import numpy as np

FILES, EXAMPLES = 8, 160  # in each
OPTIONS = {
    "model": "mlp",
    "method": "finetune",
    "schedule": "constant",
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "global_batch_size": 32,
    "jit_compile": "false",
    "watch_every": 0.05,
    "delivery_examples": 1,
    "strategy": "one_device",
    "verbose": 0,
}


def shard(shards: pathlib.Path, number: int) -> pathlib.Path:
    return shards / f"train-{number:05d}-of-{FILES:05d}.tfrecord"


def arrive(file: pathlib.Path, incoming: pathlib.Path) -> None:
    shutil.copy(file, incoming / f".{file.name}")
    os.replace(incoming / f".{file.name}", incoming / file.name)


def config_of(base, incoming, run, **options) -> ExperimentConfig:
    given = {"dataset": f"tfrecord:{base}", "watch": str(incoming), "workdir": str(run), **options}
    return ExperimentConfig.from_flat_dict({**ExperimentConfig().as_flat_dict(), **OPTIONS, **given})


def learner_of(base, incoming, workdir, **options) -> OnlineLearner:
    keras.utils.clear_session(free_memory=False)
    config = config_of(base, incoming, workdir, **options)
    check(config)
    train, validation = tfpar.inputs.build_splits(config.input, 0)
    runtime = tfpar.initialize(config)

    def build() -> keras.Model:
        return tfpar.models.build("mlp", tfpar.task_spec(train))

    return OnlineLearner(build, train, validation, config=config, runtime=runtime)


def learned(*arguments, **options) -> dict:
    learner = learner_of(*arguments, **options)
    return {**learner.learn(), "weights": [np.asarray(each) for each in learner._trainer.model.weights]}
