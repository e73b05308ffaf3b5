"""Local steps of workers in the training loop, between the rounds of `tfpar.outer.local`."""
