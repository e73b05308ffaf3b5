"""Divides a replica over the model axis: which layers, along which dimension, and what their devices exchange."""
