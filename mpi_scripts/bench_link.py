"""Compare emulated links with emulated hosts: time each reduction over both, in turn.

    sudo mpi_scripts/bench_link.py                                  prints a table: 6 minutes
    sudo mpi_scripts/bench_link.py --rates 20mbit --ranks 2 4       fewer networks
    sudo mpi_scripts/bench_link.py --launcher torchrun              over gloo instead of Open MPI

    hosts    emulated_network.sh RANKS RATE mpirun gtopk bench collectives ...
             network namespaces with a shaped link each, and the kernel's TCP between them
    link     gtopk run -n RANKS --link RATE gtopk bench collectives ...
             ranks on this machine; the transport paces their messages

Neither adds latency. Ranks share this machine's cores, and other programs make reductions slower,
so the shortest times are compared, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
ALGORITHMS: Final = {"dense": "dense", "topk-allgather": "top-k allgather", "gtopk": "gTop-k"}


def measure(start: list[str], options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the seconds of each repetition of each algorithm, by its name in the benchmark."""
    found = folder / "found.json"
    command = [
        *start,
        *(sys.executable, "-m", "gtopk", "bench", "collectives"),
        *("--lengths", str(options.length), "--densities", str(options.density)),
        *("--algorithms", *ALGORITHMS, "--baselines", "--rounds", str(options.rounds)),
        *("--json", str(found)),
    ]
    subprocess.run(command, check=True, cwd=HERE.parent, stdout=subprocess.DEVNULL)
    records = json.loads(found.read_text(encoding="utf-8"))["records"]
    return {record["algorithm"]: record["seconds_by_round"] for record in records}


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=["20mbit", "100mbit"], metavar="RATE")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8], metavar="N")
    parser.add_argument("--launcher", choices=["mpirun", "torchrun"], default="mpirun")
    parser.add_argument("--length", type=int, default=2_500_000, help="values; default: 2500000")
    parser.add_argument("--density", type=float, default=0.02, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="file for the figures of every repetition")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for rate in options.rates:
            for ranks in options.ranks:
                hosts = [str(HERE / "emulated_network.sh"), str(ranks), rate, options.launcher]
                link = [sys.executable, "-m", "gtopk", "run", "-n", str(ranks)]
                link += ["--launcher", options.launcher, "--link", rate]
                measured = {
                    way: measure(start, options, Path(folder))
                    for way, start in (("hosts", hosts), ("link", link))
                }
                rows.append({"rate": rate, "ranks": ranks, **measured})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the medians, their ratio, and the ratio of the shortest times, as Markdown."""
    lines = [
        "| rate | P | | emulated hosts | emulated link | ratio | of the shortest |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for name, label in ALGORITHMS.items():
            hosts, link = row["hosts"][name], row["link"][name]
            medians = [statistics.median(seconds) for seconds in (hosts, link)]
            shown = " | ".join(f"{1e3 * seconds:.1f} ms" for seconds in medians)
            lines.append(
                f"| {row['rate']} | {row['ranks']} | {label} | {shown} "
                f"| {medians[1] / medians[0]:.2f} | {min(link) / min(hosts):.2f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
