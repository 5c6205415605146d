"""What `naiad` does first: a server that starts imports nothing that only other commands need.

`run` is by far the most frequent command, and its process lives long. The libraries of the command line and of help
texts would take a sixth of its memory and of the time until it serves.
"""

from __future__ import annotations

import os
import sys

from kernel.errors import BadOption, ServingError
from kernel.naiad_module import is_shadowed, make_importable
from kernel.tools.run import run_server


def main() -> None:
    """Run a command. A wrong command line prints one line and exits with code 1."""
    if is_shadowed():
        make_importable()
        from naiad.packages import share_names

        share_names()
    try:
        if sys.argv[1:2] in (["run"], ["tritonserver"]):
            sys.exit(run_server(sys.argv[2:]))
        if sys.argv[1:] == ["ready"]:  # a health check, every few seconds
            from kernel.tools.ready import DEFAULT_TIMEOUT_S, print_ready

            sys.exit(print_ready("", DEFAULT_TIMEOUT_S, os.environ))
        from kernel.tools.cli import run_command

        sys.exit(run_command())
    except (BadOption, ServingError) as error:
        from kernel.texts import printable

        sys.exit(f"error: {printable(str(error).rstrip(), keep=chr(10))}")  # a model's exception has several lines
    except KeyboardInterrupt:
        sys.exit(130)
