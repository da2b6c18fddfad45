"""The command that starts ranks with torchrun."""

from __future__ import annotations

from torch.distributed.run import parse_args

from gtopk.runtime.launch.job import torchrun_command


def test_torchrun_command_runs_the_program_on_the_given_ranks() -> None:
    command = torchrun_command(3, ["python", "-c", "pass"], "/my/python")
    assert command[:3] == ["/my/python", "-m", "torch.distributed.run"]
    assert "--nproc-per-node=3" in command
    assert "--local-addr=127.0.0.1" in command  # the host's name need not resolve
    assert command[-5:] == ["--no-python", "--", "python", "-c", "pass"]


def test_torchrun_passes_the_programs_arguments_unchanged() -> None:
    program = ["train.py", "--log", "a.json", "--", "b"]
    read = parse_args(torchrun_command(3, program)[3:])
    assert [read.training_script, *read.training_script_args] == program
