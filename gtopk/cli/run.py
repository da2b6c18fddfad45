"""`gtopk run`: start a script on several ranks with torchrun, mpirun or srun."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final

from collectives import environment
from collectives.cores import usable_cores

from .. import settings
from ..runtime.launch import LaunchError
from ..runtime.launch.job import Host, job, parse_hosts, read_hostfile, refuse_inside_a_job
from ..runtime.runner.ranks import LAUNCHERS, Places, Start, default_launcher, launch_command
from .arguments import Command, as_argument, fail, whole_number


def allocated_tasks() -> int:
    """Return Slurm's requested number of tasks, or else the number that fits the nodes' cores.

    Raises ValueError if a variable of Slurm is not a number.
    """
    if requested := environment.whole_number("SLURM_NTASKS", 0):
        return requested
    hosts = os.environ.get("SLURM_JOB_CPUS_PER_NODE", "")  # such as 16(x2),8
    each = re.findall(r"(\d+)(?:\(x(\d+)\))?", hosts)
    cores_per_task = max(1, environment.whole_number("SLURM_CPUS_PER_TASK", 1))
    tasks = sum(int(cores) // cores_per_task * int(times or 1) for cores, times in each)
    return tasks or usable_cores()


# The same time that torchrun gives its ranks to save.
_SAVE_SECONDS: Final = 30.0
# The time that torchrun then needs to end them.
_END_SECONDS: Final = 5.0


class _TerminationRequested(KeyboardInterrupt):
    """Raised on SIGINT or SIGTERM; its argument is the exit code for the signal."""


def parser() -> Command:
    """Return the argument parser."""
    described = Command(
        "gtopk run",
        "Start a script on several ranks: by srun inside a Slurm allocation, else by "
        "mpirun, or by torchrun if there is no MPI, with the settings that the launcher needs "
        "here. You may also call a launcher yourself: mpirun -n 4 python SCRIPT.",
        "gtopk run -n 4 --record runs/first train.py --epochs 10\n"
        "  gtopk run --hosts one:4,two:4 train.py\n\n"
        "On this host alone, OMP_NUM_THREADS becomes each rank's share of the cores, unless you\n"
        "set it. With other hosts, set it yourself; it is passed on.\n\n"
        "The exit code is the launcher's: mpirun and srun return the ranks' code, torchrun 1 for\n"
        "any failure. SIGTERM and Ctrl-C reach the ranks as SIGTERM; torchrun gives them 30 s to\n"
        "save. A second signal ends them at once. If this command is killed, they end with it.",
        usage="gtopk run [OPTIONS] SCRIPT [ARGUMENTS]",
        # Otherwise a script's --host would match --hosts or --hostfile.
        allow_abbrev=False,
    )
    ranks = "default: the hosts' slots; by srun, the allocation's tasks or cores; else the cores"
    described.add_argument("-n", "-np", "--ranks", type=as_argument(whole_number), help=ranks)
    where = described.add_mutually_exclusive_group()
    hosts = "such as one:4,two:2; needs mpirun and ssh"
    where.add_argument("-H", "--hosts", type=as_argument(parse_hosts), default=[], help=hosts)
    lines = "file with lines such as: name slots=4"
    where.add_argument("--hostfile", type=Path, help=lines)
    option, flag = described.option, described.flag
    launcher = "default: what is installed; a script that calls init_process_group needs torchrun"
    option("--launcher", None, None, launcher, choices=LAUNCHERS)
    words = "more options for mpirun, quoted as one argument"
    option("--mpi-args", None, None, words, metavar="WORDS")
    option("--interfaces", None, None, "network interfaces for the ranks, such as eth0")
    option(
        "--link",
        parse_link,
        None,
        "emulate a network between the ranks of this host, such as 100mbit,0.4ms: gtopk's "
        "messages are paced, those of torch.distributed (DDP's own allreduce) are not",
        metavar="RATE[,LATENCY]",
    )
    record = "record the run, for gtopk report and gtopk top"
    option("--record", None, None, record, metavar="FOLDER")
    timeline = "trace every rank, for gtopk timeline"
    option("--timeline", None, None, timeline, metavar="FOLDER")
    flag("--dry-run", "print what would be run, and stop")
    flag("--json", "print it as JSON")
    module = "SCRIPT is a module's name"
    described.add_argument("-m", "--module", action="store_true", help=module)
    # One positional for program and arguments: argparse drops a -- between two positionals.
    described.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="a Python file or a program; what follows it are its arguments",
    )
    return described


def parse_link(text: str) -> str:
    """Return the text unchanged if it is valid for GTOPK_LINK."""
    try:
        settings.parse_link(text)
    except ValueError as error:
        raise ValueError(f"must be {error}, got {text!r}") from None
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script and return the exit code of its ranks."""
    options = parser().parse_args(arguments)
    try:
        hosts = read_hostfile(options.hostfile) if options.hostfile else options.hosts
        places = _places(options, hosts)
        if options.link and places.remote_host:
            raise ValueError(
                f"--link emulates a network between ranks of this host, and '{places.remote_host}' "
                "is another host"
            )
        start = launch_command(places, _program(options), _variables(options))
        # A dry run starts nothing, so it is allowed inside a job.
        if not options.dry_run:
            refuse_inside_a_job()
    except OSError as error:
        return fail("run", f"--hostfile {options.hostfile}: {error.strerror}", code=2)
    except (LaunchError, ValueError) as error:
        return fail("run", error, code=2)
    if options.dry_run or options.json:
        _print_start(start, places, options.json)
    if options.dry_run:
        return 0
    with job(start.command, start.variables) as launcher, _raise_signals():
        try:
            code = launcher.wait()
            # torchrun itself reports how each rank ended.
            if code and "torch.distributed.run" not in start.command:
                fail("run", _exit_description(code))
            return code
        except _TerminationRequested as request:
            _terminate(launcher, start.command)
            return int(request.args[0])


def _exit_description(code: int) -> str:
    """Explain an exit code of mpirun or srun."""
    try:
        by = f" ({signal.Signals(code - 128 if code > 0 else -code).name})"
    except ValueError:
        by = ""
    # A negative code from Popen means that a signal ended the launcher itself.
    process = "a rank" if code > 0 else "the launcher"
    return f"{process} ended with exit code {code}{by}"


@contextmanager
def _raise_signals() -> Iterator[None]:
    """Raise _TerminationRequested on SIGINT and SIGTERM, unless they are ignored (nohup)."""

    def request(number: int, frame: FrameType | None) -> None:
        raise _TerminationRequested(128 + number)

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handled = [number for number in previous if previous[number] != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, request)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, previous[number])


def _terminate(launcher: subprocess.Popen[bytes], command: Sequence[str]) -> None:
    """Terminate the launcher and wait for it to exit; a second signal ends the wait."""
    time_to_save = "only torchrun gives ranks time to save"
    if "torch.distributed.run" in command:
        time_to_save = f"the ranks have {_SAVE_SECONDS:g} s, none after a second signal"
    with suppress(_TerminationRequested, subprocess.TimeoutExpired):
        # Send SIGTERM for Ctrl-C too, because ranks within gtopk.termination() handle SIGTERM.
        launcher.terminate()
        print(f"gtopk run: ending the ranks; {time_to_save}", file=sys.stderr)
        launcher.wait(_SAVE_SECONDS + _END_SECONDS)


def _places(options: argparse.Namespace, hosts: list[Host]) -> Places:
    """Return the places of the ranks."""
    launcher, ranks = options.launcher, options.ranks
    if launcher is None:
        # In an allocation, srun knows hosts and cores; --hosts may name hosts outside it.
        by_srun = os.environ.get("SLURM_JOB_ID") and shutil.which("srun") and not hosts
        launcher = "srun" if by_srun else default_launcher(hosts)
    if ranks is None:
        by_srun = launcher == "srun" and not hosts
        ranks = sum(h.slots for h in hosts) or (allocated_tasks() if by_srun else usable_cores())
    return Places(ranks, hosts, launcher, options.mpi_args, interfaces=options.interfaces)


def _program(options: argparse.Namespace) -> list[str]:
    """Return the command of a rank; raise ValueError for a missing script."""
    words = options.program
    if words[:1] == ["--"]:  # as in `gtopk run -- SCRIPT`
        words = words[1:]
    if not words:
        raise ValueError("SCRIPT is missing: give a file or a program")
    script, *words = words
    if options.module:
        return [sys.executable, "-m", script, *words]
    if Path(script).is_file():
        if os.access(script, os.X_OK) and not script.endswith(".py"):
            # With "./", so that a program of this name on PATH is not started instead.
            return [os.path.join(".", script), *words]
        return [sys.executable, script, *words]
    if shutil.which(script) is None:
        raise ValueError(f"SCRIPT must be a file or a program, and '{script}' is neither")
    return [script, *words]


def _variables(options: argparse.Namespace) -> dict[str, str]:
    folders = {settings.RUN.name: options.record, settings.TIMELINE.name: options.timeline}
    # Absolute paths: ranks on other hosts may start in another folder.
    variables = {name: os.path.abspath(folder) for name, folder in folders.items() if folder}
    return variables | ({settings.LINK.name: options.link} if options.link else {})


def _print_start(start: Start, places: Places, as_json: bool) -> None:
    if as_json:
        record = {
            "launcher": places.launcher,
            "ranks": places.ranks,
            "command": start.command,
            "variables": start.variables,
        }
        print(json.dumps(record), flush=True)
        return
    assignments = " ".join(f"{name}={shlex.quote(v)}" for name, v in start.variables.items())
    print(f"{assignments} {shlex.join(start.command)}".strip())
