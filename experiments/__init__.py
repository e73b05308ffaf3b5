"""Experiment scripts, one per workload, and the benchmarks."""
