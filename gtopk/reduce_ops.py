"""Horovod's names for what a reduction does, with Horovod's numbers."""

from typing import Final

Average: Final = 0
Sum: Final = 1
Adasum: Final = 2
Min: Final = 3
Max: Final = 4
Product: Final = 5

NAMES: Final = dict(enumerate(("Average", "Sum", "Adasum", "Min", "Max", "Product")))
