"""What process lists show of a forked worker: the command line that it would have if it had been started by itself.

The system shows the memory that the process was started with (proc_pid_cmdline(5)). A zygote is started with a long
last argument (`ROOM`), so that there is room for the command lines of its workers.
"""

from __future__ import annotations

import ctypes

#: Fields of /proc/self/stat after the name of the program, counted from 0: where the command line begins and ends.
_ARG_START, _ARG_END = 45, 46


class ProcessTitle:
    """The command line of this process."""

    def __init__(self) -> None:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        self._start, self._end = int(fields[_ARG_START]), int(fields[_ARG_END])

    def set(self, words: list[str]) -> None:
        """Show `words`, cut to the room that there is. Does nothing if the system does not say where the room is."""
        room = self._end - self._start
        if self._start == 0 or room <= 1:
            return
        shown = b"\0".join(word.encode("utf-8", "replace") for word in words)[: room - 1]
        ctypes.memmove(self._start, shown.ljust(room, b"\0"), room)
