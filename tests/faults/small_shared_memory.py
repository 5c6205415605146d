"""A server with a /dev/shm of its own, of 4 MiB: `python -m tests.faults.small_shared_memory run FLAGS`.

Others reach the folder at `/proc/PID/root/dev/shm`.
"""

from __future__ import annotations

from tests.faults.own_mounts import mount, own_mounts

BYTE_SIZE = 4 << 20


def main() -> None:
    """Mount, then run the command line of the server."""
    own_mounts()
    mount("-t", "tmpfs", "-o", f"size={BYTE_SIZE}", "tmpfs", "/dev/shm")
    from kernel.tools.main import main as run

    run()


if __name__ == "__main__":
    main()
