"""Replay: record a reduction's messages here, and send them over a network simulated by SimGrid."""
