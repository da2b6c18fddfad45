"""Kill processes that write files of commits; every file that is there must be whole.

Arguments: a folder, and how many to kill. Prints how many were killed within a write, and
how many files were whole.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from gtopk.objects import encode
from gtopk.torch.elastic.files import File, list_files, read_file, write_file

folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
dice = random.Random(rounds)
within = whole = 0
for number in range(rounds):
    pid = os.fork()
    if pid == 0:
        content = encode({"round": number, "values": bytes(range(256)) * 2000})
        for part in range(1000):
            write_file(folder, File(number, 1000, f"rank-{part}"), content)
        os._exit(1)
    time.sleep(dice.uniform(0.003, 0.03))
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    unfinished = list(folder.glob("*.part"))
    within += bool(unfinished)
    for file in list_files(folder):
        assert read_file(folder, file)["round"] == number
        os.unlink(folder / file.name)
        whole += 1
    for path in unfinished:
        path.unlink()
print(within, whole)
