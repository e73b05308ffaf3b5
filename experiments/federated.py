r"""Trains on a population of clients: the script of `tfpar train federated`, for checkouts.

python experiments/federated.py --dataset=digits --partition=dirichlet:0.1 --clients=100 --workdir=runs/clients

`tfpar/commands/train_federated.py` is the program.
"""

from __future__ import annotations

from tfpar.commands import train_federated

if __name__ == "__main__":
    train_federated.run()
