"""Data between processes: groups of ranks, the transports under them, and agreement between workers."""
