"""Optimizers of a user's own with `--shard`: each replica updates a share of the weights."""

from __future__ import annotations

from tests.training.own_optimizers import EachAlone, OfOneTotal, OfOwnApply
from tests.training.trainers import source, trainer_of
from tfpar.config import ConfigError

import pytest


def trainer(optimizer, shard):
    return trainer_of(optimizer=optimizer, strategy="mirrored", devices=2, shard=shard)


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
@pytest.mark.parametrize(("kind", "part"), [(OfOneTotal, "variable 'total'"), (OfOwnApply, "method 'apply'")])
def test_one_that_combines_weights_is_refused(kind, part, shard):
    with pytest.raises(ConfigError, match=f"--shard={shard}: the {part} of {kind.__name__} may combine weights"):
        trainer(kind(0.1, momentum=0.9), shard).fit(source(), steps=1)


def test_one_that_updates_each_weight_by_itself_has_the_results_without_shards():
    plain, sharded = (trainer(EachAlone(0.01), shard).fit(source(), steps=3) for shard in ("none", "optimizer"))
    assert sharded["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-5)
