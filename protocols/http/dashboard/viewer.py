"""What one viewer of the page may see and do: the same that the API would allow to this client. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from protocols.access import Category

if TYPE_CHECKING:
    from protocols.access import Header, Restriction
    from protocols.http.request_rules import RequestRules


class Permission(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether the client may do one thing."""

    allowed: bool
    #: Why not, as the API would say it.
    reason: str = ""


class Viewer(msgspec.Struct, frozen=True):
    """One client that looks at the page."""

    permissions: dict[str, Permission]
    #: Headers with which the client might do more.
    headers: tuple[str, ...]

    def may(self, what: str) -> bool:
        return self.permissions[what].allowed


#: What the page does: its method, its category, and whether it administers the server.
ACTIONS = {
    "infer": ("POST", Category.INFERENCE, False),
    "metadata": ("GET", Category.METADATA, False),
    "traffic": ("GET", Category.MODEL_REPOSITORY, False),
    "index": ("POST", Category.MODEL_REPOSITORY, False),
    "load": ("POST", Category.MODEL_REPOSITORY, True),
    "regions": ("GET", Category.SHARED_MEMORY, False),
    "log_settings": ("POST", Category.LOGGING, True),
    "trace_settings": ("POST", Category.TRACE, True),
    # No call of the API returns lines of the log. Clients that may change log settings may read them.
    "log": ("POST", Category.LOGGING, True),
}

_NOT_EXPLICIT = "models are loaded and unloaded on request with --model-control-mode=explicit only"
_OWNED = "regions are shown to the clients that have registered them only (--shared-memory-owner=peer)"


def find_viewer(
    rules: RequestRules, header: Header, peer: object, *, explicit_control: bool, owned_regions: bool
) -> Viewer:
    """Return what the client may do whose request for the page has these headers and comes from `peer`."""
    permissions: dict[str, Permission] = {}
    headers: dict[str, None] = {}
    for action, (method, category, administers) in ACTIONS.items():
        refusal = rules.refusal(method, category, _as_sent_by_page(header), peer, administers=administers)
        permissions[action] = Permission(refusal is None, refusal or "")
        keys: list[Restriction | None] = [rules.restrictions.of(category)]
        if administers:
            keys.append(rules.restrictions.admin.key)
        for key in keys:
            if key is not None and not key.admits(header(key.header)):
                headers[key.header] = None
    if permissions["load"].allowed and not explicit_control:
        permissions["load"] = Permission(False, _NOT_EXPLICIT)
    if permissions["regions"].allowed and owned_regions:
        permissions["regions"] = Permission(False, _OWNED)
    return Viewer(permissions, tuple(headers))


def _as_sent_by_page(header: Header) -> Header:
    """Return the headers that a request of the page to its server would have: browsers add an origin to a POST."""

    def found(name: str) -> str | bytes | None:
        value = header(name)
        if value is None and name.lower() == "origin":
            host = header("Host")
            return None if host is None else f"http://{host.decode('latin-1') if isinstance(host, bytes) else host}"
        return value

    return found
