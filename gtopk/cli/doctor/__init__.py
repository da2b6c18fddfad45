"""`gtopk doctor`: report which parts work here, and the commands that fix the rest.

basics.py      findings, and the probes of packages
isolation.py   runs probes in a child process; the probes of the network
links.py       checks the links between the ranks of a running job

To check that several ranks work together, they join as in `init` and sum numbers. Without a
launcher, the doctor starts two ranks. Under a launcher, each process starts a child that joins the
job in its place, so that the report survives an aborting MPI.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from ... import settings
from ...runtime.launch import (
    Launched,
    LaunchError,
    LaunchTimeoutError,
    by_reason,
    find_mpirun,
    identify,
    launched_by,
    mpirun_settings,
    run,
    transport_name,
)
from ...runtime.runner.ranks import default_launcher
from ...runtime.standard_streams import coloured, wants_colour
from ...units import counted
from ..arguments import Command, write_records
from .basics import INSTALL_MPI, Finding, State, check_launcher, gist, installed
from .isolation import PROBES, exit_description, function_command, run_probes

__all__ = ["Finding", "State", "main"]

NAME: Final = "ranks"
NETWORK: Final = "network"
LINKS: Final = "links"
GPUS: Final = "GPU messages"
JOB_SECONDS: Final = 60.0
_RANKS_ALONE: Final = 2
TORCHRUN: Final = "torchrun --nproc-per-node"
_INIT: Final = "import gtopk.torch as hvd; hvd.init()"
_MARK: Final = "gtopk doctor: "
_MEGABYTE: Final = 1 << 20
_BUSY_ADVICE: Final = "check whether the network or a host is busy with other work; then try again"


# ESSENTIAL: needed to train on one rank. NEEDED: needed to train on several.
ESSENTIAL: Final = ("Python", "gtopk", "numpy", "torch", "kernels")
NEEDED: Final = (*ESSENTIAL, NAME, LINKS)

# The same number as in the docs.
_EXAMPLE_RANKS: Final = 4

_NAME_WIDTH: Final = max(map(len, PROBES))
_STATE_WIDTH: Final = max(len(state.value) for state in State)
_INDENT: Final = 2 + _NAME_WIDTH + 2 + _STATE_WIDTH + 2
_COLOURS: Final = {State.OK: "32", State.WARN: "33", State.MISSING: "36", State.FAIL: "1;31"}


def check_new_ranks(seconds: float = JOB_SECONDS) -> Finding:
    """Start two ranks, and check that they sum numbers correctly."""
    launcher = default_launcher()
    if launcher == "torchrun" and not installed("torch"):
        return Finding(NAME, State.MISSING, "starting several needs torch or MPI", INSTALL_MPI)
    lines: list[str] = []
    begun = time.monotonic()
    program = function_command(__name__, check_sums.__name__, False)
    with tempfile.TemporaryFile() as errors:
        try:
            code = run(
                _RANKS_ALONE,
                program,
                by_torchrun=launcher == "torchrun",
                on_line=lines.append,
                timeout_seconds=seconds,
                errors=errors,
            )
        except LaunchTimeoutError:
            detail = f"{_RANKS_ALONE} ranks did not connect in {seconds:g} s"
            return Finding(NAME, State.FAIL, detail, _output_advice(_RANKS_ALONE, launcher))
        except LaunchError as error:
            return Finding(NAME, State.FAIL, f"{error}")
        except ImportError as error:
            # Counting cores needs NumPy, which is missing.
            return Finding(NAME, State.FAIL, f"{error}", PROBES["numpy"].repair)
        errors.seek(0)
        last_error = gist(errors.read().decode(errors="replace"))
    elapsed = time.monotonic() - begun
    sums = _find_report(lines)
    if code != 0 or sums is None:
        detail = f"{launcher}'s exit code {code}: {last_error}"
        return Finding(NAME, State.FAIL, detail, _output_advice(_RANKS_ALONE, launcher))
    finding = judge(sums, _RANKS_ALONE, launcher)
    gpus = f"; {sums['gpus']}" if sums.get("gpus") else ""
    return finding._replace(detail=f"{finding.detail}{gpus}; {elapsed:.1f} s with their start")


def check_running_ranks(job: Launched, seconds: float = JOB_SECONDS) -> list[Finding]:
    """Check that the running job's ranks sum correctly; every process of the job must call this.

    With several ranks, also estimate whether compression would pay.
    """
    sums = _report_of(check_sums.__name__, job, seconds)
    if isinstance(sums, Finding):
        return [sums]
    findings = [judge(sums, job.size)]
    if sums.get("gpus"):
        state = State.OK if "over NCCL" in sums["gpus"] else State.WARN
        findings.append(Finding(GPUS, state, sums["gpus"]))
    if "network" in sums:
        findings.append(Finding(NETWORK, State.OK, sums["network"]))
    return findings


def check_links(job: Launched) -> list[Finding]:
    """Check the link of each pair of ranks in the running job; every rank must call this."""
    links = _report_of(check_pairs.__name__, job, JOB_SECONDS)
    if isinstance(links, Finding):
        return [links]
    tried, broken, slow = links["tried"], links["broken"], links["slow"]
    if broken:
        detail = f"{len(broken)} of {2 * tried} directions between {job.size} ranks fail: "
        detail += "; ".join(broken)
        advice = "allow all ports between the hosts, or name the interface"
        return [Finding(LINKS, State.FAIL, detail, f"{advice}: gtopk.run(network_interface=...)")]
    working = "the one link delivers" if tried == 1 else f"all {tried} deliver"
    detail = f"{working} messages intact between {job.size} ranks"
    if slow:
        return [Finding(LINKS, State.WARN, f"{detail}, slowly: {'; '.join(slow)}", _BUSY_ADVICE)]
    return [Finding(LINKS, State.OK, detail)]


def _report_of(function: str, job: Launched, seconds: float) -> dict[str, Any] | Finding:
    """Run a function of this file in a child on every rank; return rank 0's report, or a finding.

    Other ranks get no report; they return a finding that the caller discards.
    """
    with tempfile.TemporaryFile() as errors:
        # close_fds=False: MPICH's ranks reach their launcher over an inherited descriptor.
        child = subprocess.Popen(
            function_command(__name__, function),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            close_fds=False,
        )
        try:
            output, _ = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            # Reap the child; discard its output, which is incomplete.
            child.communicate()
            detail = f"the {job.size} ranks did not connect in {seconds:g} s"
            return Finding(NAME, State.FAIL, detail, _diagnose(job))
        report = _find_report(output.decode(errors="replace").splitlines())
        if child.returncode != 0 or report is None:
            return Finding(NAME, State.FAIL, exit_description(child, errors), _diagnose(job))
    return report


def _diagnose(job: Launched) -> str:
    """Return the advice for a job in which the ranks do not work together."""
    if transport_name(job) != "mpi":
        return f"see their full output: start `{_INIT}` instead"
    return _output_advice(job.size) if installed("mpi4py") else INSTALL_MPI


def judge(sums: dict[str, Any], launched: int, launcher: str = "mpirun") -> Finding:
    """Check rank 0's report against the number of launched ranks.

    launcher: the available one, used in the advice.
    """
    size = sums["size"]
    if size != launched:
        detail = f"{launched} were started, but {size} joined: each would train alone"
        by_torchrun = f"{TORCHRUN} {launched} ..."
        by_mpirun = f"{_mpirun()} -n {launched} python ..."
        advice = f"start them with {by_torchrun if launcher == 'torchrun' else by_mpirun}"
        return Finding(NAME, State.FAIL, detail, advice)
    hosts = Counter(sums["hosts"])
    detail = f"{counted(size, 'rank')} on {', '.join(hosts)}"
    if not sums["right"]:
        detail += " compute wrong sums"
        return Finding(NAME, State.FAIL, detail, _output_advice(size, launcher))
    detail += f": 1 MB summed in {1e3 * sums['seconds']:.1f} ms over {sums['transport']}"
    for host, ranks in hosts.items():
        cores = sums["cores"][host]
        if ranks > cores:
            detail += f"; {ranks} share {cores:g} core{'s' if cores > 1 else ''}"
            advice = f"for timings, start a rank per core: {max(1, int(cores))} on {host}"
            return Finding(NAME, State.WARN, detail, advice)
    return Finding(NAME, State.OK, detail)


def _mpirun() -> str:
    return shlex.quote(str(find_mpirun() or "mpirun"))


def _output_advice(ranks: int, launcher: str = "mpirun") -> str:
    if launcher == "torchrun":
        return f"see their full output: {TORCHRUN} {ranks} --no-python python -c '{_INIT}'"
    return f"see its full output: {_mpirun()} -n {ranks} python -m mpi4py.bench helloworld"


def check_sums(measure_network: bool = True) -> None:
    """Sum numbers over all ranks, and print the report on rank 0; the children's program."""
    import numpy as np

    from collectives.cores import own_cores, shared_cores

    from ...runtime.world.joining import join
    from ...runtime.world.membership import choose_gpu_route, emulate_on

    world = join()
    emulate_on(world)
    total = np.empty(_MEGABYTE // 4, np.float32)
    seconds = []
    for _ in range(5):
        # Refill each time, because allreduce works in place. A sum other than 1 + ... + P reveals a
        # missing rank.
        total[:] = world.rank + 1
        world.barrier()
        begun = time.perf_counter()
        world.allreduce(total)
        seconds.append(time.perf_counter() - begun)
    reports = world.gather_object([socket.gethostname(), own_cores(), min(seconds)])
    hosts = [host for host, _, _ in reports]
    sums = {
        "size": world.size,
        "right": bool((total == world.size * (world.size + 1) / 2).all()),
        # Each rank's best time, as the first sums also open connections; of these, the slowest.
        "seconds": max(took for _, _, took in reports),
        "hosts": hosts,
        "cores": {
            host: shared_cores([own for other, own, _ in reports if other == host])
            for host in set(hosts)
        },
        "transport": f"{world.name} ({world.library()})",
        "gpus": choose_gpu_route(world),
    }
    if measure_network and world.size > 1:
        from .links import describe_network

        sums["network"] = describe_network(world)
    if world.rank == 0:
        print(_MARK + json.dumps(sums), flush=True)
    world.leave("the sum is done", JOB_SECONDS)


def check_pairs() -> None:
    """Check the links of all ranks, and print the report on rank 0; the children's program."""
    from ...runtime.world.joining import join
    from .links import TRY_SECONDS, try_links

    # Set before `join` reads it: a broken link must fail in seconds, not in ten minutes.
    os.environ[settings.TIMEOUT.name] = str(TRY_SECONDS)
    world = join()
    links = try_links(world)
    if links is not None:
        print(_MARK + json.dumps(links._asdict()), flush=True)
    # A time limit, so that this rank does not wait for unreachable ones.
    world.leave("the links are tried", 2 * TRY_SECONDS)


def _find_report(lines: list[str]) -> dict[str, Any] | None:
    for line in lines:
        if line.startswith(_MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return found
    return None


def parser() -> Command:
    """Return the argument parser."""
    described = Command(
        "gtopk doctor",
        "Check what is installed and works here, and how to fix what does not.",
        "gtopk doctor\n  mpirun -n 4 gtopk doctor --ranks\n\n"
        "Under mpirun it checks the running job. Exit code 1: a FAIL prevents training on\n"
        "several ranks; WARN and MISSING do not.",
    )
    described.flag("--json", "print the findings as JSON")
    described.flag("--no-run", "do not start ranks for a trial")
    every = "check only the running job: try the link between each pair of its ranks"
    described.flag("--ranks", every)
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return 1 if it has a FAIL, else 0.

    Under a launcher, rank 0 prints it, and it covers the job's own ranks.
    """
    described = parser()
    options = described.parse_args(arguments)

    job = launched_by()
    if options.ranks and job is None:
        described.error("--ranks needs a running job: mpirun -n 4 gtopk doctor --ranks")
    if job is not None and job.rank != 0:
        _check_job(job, options.ranks)
        return 0
    findings: list[Finding] = []
    examined = map(grade, _examine(job, not options.no_run, options.ranks))
    # The JSON is a single object, so collect all findings first.
    if options.json:
        findings.extend(examined)
        ready = not _failed(findings)
        write_records({"ready": ready, "findings": findings})
        return 0 if ready else 1
    # Do not trust isatty under mpirun: ranks see a terminal even if its output goes to a file.
    terminal = sys.stdout.isatty() and job is None
    colour = job is None and wants_colour(sys.stdout)
    width = shutil.get_terminal_size().columns if terminal else None
    for finding in examined:
        print(_render(finding, colour, width), flush=True)
        findings.append(finding)
    print(f"\n{_conclude(findings, job)}")
    return 1 if _failed(findings) else 0


def _check_job(job: Launched, links: bool) -> list[Finding]:
    """Check the running job; each of its processes must call this."""
    return check_links(job) if links else check_running_ranks(job)


def _examine(job: Launched | None, run: bool, links: bool) -> Iterator[Finding]:
    # In a job, check the ranks first, because the other ranks wait for this one.
    if job is not None:
        yield check_launcher()
        yield from _check_job(job, links)
        if not links:
            yield from run_probes(list(PROBES))
        return
    yield from run_probes(list(PROBES))
    yield check_launcher()
    if run:
        yield check_new_ranks()


def grade(finding: Finding) -> Finding:
    """Adjust a finding's state: FAIL only for needed items, and FAIL if such an item is missing."""
    if finding.name in NEEDED and finding.state is State.MISSING:
        return finding._replace(state=State.FAIL)
    if finding.name not in NEEDED and finding.state is State.FAIL:
        return finding._replace(state=State.WARN)
    return finding


def _failed(findings: Sequence[Finding]) -> list[str]:
    """Return the names of the findings that prevent training."""
    return [finding.name for finding in findings if finding.state is State.FAIL]


def _render(finding: Finding, colour: bool, width: int | None) -> str:
    """Format a finding, with its advice on a line of its own; width: where to wrap the finding."""
    state = f"{finding.state.value:<{_STATE_WIDTH}}"
    if colour:
        state = coloured(state, _COLOURS[finding.state])
    detail = finding.detail
    if width is not None:
        wrapped = textwrap.wrap(detail, max(30, width - _INDENT), break_on_hyphens=False)
        detail = ("\n" + " " * _INDENT).join(wrapped)
    line = f"  {finding.name:<{_NAME_WIDTH}}  {state}  {detail}"
    # Do not wrap advice: users copy it.
    return f"{line}\n{'':{_NAME_WIDTH + 4}}-> {finding.advice}" if finding.advice else line


def _conclude(findings: Sequence[Finding], job: Launched | None) -> str:
    failed = _failed(findings)
    if job is None and failed and not set(failed) & set(ESSENTIAL):
        return (
            f"Not ready to train on several ranks. Failed: {', '.join(failed)}.\n"
            "One rank can train: python train.py"
        )
    if failed:
        return f"Not ready to train. Failed: {', '.join(failed)}."
    if job is not None:
        return f"Ready to train on {counted(job.size, 'rank')}."
    if all(finding.name != NAME for finding in findings):
        return "Ready to train on one rank: python train.py\nSeveral ranks were not tested."
    return "\n".join(["Ready to train:", f"  gtopk run -n {_EXAMPLE_RANKS} train.py", *_by_hand()])


def _by_hand() -> Iterator[str]:
    """Yield lines on starting ranks without `gtopk run`, with the settings of each launcher."""
    # Imported here because it needs NumPy; the doctor must also report without it.
    from collectives.cores import usable_cores

    yield ""
    yield "It sets what the launcher needs here. Without it:"
    threads = max(1, usable_cores() // _EXAMPLE_RANKS)
    if default_launcher() == "mpirun" and (mpirun := find_mpirun()) is not None:
        yield f"by mpirun ({identify(mpirun)}):"
        for reason, group in by_reason(mpirun_settings(threads, identify(mpirun).vendor)).items():
            yield f"  # {reason}"
            yield f"  export {' '.join(f'{name}={shlex.quote(group[name])}' for name in group)}"
        on_path = shutil.which("mpirun")
        same = on_path is not None and os.path.samefile(mpirun, on_path)
        command = "mpirun" if same else shlex.quote(str(mpirun))
        yield f"  {command} -n {_EXAMPLE_RANKS} python train.py"
    yield "by torchrun:"
    if "OMP_NUM_THREADS" not in os.environ:
        yield f"  export OMP_NUM_THREADS={threads}"
    yield f"  {TORCHRUN} {_EXAMPLE_RANKS} train.py"
