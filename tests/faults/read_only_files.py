"""A server whose file system is read-only, but for TMPDIR: `python -m tests.faults.read_only_files run FLAGS`."""

from __future__ import annotations

import os

from tests.faults.own_mounts import mount, own_mounts


def main() -> None:
    """Mount, then run the command line of the server."""
    own_mounts()
    mount("-t", "tmpfs", "-o", "size=16m", "tmpfs", os.environ["TMPDIR"])
    mount("-o", "remount,bind,ro", "/")
    from kernel.tools.main import main as run

    run()


if __name__ == "__main__":
    main()
