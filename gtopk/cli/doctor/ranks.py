"""Whether several ranks work together here: they add up their numbers, joined as `init` does it.

Alone, the doctor starts two ranks for that. Under a launcher each of its processes starts a child
that joins the running job in its place, so that an MPI that aborts cannot take the report along.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import tempfile
import time
from collections import Counter
from typing import Any, Final

from ... import settings
from ...runtime.launch import (
    Launched,
    LaunchError,
    LaunchTimeoutError,
    find_mpirun,
    run,
    transport_name,
)
from ...runtime.runner.ranks import launcher_at_hand
from .basics import INSTALL_MPI, Finding, State, gist, installed
from .isolation import PROBES, how_it_ended, like_this_process

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
_BUSY: Final = "look whether the network, or a host, is busy with something else; then try again"


def check_new_ranks(seconds: float = JOB_SECONDS) -> Finding:
    """Start two ranks and have them add."""
    launcher = launcher_at_hand()
    if launcher == "torchrun" and not installed("torch"):
        return Finding(NAME, State.MISSING, "several need torch or MPI to start them", INSTALL_MPI)
    lines: list[str] = []
    begun = time.monotonic()
    program = like_this_process(__name__, add_up.__name__, False)
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
            detail = f"{_RANKS_ALONE} ranks did not come together in {seconds:g} s"
            return Finding(NAME, State.FAIL, detail, _see_all(_RANKS_ALONE, launcher))
        except LaunchError as error:
            return Finding(NAME, State.FAIL, f"{error}", INSTALL_MPI)
        except ImportError as error:
            # NumPy is missing, by which cores are counted.
            return Finding(NAME, State.FAIL, f"{error}", PROBES["numpy"].repair)
        errors.seek(0)
        said = gist(errors.read().decode(errors="replace"))
    took = time.monotonic() - begun
    sums = _find_report(lines)
    if code != 0 or sums is None:
        detail = f"{launcher}'s exit code {code}: {said}"
        return Finding(NAME, State.FAIL, detail, _see_all(_RANKS_ALONE, launcher))
    finding = judge(sums, _RANKS_ALONE, launcher)
    gpus = f"; {sums['gpus']}" if sums.get("gpus") else ""
    return finding._replace(detail=f"{finding.detail}{gpus}; {took:.1f} s with their start")


def check_running_ranks(job: Launched, seconds: float = JOB_SECONDS) -> list[Finding]:
    """Join the ranks of the running job; every one of its processes must call this.

    Finds out whether they add up, and where they are several, whether compression would pay.
    """
    sums = _report_of(add_up.__name__, job, seconds)
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
    """Try the link of each pair of the running job's ranks; every one of them must call this."""
    links = _report_of(swap.__name__, job, JOB_SECONDS)
    if isinstance(links, Finding):
        return [links]
    tried, broken, slow = links["tried"], links["broken"], links["slow"]
    if broken:
        detail = f"{len(broken)} of {2 * tried} ways between {job.size} ranks: {'; '.join(broken)}"
        advice = "see that every host lets all ports through to the others, or name the interface"
        return [Finding(LINKS, State.FAIL, detail, f"{advice}: gtopk.run(network_interface=...)")]
    whole = "the one brings" if tried == 1 else f"all {tried} bring"
    detail = f"{whole} messages whole between {job.size} ranks"
    if slow:
        return [Finding(LINKS, State.WARN, f"{detail}, slowly: {'; '.join(slow)}", _BUSY)]
    return [Finding(LINKS, State.OK, detail)]


def _report_of(function: str, job: Launched, seconds: float) -> dict[str, Any] | Finding:
    """Return the reports of all ranks' children by a function of this file, or why they failed.

    On other ranks than 0 nothing is reported, and a finding that nobody reads is returned.
    """
    with tempfile.TemporaryFile() as errors:
        # close_fds: MPICH's ranks inherit the descriptor over which they reach their launcher.
        child = subprocess.Popen(
            like_this_process(__name__, function),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            close_fds=False,
        )
        try:
            output, _ = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            # Reaps it; what it has printed by now is no whole report.
            child.communicate()
            detail = f"the {job.size} of them did not come together in {seconds:g} s"
            return Finding(NAME, State.FAIL, detail, _diagnose(job))
        report = _find_report(output.decode(errors="replace").splitlines())
        if child.returncode != 0 or report is None:
            return Finding(NAME, State.FAIL, how_it_ended(child, errors), _diagnose(job))
    return report


def _diagnose(job: Launched) -> str:
    """Return the advice for ranks of a job that do not work together."""
    if transport_name(job) != "mpi":
        return f"see all they say: start `{_INIT}` in their place"
    return _see_all(job.size) if installed("mpi4py") else INSTALL_MPI


def judge(sums: dict[str, Any], launched: int, launcher: str = "mpirun") -> Finding:
    """Report whether rank 0's findings are those expected of `launched` ranks.

    launcher: that is at hand, to be advised.
    """
    size = sums["size"]
    if size != launched:
        detail = f"{launched} were started, but {size} joined: each would train alone"
        by_torchrun = f"{TORCHRUN} {launched} ..."
        by_mpirun = f"{_mpirun()} -n {launched} python ..."
        advice = f"start them with {by_torchrun if launcher == 'torchrun' else by_mpirun}"
        return Finding(NAME, State.FAIL, detail, advice)
    hosts = Counter(sums["hosts"])
    detail = f"{size} ranks on {', '.join(hosts)}"
    if not sums["right"]:
        return Finding(NAME, State.FAIL, f"{detail} add up wrongly", _see_all(size, launcher))
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


def _see_all(ranks: int, launcher: str = "mpirun") -> str:
    if launcher == "torchrun":
        return f"see all they say: {TORCHRUN} {ranks} --no-python python -c '{_INIT}'"
    return f"see all it says: {_mpirun()} -n {ranks} python -m mpi4py.bench helloworld"


def add_up(measure_network: bool = True) -> None:
    """Add up numbers with all ranks, and print on rank 0 what came of it; this is the program."""
    import numpy as np

    from collectives.cores import allowed_cores, core_quota

    from ...runtime.world.joining import join
    from ...runtime.world.membership import choose_gpu_route, emulate_on

    world = join()
    emulate_on(world)
    total = np.empty(_MEGABYTE // 4, np.float32)
    seconds = []
    for _ in range(5):
        # Anew each time, as the sum is left in its place. 1 + 2 + ... + P shows a rank that is
        # missing.
        total[:] = world.rank + 1
        world.barrier()
        begun = time.perf_counter()
        world.allreduce(total)
        seconds.append(time.perf_counter() - begun)
    mine = [socket.gethostname(), sorted(allowed_cores()), core_quota(), min(seconds)]
    places = world.gather_object(mine)
    allowed: dict[str, set[int]] = {}
    for host, cores, _, _ in places:
        allowed.setdefault(host, set()).update(cores)
    sums = {
        "size": world.size,
        "right": bool((total == world.size * (world.size + 1) / 2).all()),
        # The slowest rank's best: the first sums open connections.
        "seconds": max(took for _, _, _, took in places),
        "hosts": [host for host, _, _, _ in places],
        # Ranks bound to cores of their own have them all together; a container's quota is for all.
        "cores": {host: min(len(allowed[host]), quota) for host, _, quota, _ in places},
        "transport": f"{world.name} ({world.library()})",
        "gpus": choose_gpu_route(world),
    }
    if measure_network and world.size > 1:
        from .links import describe_network

        sums["network"] = describe_network(world)
    if world.rank == 0:
        print(_MARK + json.dumps(sums), flush=True)
    world.leave("the sum is done", JOB_SECONDS)


def swap() -> None:
    """Try the links of all ranks, and print on rank 0 what came of it; this is the program."""
    from ...runtime.world.joining import join
    from .links import TRY_SECONDS, try_links

    # Before `join`, which reads it: a cut link must be an error in seconds, not in ten minutes.
    os.environ[settings.TIMEOUT.name] = str(TRY_SECONDS)
    world = join()
    links = try_links(world)
    if links is not None:
        print(_MARK + json.dumps(links._asdict()), flush=True)
    # Who cannot be reached is not waited for.
    world.leave("the links are tried", 2 * TRY_SECONDS)


def _find_report(lines: list[str]) -> dict[str, Any] | None:
    for line in lines:
        if line.startswith(_MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return found
    return None
