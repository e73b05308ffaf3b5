"""The tables of the benchmarks, from results that are given; the measurements themselves need hosts.

In processes of their own: the flags of a benchmark would stay defined for all tests after these.
"""

from __future__ import annotations

import pathlib
import sys

from tests import nursery

ROOT = pathlib.Path(__file__).parents[2]


def lines_of(program: str) -> list[str]:
    """What a program prints."""
    command = [sys.executable, "-c", program]
    result = nursery.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_end_to_end_ratios_are_to_the_strategy_of_tensorflow():
    rows = lines_of("""
from absl import flags
from experiments.benchmarks.end_to_end import Result, report
flags.FLAGS(["test"])
results = [
    Result("resnet18", "tensorflow", 2.5, [2.0, 9.0, 2.0], [0.5, 0.99], 23, True),
    Result("resnet18", "int8", 2.5, [0.5, 0.5, 7.0], [0.5, 0.9, 0.98], 34, True),
    Result("resnet18", "sign", 2.5, [0.25], [0.5], 12, False),
    Result("gpt2", "int8", 9.0, [3.0], [], 5, False),
]
print(report(results))
""")[2:]
    cells = [[cell.strip() for cell in row.split("|")[2:-1]] for row in rows]
    assert cells[0] == ["tensorflow", "2.5000", "2.00", "1.0", "23", "46", "1.0"]
    assert cells[1] == ["int8", "2.5000", "0.50", "4.0", "34", "17", "2.7"]
    assert cells[2] == ["sign", "2.5000", "0.25", "8.0", "not in 12", "", ""]
    assert cells[3] == ["int8", "9.0000", "3.00", "", "", "", ""]


def test_the_exchange_says_what_is_predicted_once_per_link_and_exchange():
    lines = lines_of("""
from absl import flags
from experiments.benchmarks.exchange import predictions
from experiments.benchmarks.exchange_results import Measured, Results
flags.FLAGS(["test"])
ring, int4 = Measured([0.1]), Measured([0.1], beyond_ms=[10.4, None, 30.0, 1000.0])
cells = [("resnet50", hosts, "1gbit", name) for hosts in (2, 4) for name in ("ring", "int4")]
print("\\n".join(predictions(cells, Results({}, dict(zip(cells, [ring, int4] * 2))))))
print("none:", predictions(cells[:1], Results({}, {cells[0]: ring})))
""")
    assert lines[-4] == "| link | exchange | 16 hosts | 64 hosts | 256 hosts | 1,024 hosts |"
    assert lines[-2:] == ["| 1gbit | int4 | 10 |  | 30 | 1000 |", "none: []"]


def test_adapters_are_compared_with_full_fine_tuning():
    rows = lines_of("""
from absl import flags
from experiments.benchmarks.adapters import Run, table
flags.FLAGS(["test"])
full = [("0.01", Run(0.75, 1000, 1000)), ("0.003", Run(0.85, 1000, 1000))]
lora = [("0.02", Run(0.8, 20, 1020)), ("0.02", Run(0.84, 20, 1020))]
print(table([1.0, 1.0], {"full": full, "lora=8": lora}))
print(table([1.0], {"lora=8": lora}))
""")
    assert rows[2:5] == [
        "| nothing | 0 % | | 1.0000 | | |",
        "| full | 100.00 % | 0.003, 0.01 | 0.8000 | +0.00 % | 100 % |",
        "| lora=8 | 1.96 % | 0.02 | 0.8200 | +2.50 % | 90 % |",
    ]
    assert rows[-1] == "| lora=8 | 1.96 % | 0.02 | 0.8200 |  |  |"
