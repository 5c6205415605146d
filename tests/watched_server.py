"""A server that prints what holds its event loop up: `python -m tests.watched_server run FLAGS`.

What counts is the processor time of a callback (`tests/slow_callbacks.py`), so that it does not depend on how busy the
machine is.
"""

from __future__ import annotations

import os

from tests import slow_callbacks

#: Begins each line of the log that says what held the loop up.
HELD_UP = "the event loop was held up: "


def report(text: str) -> None:
    """Write a line past everything that the server does with its output."""
    os.write(2, f"{HELD_UP}{text}\n".encode())


def main() -> None:
    """Measure, then run the command line of the server."""
    slow_callbacks.watch(report)  # before the protocols of the server are defined
    from kernel.tools.main import main as run

    run()


if __name__ == "__main__":
    main()
