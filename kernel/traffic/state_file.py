"""Keeps traffic rules and rollouts in a file of --state-directory, so that a restart goes on where the server was.

One thread writes; the event loop never waits for the disk. Of several documents that wait only the last is written. The
file is replaced as a whole, so that a server that is killed leaves the old one or the new one. A document that cannot
be written, because the disk is full for example, is written as soon as that is possible.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import InvalidArgument
from kernel.regular_files import read_regular
from kernel.server_parts import ServerPart

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

FILENAME = "traffic.json"

#: A file that is larger was not written by a server: 1,000 models have rules and histories of up to 256 KiB each.
_MAX_BYTE_SIZE = 1 << 30

#: How long it takes until what could not be written is tried again, in seconds.
RETRY_S = 5.0

#: How long the end of the server waits for the last write, in seconds.
_CLOSE_S = 10.0


class StateFile(ServerPart):
    """The file. Implements `kernel.traffic.control.TrafficKeeper`, and is a part of the server."""

    def __init__(self, directory: Path, retry_s: float = RETRY_S) -> None:
        """Raises `OSError` if the directory cannot be made."""
        self._retry_s = retry_s
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / FILENAME
        self._changed = threading.Condition()
        self._document: dict[str, Any] | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._write_all, name="traffic state", daemon=True)
        self._thread.start()

    def read(self) -> dict[str, Any]:
        """Return what an earlier server has kept. Blocks. Raises `InvalidArgument` for a file that it has not made."""
        try:
            text = read_regular(str(self._path), _MAX_BYTE_SIZE)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise InvalidArgument(f"'{self._path}' cannot be read: {error.strerror}") from None
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidArgument(
                f"'{self._path}' is not what the server has written: {error}. Restore it, or remove it to begin "
                "without the rules and rollouts of clients"
            ) from None

    def save(self, document: dict[str, Any]) -> None:
        """Write `document` soon, which is not changed any more."""
        with self._changed:
            self._document = document
            self._changed.notify()

    async def close(self) -> None:
        """Write what waits."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join, _CLOSE_S)

    def _write_all(self) -> None:
        failed: dict[str, Any] | None = None
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._document is not None or self._closing, None if failed is None else self._retry_s
                )
                document, self._document = failed if self._document is None else self._document, None
                closing = self._closing
            if document is None:
                return
            trouble = self._trouble_with(document)
            if trouble and failed is None:  # said once, not at each try
                logger.error(
                    "the state of traffic rules cannot be written to '%s': %s; a restart would begin with an older one",
                    self._path, trouble,
                )  # fmt: skip
            elif failed is not None and not trouble:
                logger.info("the state of traffic rules is written to '%s' again", self._path)
            failed = document if trouble and not closing else None

    def _trouble_with(self, document: dict[str, Any]) -> str:
        """Write a document; returns why that is not possible, "" if it is."""
        try:
            self._write(msgspec.json.encode(document))
        except OSError as error:
            with contextlib.suppress(OSError):  # it would take what is left of the disk
                self._path.with_suffix(".new").unlink(missing_ok=True)
            return error.strerror or str(error)
        return ""

    def _write(self, text: bytes) -> None:
        new = self._path.with_suffix(".new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(new, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
