"""What runs whose weights have owners save, later trainers of the same process resume, on any devices.

Keras counts the names of layers and optimizers over a process, so that those of every trainer differ.
"""

from __future__ import annotations

import functools
from typing import Any

import tfpar
from tfpar.config import StrategyConfig
from tfpar.parallel import strategies
from tfpar.parallel.split import whole
from tfpar.parallel.topology import choose_topology

import keras
import numpy as np
import pytest

STEPS = 6
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {"devices": 1},
    "sharded": {"shard": "optimizer"},
    "three": {"shard": "gradients", "devices": 3},
    "divided": {"shard": "optimizer", "devices": 4, "mesh": "data:2,model:2"},
}
OTHERS = [
    "adamw sharded plain",
    "adamw plain three",
    "adafactor sharded three",
    "adafactor plain sharded",
    "adafactor divided plain",
    "lamb divided three",
    "muon sharded sharded",
]


def build() -> keras.Model:
    """Layers of equal shapes, and one whose weight is as large as one of its rows or columns."""
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense
    wide = [dense(40, "tanh"), dense(40, "tanh"), dense(40, "tanh"), dense(1100, "tanh")]
    return keras.Sequential([keras.Input((30,)), *wide, dense(1)])


def train(**options: Any) -> dict[int, np.ndarray]:
    """The weights by their place."""
    options = {"devices": 2, "mesh": "", **options}
    layout = StrategyConfig(strategy="mirrored", devices=options["devices"], mesh=options["mesh"])
    trainer = tfpar.Trainer(
        build,
        loss="mse",
        runtime=strategies.build(choose_topology(layout)),
        **{"strategy": "mirrored", "global_batch_size": 12, "learning_rate": 0.01, "verbose": 0, **options},
    )
    random = np.random.default_rng(0)
    x = random.normal(size=(48, 30)).astype(np.float32)
    trainer.fit(x, x[:, :1], steps=STEPS)
    return {place: whole(variable) for place, variable in enumerate(trainer.model.variables)}


@functools.cache
def through(optimizer: str) -> dict[int, np.ndarray]:
    return train(optimizer=optimizer, **LAYOUTS["plain"])


@pytest.mark.parametrize(
    ("optimizer", "before", "after"),
    [
        ("adamw", "sharded", "sharded"),
        ("adafactor", "sharded", "plain"),
        ("adafactor", "plain", "divided"),
        *(pytest.param(*case.split(), marks=pytest.mark.proof) for case in OTHERS),
    ],
)
def test_a_later_trainer_goes_on(optimizer, before, after, tmp_path, capsys):
    options = {"optimizer": optimizer, "workdir": str(tmp_path)}
    train(**options, **LAYOUTS[before], stop_after=3)
    found = train(**options, **LAYOUTS[after], verbose=1)
    said = capsys.readouterr().out
    assert "resumed from step 3" in said
    assert "residual" not in said  # nothing was encoded
    for place, value in through(optimizer).items():
        np.testing.assert_allclose(found[place], value, rtol=1e-4, atol=1e-5, err_msg=str(place))
