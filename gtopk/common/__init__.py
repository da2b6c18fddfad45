"""Horovod's import paths under `horovod.common`."""
