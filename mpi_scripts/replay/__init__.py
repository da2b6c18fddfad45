"""Replay: a reduction's messages, recorded here, sent over a network that SimGrid simulates."""
