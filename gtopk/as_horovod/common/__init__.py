"""What scripts import from horovod.common: its small tools, and its exceptions."""
