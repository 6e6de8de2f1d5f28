"""Benchmarks: one script per question, JSON under `results/`."""
