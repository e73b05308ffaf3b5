"""Optimizers, learning rate schedules, and pure updates."""
