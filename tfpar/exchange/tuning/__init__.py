"""What `--exchange=auto` measures, predicts and decides."""
