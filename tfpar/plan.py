"""`python -m tfpar.plan`: how a model could be laid out over devices; the program of `tfpar plan`."""

from __future__ import annotations

from tfpar.commands import plan

if __name__ == "__main__":
    plan.run()
