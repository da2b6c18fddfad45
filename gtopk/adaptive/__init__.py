"""Adaptive batches: every rank gets as many samples as its speed is good for."""
