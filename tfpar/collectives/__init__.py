"""Data between processes: groups of ranks and the transports under them."""
