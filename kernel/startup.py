"""The start of a server, as far as its operator sees it: sockets that are bound, then models that are loaded.

Sockets of the front doors are bound first, so that a port in use is an error right at the start. While the models load,
the front doors listen, so that probes can tell a server that loads from one that hangs. Progress and results are
reported to the server's operator.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from typing import TYPE_CHECKING, Protocol

import anyio

from kernel.errors import ServingError
from kernel.repository.held_folders import remove_abandoned_folders

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.operator import ServerOperator
    from kernel.options import ListenAddress, RepositoryOptions
    from kernel.repository.lifecycle import Lifecycle
    from kernel.serving.kernel import Kernel


class CannotListen(Exception):
    """The server cannot listen on an address. The message is one line."""


def bind(title: str, listener: ListenAddress) -> socket.socket:
    """Return a bound socket that does not listen yet; the caller closes it. Raises `CannotListen`.

    `title` names the front door in messages and, in lower case, in its flags.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            listener.address, listener.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a name"
        raise CannotListen(
            f"failed to start {title} service: Unavailable - address '{listener.address}': {reason}. "
            f"Choose another one with --{title.lower()}-address"
        ) from None
    sock = socket.socket(family, kind, protocol)
    sock.setblocking(False)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        reason = "already in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise CannotListen(
            f"failed to start {title} service: Unavailable - Socket '{listener.address}:{listener.port}' {reason}. "
            f"Choose another port with --{title.lower()}-port"
        ) from None
    return sock


logger = logging.getLogger(__name__)

#: The time between two reports of how many models are loaded.
_LOADING_SHOWN_S = 0.25


class ListeningDoor(Protocol):
    """What the start needs of a front door (`protocols.frontend.FrontDoor`)."""

    @property
    def title(self) -> str:
        """Name and address."""

    async def start(self) -> None:
        """Listen."""


async def listen(doors: Sequence[ListeningDoor], *, loading: bool) -> None:
    """Let the front doors listen, all of them also if the caller is cancelled; `loading` is for the log.

    Raises `CannotListen`; then some of them may listen.
    """
    with anyio.CancelScope(shield=True):
        for door in doors:
            try:
                await door.start()
            except OSError as error:  # another server has taken the port since ours was bound to it
                raise CannotListen(f"failed to start {door.title}: {error.strerror or error}") from None
    if loading and doors:
        titles = ", ".join(door.title for door in doors)
        logger.info("the server listens, and is not ready until the models are loaded: %s", titles)


async def show_loading(lifecycle: Lifecycle, operator: ServerOperator) -> None:
    """Report the progress of loading to the operator, until cancelled."""
    while True:
        await asyncio.sleep(_LOADING_SHOWN_S)
        if (step := lifecycle.loading) is not None:
            operator.models_loading(step)


async def load_first_models(
    kernel: Kernel, lifecycle: Lifecycle, operator: ServerOperator, options: RepositoryOptions
) -> str:
    """Load the models and report the results. Returns why the server cannot start; "" if it can.

    From then on the server may be ready.
    """
    for folder in await asyncio.to_thread(remove_abandoned_folders):
        logger.info("folder '%s' was removed: a server that was killed had left it", folder)
    try:
        failed = await lifecycle.start(options.load_models)
    except ServingError as error:
        failure = creating_server(error)
        if options.exit_on_error:
            return failure
        logger.error("%s", failure)
        kernel.start_failed = True
        kernel.starting = False
        return ""
    operator.models_loaded(kernel.catalog)
    if failed and options.exit_on_error:
        logger.info("Waiting for in-flight requests to complete.")  # as at the end of a server that has started
        return (
            f"creating server: Internal - failed to load all models: {', '.join(failed)} "
            f"({operator.advice(kernel.catalog, failed)})"
        )
    kernel.starting = False
    return ""


def creating_server(error: ServingError) -> str:
    """Return tritonserver's text for an error at start."""
    return f"creating server: {error.code.title} - {error.message}"
