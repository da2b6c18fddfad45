"""Run everything that needs a GPU, in one command: see README.md in this folder.

python3 tests/gpu_check/run.py                          all stages, in at most 500 s
python3 tests/gpu_check/run.py bench kernels            only these stages
python3 tests/gpu_check/run.py --list                   the stages and their limits
python3 tests/gpu_check/run.py --device cpu             everything that needs no GPU, small sizes
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from runner import Runner, Stage
from stages import ROOT, groups, named

BUDGET_SECONDS = 500.0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the parsed command line."""
    scratch = Path(tempfile.gettempdir()) / f"gtopk_gpu_check_{os.getuid()}"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("stages", nargs="*", help="which; default: all")
    parser.add_argument("--list", action="store_true", help="print the stages and stop")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=BUDGET_SECONDS, help="for all of them")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("GPU_CHECK_OUT", "build/gpu_check")),
        help="the folder of what was found; default: $GPU_CHECK_OUT, else build/gpu_check",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=scratch,
        help="for installs, caches and logs; one run at a time",
    )
    parser.add_argument(
        "--wheels", type=Path, default=ROOT / ".whl", help="what to install first; default: .whl"
    )
    return parser.parse_args(arguments)


def environment(work: Path) -> dict[str, str]:
    """Return the stages' environment; `core` installs into its prefix."""
    prefix = work / "prefix"
    packages = sorted(map(str, prefix.glob("lib/python3*/site-packages")))
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = packages or [str(prefix / "lib" / python / "site-packages")]
    before = os.environ

    def path(name: str, *folders: object) -> str:
        return ":".join([*map(str, folders), *filter(None, [before.get(name)])])

    return {
        **before,
        "PYTHONPATH": path("PYTHONPATH", ROOT, ROOT / "tests/programs", *packages),
        "PATH": path("PATH", prefix / "bin", "/usr/local/cuda/bin"),
        "LD_LIBRARY_PATH": path("LD_LIBRARY_PATH", prefix / "lib"),
        "CUPY_CACHE_DIR": str(work / "cupy"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "GTOPK_ADVICE": "off",
        "GTOPK_TIMEOUT": "40",  # before a test's own limit, so its error names the waiting rank
        # On one host.
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "2",
    }


def listing(all_groups: list[list[Stage]]) -> str:
    """Return a line for each group: its stages and their limits."""
    return "\n".join(
        "  |  ".join(f"{stage.name} {stage.seconds:.0f} s" for stage in group)
        for group in all_groups
    )


def main(arguments: list[str]) -> int:
    """Run the stages; return 0 if none failed."""
    options = parse(arguments)
    try:
        chosen = named(groups(options.device, options.wheels.absolute()), options.stages)
    except ValueError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    if options.list:
        print(listing(chosen))
        return 0
    out, work = options.out.absolute(), options.work.absolute()
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.jsonl").unlink(missing_ok=True)
    for name in ("logs", "results"):  # an earlier run's
        shutil.rmtree(work / name, ignore_errors=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    runner = Runner(out, work, options.seconds, environment(work), ROOT)
    well = runner.run(chosen)
    bad = [f"{r.stage} ({r.outcome})" for r in runner.rows if r.outcome not in ("ok", "skipped")]
    print(f"{len(runner.rows) - len(bad)} of {len(runner.rows)} stages well; {out}")
    if bad:
        print(f"not well: {', '.join(bad)}")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
