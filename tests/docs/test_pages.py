"""What the pages tell people to type runs, and prints what they show.

`make test-docs` types all of it, launchers included; the suite runs every script on one rank, and
the commands that compute nothing.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gtopk.torch as hvd
from docs.make.blocks import Block, blocks, commands
from gtopk.cli.plan import main as plan
from gtopk.cli.simulate import parser
from tests.started import STARTED_PATH

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    str(page.relative_to(DOCS)): list(blocks(page.read_text(encoding="utf-8")))
    for page in sorted(DOCS.rglob("*.md"))
}
SCRIPTS = {block.title: block.text for parts in PAGES.values() for block in parts if block.title}
TYPED = [
    (page, index, shlex.split(line, comments=True))
    for page, parts in PAGES.items()
    for index, block in enumerate(parts)
    if block.language == "bash"
    for line in commands(block).splitlines()
]
ARGUMENTS = {"train.py": ["gtopk", "2", "checkpoints"], "spot.py": ["2"]}


def shown_after(page: str, index: int) -> str | None:
    """Return the output that a page shows for the block with this number, if any."""
    after = PAGES[page][index + 1 : index + 2]
    return after[0].text if after and after[0].language == "text" else None


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_of_the_docs_runs_on_one_rank(
    script: str, tmp_path, monkeypatch, capsys
) -> None:
    (tmp_path / script).write_text(SCRIPTS[script], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *ARGUMENTS.get(script, [])])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    if "init_process_group" in SCRIPTS[script]:
        env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in env.items():
            monkeypatch.setenv(name, value)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        hvd.shutdown()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("page", "index", "words"), [each for each in TYPED if each[2][:2] == ["gtopk", "plan"]]
)
def test_plan_commands_print_what_the_page_shows(
    page: str, index: int, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(words[2:]) == 0
    assert shown_after(page, index) in (None, capsys.readouterr().out)


def test_will_it_help_table_matches_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "will-it-help.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| ([\w-]+) \| (\d+) ms \|((?: (?:[\d.]+ Gbit/s|any) \|){3})$", page, re.MULTILINE
    )
    assert len(rows) == 4
    for model, backward, cells in rows:
        for (ranks, a_node), cell in zip(
            ((4, 1), (16, 1), (64, 8)), cells.split("|"), strict=False
        ):
            given = f"--model {model} --ranks {ranks} --ranks-per-node {a_node} --latency 0.2ms"
            rest = f"--bandwidth 1gbit --backward-ms {backward} --no-measure --json -"
            assert plan(f"{given} {rest}".split()) == 0
            record = json.loads(capsys.readouterr().out)
            edge = record["break_even_bits_per_second"]
            found = f"{float(f'{edge / 1e9:.2g}'):g} Gbit/s" if edge else "any"
            assert (found, record["pays"] == "always") == (cell.strip(), found == "any")


@pytest.mark.parametrize(
    "words", [words for _, _, words in TYPED if words[:2] == ["gtopk", "simulate"]]
)
def test_simulate_commands_of_the_docs_parse(words: list[str]) -> None:
    parser().parse_args(words[2:])


def run_commands(block: Block, folder: Path) -> str:
    """Run a block's commands as in an activated environment."""
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    typed = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands(block)],
        cwd=folder,
        env={**os.environ, "PATH": beside, "PYTHONPATH": STARTED_PATH, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    return typed.stdout


@pytest.mark.docs
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", sorted({page for page, _, _ in TYPED}))
def test_commands_of_a_page_run_and_print_what_it_shows(page: str, tmp_path: Path) -> None:
    for index, block in enumerate(PAGES[page]):
        if block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "bash":
            printed = run_commands(block, tmp_path)
            print(printed)
            assert shown_after(page, index) in (None, printed)
    # Scripts that no command runs are for a launcher that the page names in its text.
    typed = " ".join(block.text for block in PAGES[page] if block.language == "bash")
    for script in (block.title for block in PAGES[page] if block.title):
        if script not in typed:
            launched = Block("bash", "", f"torchrun --nproc-per-node 2 {script}\n")
            assert run_commands(launched, tmp_path).strip()
