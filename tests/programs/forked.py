"""Run a program on ranks that are forked once its imports are loaded: `forked.py 4 PROGRAM ...`.

Like torchrun's agent, this process serves the store where ranks meet, and ends all if one fails.
Loading torch, FSDP and torch's compiler takes a rank up to 7 s of CPU time.
"""

from __future__ import annotations

import ast
import importlib
import os
import runpy
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = Path(__file__).parent
GRACE_SECONDS = 5.0  # time for a rank to end after SIGTERM


def imports(program: Path) -> Iterator[str]:
    """Yield the modules that a program, and files that it imports from here, import, in order."""
    for node in ast.parse(program.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            beside = PROGRAMS / f"{name}.py"
            if beside.exists() and name != "light_torch":
                yield from imports(beside)
            else:
                yield name


def load(program: Path) -> None:
    names = list(imports(program))
    for name in names:
        importlib.import_module(name)
    if any(name.startswith(("torch.nn.parallel", "torch.distributed.fsdp")) for name in names):
        importlib.import_module("torch._dynamo.config")  # they look into it


def run_rank(rank: int, ranks: int, port: int, program: Path) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="forked",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    sys.argv = [str(program), *sys.argv[3:]]
    runpy.run_path(str(program), run_name="__main__")


def wait_for(ranks: set[int]) -> int:
    """Return 0 once all ranks have succeeded; once one fails, end the others and return 1."""
    code = 0
    try:
        while ranks and code == 0:
            pid, status = os.wait()
            if pid in ranks:
                ranks.remove(pid)
                code = 0 if status == 0 else 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # to the end of this
        end(ranks, signal.SIGKILL if code == 0 else signal.SIGTERM)
    return code


def end(ranks: set[int], number: signal.Signals) -> None:
    """Send the ranks a signal; kill those that still run some seconds later."""
    for pid in ranks:
        os.kill(pid, number)
    deadline = time.monotonic() + GRACE_SECONDS
    left = set(ranks)
    while left:
        left = {pid for pid in left if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        if left and time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def main() -> None:
    ranks, program = int(sys.argv[1]), Path(sys.argv[2])
    load(program)
    ends = [os.pipe() for _ in range(ranks)]
    children: set[int] = set()
    signal.signal(signal.SIGTERM, lambda *of: sys.exit(1))
    for rank, (port_end, _) in enumerate(ends):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for reading, writing in ends:
                os.close(writing)
                if reading != port_end:
                    os.close(reading)
            port = int(os.read(port_end, 16))  # nothing, and an error, where the parent has ended
            os.close(port_end)
            run_rank(rank, ranks, port, program)
            return
        children.add(pid)
    from torch.distributed import TCPStore  # its thread must start after all forks

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _, writing in ends:
        os.write(writing, str(store.port).encode())
    sys.exit(wait_for(children))


if __name__ == "__main__":
    main()
