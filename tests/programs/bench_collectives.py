"""Run on any number of ranks: the command `gtopk bench collectives`."""

from __future__ import annotations

import sys

from gtopk.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "collectives", *sys.argv[1:]]))
