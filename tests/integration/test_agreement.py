"""Agreements between three real workers."""

from __future__ import annotations

import json
import re

from tests.integration.test_multi_worker import launch

import pytest

pytestmark = pytest.mark.cluster

LARGEST = 2**26 - 1
# What each of three workers holds, and whether that is the same.
ROUNDS = [
    ([[5, 7], [5, 7], [5, 7]], True),
    ([[5, 7], [5, 8], [5, 7]], False),
    ([[0], [0], [0]], True),
    ([[-3], [3], [0]], False),  # the sum is that of three zeros
    ([[LARGEST], [LARGEST], [LARGEST]], True),
    ([[LARGEST], [LARGEST - 1], [LARGEST]], False),
    ([[-LARGEST], [LARGEST], [LARGEST]], False),
    ([[4], [-1], [9]], False),
]


def test_workers_find_out_whether_they_hold_the_same():
    result = launch(3, "tests/integration/scripts/agree.py", json.dumps([held for held, _ in ROUNDS]))
    assert result.returncode == 0, result.stdout + result.stderr
    answers = [json.loads(found) for found in re.findall(r"answers (\[.*\])", result.stdout)]
    assert len(answers) == 3
    for answer in answers:
        assert [found["equal"] for found in answer] == [equal for _, equal in ROUNDS]
        means = [sum(numbers[0] for numbers in held) / 3 for held, _ in ROUNDS]
        assert [found["mean"] for found in answer] == pytest.approx(means)
        assert [found["gathered"] for found in answer] == [[numbers[0] for numbers in held] for held, _ in ROUNDS]
    assert answers[0] == answers[1] == answers[2]  # the mean, too, in every bit
