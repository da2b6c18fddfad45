"""Benchmarks that anyone can run: medians and spread, ratios inside one run, and what was run."""
