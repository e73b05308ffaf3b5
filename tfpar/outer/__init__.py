"""Less frequent exchanges: workers, or clients, train independently and then exchange the movements of their weights.

`local` is for the workers of a cluster, below the training loop that runs it. `federated` is for the clients of a
federation, and runs on the training loop.
"""
