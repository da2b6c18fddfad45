"""The command `gtopk`, with a package or a module for each subcommand.

Only this package parses arguments, prints and draws; nothing else of gtopk imports it.

main.py        the subcommands, and how a command ends
arguments.py   types of arguments: numbers with units, rates, files
completion.py  shell completion for bash, zsh and fish
charts/        charts and pages, which several subcommands draw
"""

from .main import main as main
