"""Servers in a thread of the tests, and the responses of requests that a test gives to their kernel."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Any

from kernel.embedding.server import ServerThread
from kernel.flags.read import read_keywords

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kernel.serving.response import Response


@contextlib.contextmanager
def server_thread(repository: Path, **flags: Any) -> Iterator[ServerThread]:
    """Serve a repository in this process while the `with` block lasts."""
    options, _ = read_keywords({"model_repository": str(repository), **flags}, os.environ)
    thread = ServerThread(options)
    thread.start()
    try:
        yield thread
    finally:
        thread.stop()


class FutureSink:
    """Waits for the only response of a request, on the event loop of the kernel."""

    peer = ""

    def __init__(self) -> None:
        self.response: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

    def header(self, name: str) -> str:
        return ""

    def send(self, response: Response) -> None:
        self.response.set_result(response)
