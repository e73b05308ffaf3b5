"""The names that a user may have meant."""

from __future__ import annotations

from tfpar.process.suggestions import did_you_mean

import pytest

pytestmark = pytest.mark.without_keras


def test_near_names_are_named_and_others_are_not():
    known = ["adam", "adamw", "sgd"]
    assert did_you_mean("adma", known) == " Did you mean 'adam'?"
    assert did_you_mean("adma", known, "--{}".format, most=2) == " Did you mean --adam or --adamw?"
    assert did_you_mean("ftrl", known) == ""
    assert did_you_mean("ADAM", known) == " Did you mean 'adam'?"
    assert did_you_mean("dense", ["Dense", "Conv2D"]) == " Did you mean 'Dense'?"
