"""Divides a replica over the model axis: chooses layers and dimensions, and exchanges values between devices."""
