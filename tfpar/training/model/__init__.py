"""The model in training: building it, refusing unsupported models, and calling it as a pure function."""
