"""`python -m naiad` is the command line, `naiad`."""

from __future__ import annotations

import naiad.packages


def main() -> None:
    """Run a command, see `kernel.tools.main`."""
    naiad.packages.share_names()
    from kernel.tools.main import main as run_command

    run_command()


if __name__ == "__main__":
    main()
