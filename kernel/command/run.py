"""`naiad run`: reads the flags and runs the server. Imports nothing that only other commands need."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kernel.command.single_models import options_with_repositories
from kernel.options import check_options

if TYPE_CHECKING:
    from kernel.options import ServerOptions


def run_server(arguments: list[str]) -> int:
    """Serve with the flags in `arguments`, or print the help; returns the exit code. Raises `BadOption`."""
    if "--help" in arguments or "-h" in arguments:
        from kernel.command.flags.help import print_help

        print_help()
        return 0
    from kernel.command.flags.read import read_flags

    options, notes = read_flags(arguments, os.environ, variables=True)
    with options_with_repositories(options) as options_with_folders:
        return _start(options_with_folders, notes)


def _start(options: ServerOptions, notes: list[str]) -> int:
    check_options(options)
    from kernel.start import start  # imported late: wrong flags do not need the server

    return start(options, notes)
