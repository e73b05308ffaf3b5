"""The loops that `Trainer.fit` runs."""
