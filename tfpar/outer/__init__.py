"""Less frequent exchanges: workers, or clients, train independently and then exchange the movements of their weights.

`local` is for the workers of a cluster; the training loop calls it. `federated` is for the clients of a federation; it
calls the training loop.
"""
