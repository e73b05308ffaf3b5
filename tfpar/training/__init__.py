"""The loop: `Trainer`, the loops it runs, and the step."""
