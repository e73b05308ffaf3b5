"""Agreement between three real workers, and groups of some of them."""

from __future__ import annotations

import hashlib
import json
import re

from tests.integration.scripts.agree import STEPS, SUBGROUPS, long_bytes
from tests.integration.test_multi_worker import launch
from tfpar_ops.transport_library import why_unusable

import pytest

pytestmark = pytest.mark.cluster

GLOO = pytest.param(
    "gloo", marks=pytest.mark.skipif(bool(why_unusable()), reason="the transport over Gloo is not built here")
)
TRANSPORTS = ["tensorflow", GLOO]

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


@pytest.fixture(scope="module", params=TRANSPORTS)
def output(request) -> str:
    """What three workers printed; one start for all tests of a transport."""
    rounds = json.dumps([held for held, _ in ROUNDS])
    result = launch(3, "-m", "tests.integration.scripts.agree", request.param, rounds)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_workers_find_out_whether_they_hold_the_same(output):
    answers = [json.loads(text) for text in re.findall(r"answers (\[.*\])", output)]
    assert len(answers) == 3
    for answer in answers:
        *rounds, _ = answer
        assert [found["equal"] for found in rounds] == [equal for _, equal in ROUNDS]
        means = [sum(numbers[0] for numbers in held) / 3 for held, _ in ROUNDS]
        assert [found["mean"] for found in rounds] == pytest.approx(means)
        assert [found["gathered"] for found in rounds] == [[numbers[0] for numbers in held] for held, _ in ROUNDS]
    assert answers[0] == answers[1] == answers[2]  # the means and sums, too, in every bit


def test_values_of_different_lengths_and_long_broadcasts_arrive(output):
    for answer in re.findall(r"answers (\[.*\])", output):
        last = json.loads(answer)[-1]
        assert last["digests"] == [hashlib.sha256(long_bytes(rank)).hexdigest() for rank in range(3)]
        assert last["broadcast"] == hashlib.sha256(long_bytes(2)).hexdigest()  # worker 0's: nothing flipped
        assert last["shapes"] == [[0, 2], [1, 2], [2, 2]]


def test_groups_of_some_workers_take_turns(output):
    groups = {int(rank): json.loads(text) for rank, text in re.findall(r"groups (\d) (\{.*\})", output)}
    assert sorted(groups) == [0, 1, 2]
    for rank, by_group in groups.items():
        assert by_group.pop("world") == [[111.0]] * STEPS
        assert len(by_group) == sum(rank in members for members in SUBGROUPS)
        for name, results in by_group.items():
            members = json.loads(name)
            values = [10.0**member for member in members]
            message = values[0] if rank == members[-1] else 0.0
            assert results == [[step * sum(values), *values, message] for step in range(STEPS)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_lost_worker_is_named(transport):
    result = launch(3, "-m", "tests.integration.scripts.agree", transport, "lose")
    said = result.stdout + result.stderr
    assert len(re.findall(r"\[worker [01]\] error: lost worker 2 \(", said)) == 2, said
