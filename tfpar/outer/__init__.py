"""Fewer rounds: workers, or clients, that train by themselves and exchange what they have moved.

`local` is for the workers of a cluster, below the training loop that runs it. `federated` is for the clients of a
federation, and runs on the training loop.
"""
