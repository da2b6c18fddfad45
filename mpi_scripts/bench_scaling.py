"""Measure how training scales, on hosts that this machine emulates or on real hosts.

sudo python mpi_scripts/bench_scaling.py report/scaling --rate 100mbit --scale 10
python mpi_scripts/bench_scaling.py report/scaling --hostfile hosts --ranks 4 8 16 32

Runs `python -m mpi_scripts.scaling` for every model and number of ranks, with one rank per host,
and writes scaling.json, scaling.md (tables for the documentation) and scaling.svg to the folder.

Emulated hosts share this machine's cores: 2 cores suffice for about 8 hosts of 100 Mbit/s. --scale
10 makes the models ten times smaller, so that such a link stands for one of 1 Gbit/s. The column
`cores` beside every step gives the share of the cores' time that is used.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

# Run by its path, a script does not find a gtopk that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gtopk.runtime.launch.mpirun import require_mpirun
from gtopk.units import bandwidth
from mpi_scripts.scaling.measure import Results, read
from mpi_scripts.scaling.models import PUBLISHED
from mpi_scripts.scaling.report import markdown, picture

ROOT = Path(__file__).resolve().parent.parent


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="What follows -- goes to `python -m mpi_scripts.scaling`: --rounds 3, say.",
    )
    add = parser.add_argument
    add("folder", type=Path, help="to write into")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--rate", default="100mbit", help="of emulated links; default: %(default)s")
    where.add_argument("--hostfile", type=Path, help="Open MPI's list of real hosts")
    add("--ranks", type=int, nargs="+", default=[2, 4, 8], help="default: 2 4 8")
    add("--models", nargs="+", choices=PUBLISHED, default=["resnet20", "vgg16"], metavar="MODEL")
    add("--scale", type=float, default=1.0, help="make models as many times smaller")
    add("--timeout-seconds", type=float, default=600.0, help="for one model and number of ranks")
    own = list(sys.argv[1:] if arguments is None else arguments)
    own, passed = (own[: own.index("--")], own[own.index("--") + 1 :]) if "--" in own else (own, [])
    options = parser.parse_args(own)
    options.passed = passed
    return options


def command(options: argparse.Namespace, model: str, ranks: int, file: Path) -> list[str]:
    """Return the command that measures one model on this many ranks."""
    bench = [
        *(sys.executable, "-m", "mpi_scripts.scaling"),
        *("--model", model, "--scale", f"{options.scale:g}", "--json", str(file)),
    ]
    if options.hostfile is not None:
        hosts = ["--hostfile", str(options.hostfile), "--map-by", "ppr:1:node"]
        return [str(require_mpirun()), "-n", str(ranks), *hosts, *bench, *options.passed]
    emulated = [
        *("--bandwidth", f"{bandwidth(options.rate):g}", "--interface", "eth0"),
        *("--shared-cores", str(len(os.sched_getaffinity(0)))),
    ]
    network = str(ROOT / "mpi_scripts" / "emulated_network.sh")
    return [network, str(ranks), options.rate, "mpirun", *bench, *emulated, *options.passed]


def environment(emulated: bool) -> dict[str, str]:
    """Return the ranks' environment: this gtopk, mpirun, and the interface of emulated hosts."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    code = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    interface = {"GLOO_SOCKET_IFNAME": "eth0"} if emulated else {}
    return {**os.environ, "PATH": path, "PYTHONPATH": code, "OMP_NUM_THREADS": "1", **interface}


def measured(options: argparse.Namespace) -> Iterator[Results]:
    """Yield the results of every model and number of ranks; raise SystemExit where one fails."""
    for model in options.models:
        for ranks in options.ranks:
            file = options.folder.resolve() / f"{model}-{ranks}.json"
            file.unlink(missing_ok=True)
            done = subprocess.run(
                command(options, model, ranks, file),
                env=environment(options.hostfile is None),
                timeout=options.timeout_seconds,
                check=False,
            )
            if done.returncode or not file.exists():
                raise SystemExit(done.returncode or 1)
            yield from read(file)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the files and return the exit code."""
    options = parse(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    runs = []
    for run in measured(options):
        runs.append(run)
        for suffix, content in (
            ("json", json.dumps(runs, indent=1) + "\n"),
            ("md", markdown(runs)),
            ("svg", picture(runs)),
        ):
            (options.folder / f"scaling.{suffix}").write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
