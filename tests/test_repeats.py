"""The list of tests that are left to `make proofs`."""

from __future__ import annotations

from tests.repeats import FILE

import pytest

pytestmark = pytest.mark.without_keras


def test_each_entry_names_a_test(unknown_repeats):
    assert not unknown_repeats


def test_entries_are_sorted():
    lines = FILE.read_text().splitlines()
    assert lines == sorted(set(lines))
