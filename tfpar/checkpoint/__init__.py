"""Checkpoints, model files and locks: the state that survives a process."""
