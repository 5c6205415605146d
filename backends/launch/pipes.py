"""The pipes of what a process prints. They exist before the process is started, and need no event loop."""

from __future__ import annotations

import os


class OutputPipes:
    """Two pipes, for standard output and standard error. The owner closes both ends."""

    def __init__(self) -> None:
        """Raises `OSError`; then nothing is open."""
        #: Our ends, and the ends of the process.
        self.stdout, self.stdout_fd = os.pipe2(os.O_CLOEXEC)
        try:
            self.stderr, self.stderr_fd = os.pipe2(os.O_CLOEXEC)
        except OSError:
            os.close(self.stdout)
            os.close(self.stdout_fd)
            raise

    def close_child_ends(self) -> None:
        """Close our copies of the ends that the process has inherited."""
        os.close(self.stdout_fd)
        os.close(self.stderr_fd)

    def close_own_ends(self) -> None:
        """Close the ends that would be read."""
        os.close(self.stdout)
        os.close(self.stderr)
