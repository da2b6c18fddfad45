"""Run under mpirun: `gtopk bench scaling`, on ranks that are real."""

import sys

from gtopk.cli.bench.scaling.command import main

sys.exit(main())
