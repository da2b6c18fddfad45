"""`gtopk doctor`: what is installed and works here, and what to run for what does not."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

from ...runtime.launch import (
    Launched,
    by_reason,
    find_mpirun,
    identify,
    launched_by,
    mpirun_settings,
)
from ...runtime.runner.ranks import launcher_at_hand
from ...runtime.standard_streams import wants_colour
from ..arguments import Command
from . import ranks
from .basics import Finding, State, check_launcher
from .isolation import PROBES, run_probes

__all__ = ["Finding", "State", "main"]

# Without these not even one rank can train; without the others of NEEDED several cannot.
ESSENTIAL: Final = ("Python", "gtopk", "numpy", "torch", "kernels")
NEEDED: Final = (*ESSENTIAL, ranks.NAME, ranks.LINKS)

# As the docs have it.
_EXAMPLE_RANKS: Final = 4

_NAME_WIDTH: Final = max(map(len, PROBES))
_STATE_WIDTH: Final = max(len(state.value) for state in State)
_INDENT: Final = 2 + _NAME_WIDTH + 2 + _STATE_WIDTH + 2
_COLOURS: Final = {
    State.OK: "\033[32m",
    State.WARN: "\033[33m",
    State.MISSING: "\033[36m",
    State.FAIL: "\033[1;31m",
}
_PLAIN: Final = "\033[0m"


def parser() -> Command:
    """Return the command line's grammar."""
    described = Command(
        "doctor",
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
    """Print the report; return 0 when several ranks can train here, else 1.

    Under a launcher rank 0 prints it, and the job's own ranks have to work together.
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
    # JSON is one object: it cannot be printed finding by finding, as they come.
    if options.json:
        findings.extend(examined)
        ready = not _failed(findings)
        records = [finding._asdict() for finding in findings]
        print(json.dumps({"ready": ready, "findings": records}, indent=2))
        return 0 if ready else 1
    # Ranks see a terminal even when mpirun's output goes to a file.
    terminal = sys.stdout.isatty() and job is None
    colour = job is None and wants_colour(sys.stdout)
    width = shutil.get_terminal_size().columns if terminal else None
    for finding in examined:
        _say(_render(finding, colour, width))
        findings.append(finding)
    _say("")
    _say(_conclude(findings, job))
    return 1 if _failed(findings) else 0


def _check_job(job: Launched, links: bool) -> list[Finding]:
    """Look at the running job, as each of its processes must."""
    return ranks.check_links(job) if links else ranks.check_running_ranks(job)


def _examine(job: Launched | None, run: bool, links: bool) -> Iterator[Finding]:
    # In a job the ranks first, as the others wait for this one.
    if job is not None:
        yield check_launcher()
        yield from _check_job(job, links)
        if not links:
            yield from run_probes(list(PROBES))
        return
    yield from run_probes(list(PROBES))
    yield check_launcher()
    if run:
        yield ranks.check_new_ranks()


def grade(finding: Finding) -> Finding:
    """Give a finding the state that it has for training, which an optional package cannot stop."""
    if finding.name in NEEDED and finding.state is State.MISSING:
        return finding._replace(state=State.FAIL)
    if finding.name not in NEEDED and finding.state is State.FAIL:
        return finding._replace(state=State.WARN)
    return finding


def _failed(findings: Sequence[Finding]) -> list[str]:
    """Return the problems that prevent training."""
    return [finding.name for finding in findings if finding.state is State.FAIL]


def _say(text: str) -> None:
    """Print, with escapes for what the output cannot spell (a path or a foreign error)."""
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _render(finding: Finding, colour: bool, width: int | None) -> str:
    """Return a finding as a line, and another for its advice; width: where to wrap the first."""
    state = f"{finding.state.value:<{_STATE_WIDTH}}"
    if colour:
        state = f"{_COLOURS[finding.state]}{state}{_PLAIN}"
    detail = finding.detail
    if width is not None:
        wrapped = textwrap.wrap(detail, max(30, width - _INDENT), break_on_hyphens=False)
        detail = ("\n" + " " * _INDENT).join(wrapped)
    line = f"  {finding.name:<{_NAME_WIDTH}}  {state}  {detail}"
    # Advice is never wrapped: it is to be copied.
    return f"{line}\n{'':{_NAME_WIDTH + 4}}-> {finding.advice}" if finding.advice else line


def _conclude(findings: Sequence[Finding], job: Launched | None) -> str:
    failed = _failed(findings)
    if job is None and failed and not set(failed) & set(ESSENTIAL):
        return (
            f"Not ready to train on several ranks. In the way: {', '.join(failed)}.\n"
            "One rank trains: python train.py"
        )
    if failed:
        return f"Not ready to train. In the way: {', '.join(failed)}."
    if job is not None:
        return f"Ready to train on these {job.size} ranks."
    if all(finding.name != ranks.NAME for finding in findings):
        return "Ready to train on one rank: python train.py\nSeveral ranks were not tried."
    return "\n".join(["Ready to train:", f"  gtopk run -n {_EXAMPLE_RANKS} train.py", *_by_hand()])


def _by_hand() -> Iterator[str]:
    """Yield how to start ranks without `gtopk run`: the settings that each launcher needs here."""
    # Here, as it needs NumPy, without which the report still comes.
    from collectives.cores import usable_cores

    yield ""
    yield "It sets all that its launcher needs here. By hand:"
    threads = max(1, usable_cores() // _EXAMPLE_RANKS)
    if launcher_at_hand() == "mpirun" and (mpirun := find_mpirun()) is not None:
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
    yield f"  {ranks.TORCHRUN} {_EXAMPLE_RANKS} train.py"
