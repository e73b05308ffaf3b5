"""Measurements. Each script prints both sides of every comparison from one run."""
