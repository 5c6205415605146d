"""Starts a server from the command line, in the order that takes the least time.

The zygote imports NumPy and the backends while this process imports the server: each has a processor. So the zygote is
the first thing that is started, before the modules that `kernel/app.py` imports.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from kernel.machine import raise_descriptor_limit, share_malloc_arena

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.launch.zygote_start import StartedZygote
    from kernel.operator import ServerOperator
    from kernel.options import ServerOptions


def start(options: ServerOptions, notes: Sequence[str] = (), operator: ServerOperator | None = None) -> int:
    """Run the server until a signal tells it to stop; returns the exit code. `notes` are logged as warnings.

    `operator` is given by other commands than `run`. Garbage is not collected until `ServerOperator.imported`.
    """
    # Imports make 50,000 objects that stay, and 2,000 that do not. Looking for these takes a sixth of their time.
    gc.disable()
    share_malloc_arena()
    raise_descriptor_limit()  # before the zygote is started, because workers inherit the limit
    zygote = _start_zygote(options)
    try:
        from kernel.app import serve  # imported late: see above

        return serve(options, notes, zygote, operator)
    finally:
        gc.enable()
        if zygote is not None:
            zygote.end()  # unless the server has taken it over


def _start_zygote(options: ServerOptions) -> StartedZygote | None:
    """Start the first zygote, if workers are forked. None if that fails: the server tries it again, and says why."""
    if options.worker_start == "spawn":
        return None
    from backends.launch.zygote_start import StartedZygote

    try:
        return StartedZygote()
    except OSError:
        return None
