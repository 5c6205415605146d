"""The log line at start that says who may administer the server, and which flag changes that. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from protocols.access.restricted import ADMIN_HEADER, Category
from protocols.listening import is_local, listening_address

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable, Sequence

    from kernel.options import TlsOptions
    from protocols.access.restricted import Restrictions


class OpenPort(msgspec.Struct, frozen=True):
    """A port on which clients may administer the server."""

    #: Such as `HTTP at 0.0.0.0:8000`.
    title: str
    restrictions: Restrictions
    #: Whether only programs on this machine reach it.
    loopback_only: bool = False
    #: Whether only clients with a certificate reach it.
    wants_certificates: bool = False
    #: What can be done over it; None for everything.
    categories: frozenset[Category] | None = None

    def admits(self, category: Category) -> bool:
        """Whether requests of `category` can be sent over the port, and are not restricted."""
        return (self.categories is None or category in self.categories) and self.restrictions.of(category) is None

    @property
    def in_network(self) -> bool:
        """Whether everyone in the network reaches it."""
        return not (self.loopback_only or self.wants_certificates)


def open_port(name: str, sock: socket.socket, tls: TlsOptions | None, restrictions: Restrictions) -> OpenPort:
    """Return the port of a front door called `name`, which listens on the bound `sock`."""
    title = f"{name} at {listening_address(sock)}"
    return OpenPort(title, restrictions, is_local(sock.getsockname()), tls is not None and tls.mutual)


class Exposure(msgspec.Struct, frozen=True):
    """The line for the log. It is a warning if everyone in the network may administer the server."""

    text: str
    is_warning: bool = False


def describe_exposure(ports: Sequence[OpenPort], *, explicit: bool, client_shm: str) -> Exposure:
    """Return the line of the start. `explicit` is the model control mode, `client_shm` --allow-client-shm."""
    actions = dict(_actions(explicit=explicit, client_shm=client_shm))
    listed = _join(list(actions.values()), "and")
    admin = next((port.restrictions.admin for port in ports), None)
    if admin is not None and admin.local_message:
        return Exposure(f"only clients on this machine may {listed} (--admin-access=local)")
    if admin is not None and admin.key is not None:
        return Exposure(f"only clients with the key in the header '{ADMIN_HEADER}' may {listed} (--admin-access=key)")
    network = _clauses("every client in the network", actions, [port for port in ports if port.in_network])
    if network:
        closing = "start the server with --admin-access=local or --admin-access=key to close this"
        return Exposure(f"{network}: {closing}", is_warning=True)
    if client_shm == "local":  # those who reach a port of this machine alone may do it there
        actions[Category.SHARED_MEMORY] = _REGISTER
    others = _clauses(_few_clients(ports), actions, ports)
    if not others:
        return Exposure(f"nobody may {listed} without the key of a restriction")
    return Exposure(f"{others}: start the server with --admin-access=key to close this")


_REGISTER = "register shared memory"


def _few_clients(ports: Sequence[OpenPort]) -> str:
    """Return who can reach ports that are not open to everyone in the network."""
    found = ["on this machine"] if any(port.loopback_only for port in ports) else []
    found += ["with a certificate"] if any(port.wants_certificates for port in ports) else []
    return f"clients {' or '.join(found or ['on this machine'])}"  # who may register memory in any case


def _actions(*, explicit: bool, client_shm: str) -> Iterable[tuple[Category, str]]:
    """Yield what a client in the network may do unless it is restricted, with its category."""
    if explicit:
        yield Category.MODEL_REPOSITORY, "load and unload models, which run code"
    if client_shm == "true":
        yield Category.SHARED_MEMORY, _REGISTER
    yield Category.LOGGING, "change settings of the log"
    yield Category.TRACE, "change settings of traces"


def _clauses(who: str, actions: dict[Category, str], ports: Sequence[OpenPort]) -> str:
    """Return who may do what, with one clause for each set of ports; empty if nothing is open."""
    by_ports: dict[tuple[str, ...], list[str]] = {}
    for category, action in actions.items():
        titles = tuple(port.title for port in ports if port.admits(category))
        if titles:
            by_ports.setdefault(titles, []).append(action)
    return "; ".join(f"{who} may {_join(done, 'and')} ({', '.join(titles)})" for titles, done in by_ports.items())


def _join(parts: list[str], word: str) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {word} {parts[-1]}"
