"""The recording of one server: its folder, its recorder, and the writer behind it. Exists only with `--record`."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import time
from typing import TYPE_CHECKING

from kernel.errors import ServingError, Unavailable
from kernel.recording.recorder import Recorder
from kernel.recording.ring import first_position
from kernel.recording.writer import RecordWriter
from kernel.serving.front_doors.server_parts import RecordFigures, ServerPart
from kernel.tracing.tracing import TraceHelpers  # noqa: TC001 - documents what the helpers are

if TYPE_CHECKING:
    from kernel.recording.settings import RecordSettings
    from kernel.serving.kernel import Kernel

logger = logging.getLogger(__name__)

#: How long the last records may take to be written when the server stops, in seconds.
CLOSE_TIMEOUT_S = 5.0

_LOCK = "lock"


class Recording(ServerPart):
    """Records the requests of `kernel` from its start until it is closed. A part of the server."""

    def __init__(self, kernel: Kernel, helpers: TraceHelpers, settings: RecordSettings) -> None:
        """`helpers` have no other tasks; `close` closes them. Raises `ServingError` if the folder cannot be used."""
        folder = os.path.abspath(settings.folder)
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            self._lock = _locked(folder)
            position = first_position(os.listdir(folder))
        except OSError as error:
            raise Unavailable(f"--record: '{folder}' cannot be written: {error.strerror}") from None
        self._folder = folder
        self._kernel = kernel
        self._helpers = helpers
        self._writer = RecordWriter(
            helpers, folder, secrets.token_hex(8), settings, position, lambda: kernel.record_by(None)
        )
        self._recorder = Recorder(
            settings,
            self._writer,
            now_ns=time.monotonic_ns,
            memory=kernel.memory_for_helper,
        )

    async def start(self) -> None:
        """Record from now on."""
        self._kernel.record_by(self._recorder)
        logger.info("recording requests and responses in '%s'", self._folder)

    def figures(self) -> RecordFigures:
        return RecordFigures(self._writer.written_count, self._writer.lost_count)

    async def close(self) -> None:
        """Write what waits, and end the helpers."""
        self._kernel.record_by(None)
        await self._writer.close(CLOSE_TIMEOUT_S)
        await self._helpers.close()
        with contextlib.suppress(OSError):
            os.close(self._lock)


def _locked(folder: str) -> int:
    """Return a descriptor that keeps other servers from the folder while it is open. Raises `ServingError`, OSError."""
    lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        error: ServingError = Unavailable(f"--record: another server records in '{folder}'")
        raise error from None
    return lock
