"""One HTTP call on its way through a handler: what was asked, and how errors are to be told.

Triton sends errors of some phases as `text/plain`, although they are JSON all the same; clients compare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

    from kernel.router import Kernel


class Call:
    """Handlers get one and return a response. `names` are the parts of the path that the route names."""

    __slots__ = ("error_headers", "http", "kernel", "max_input_size", "names", "plain_errors")

    def __init__(
        self,
        http: web.BaseRequest,
        kernel: Kernel,
        names: dict[str, str],
        max_input_size: int,
        *,
        plain_errors: bool,
    ) -> None:
        self.http = http
        self.kernel = kernel
        self.names = names
        #: Bytes that JSON, raw input and inflated bodies may have.
        self.max_input_size = max_input_size
        #: Whether an error that is raised from now on is sent as `text/plain`.
        self.plain_errors = plain_errors
        #: Headers that an error takes with it.
        self.error_headers: dict[str, str] = {}
