"""The measurements, predictions and choices of `--exchange=auto`."""
