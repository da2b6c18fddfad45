"""Run on any number of ranks: the command `gtopk bench optimizer`."""

from __future__ import annotations

import sys

from gtopk.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "optimizer", *sys.argv[1:]]))
