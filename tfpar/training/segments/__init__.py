"""Forward and backward passes of several XLA programs: the exchange begins before the last (`--jit_segments`)."""
