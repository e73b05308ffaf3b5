"""Everything that survives a process."""
