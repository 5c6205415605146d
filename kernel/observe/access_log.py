"""The access log (--log-access): one line for every HTTP request and gRPC call.

Front doors call `log_access` when a response is complete. Without the flag they do not use this module.
"""

from __future__ import annotations

import logging

import msgspec

logger = logging.getLogger("access")


class Access(msgspec.Struct):
    """One line of the access log. A size is None if the front door does not count it."""

    #: Address and port; empty if the peer has none.
    peer: str
    #: The HTTP method, or "gRPC".
    method: str
    #: The path as the client sent it, with the query; for a gRPC call "/service/method".
    path: str
    #: The HTTP status as "200", or the gRPC status as "OK".
    status: str
    duration_ns: int
    #: Size of the request body.
    bytes_in: int | None = None
    #: Size of the response body; for HTTP including the response head.
    bytes_out: int | None = None
    #: Empty if the request has no model; likewise version and request id.
    model: str = ""
    version: str = ""
    request_id: str = ""


def log_access(access: Access) -> None:
    """Write one line to the access log."""
    duration_ms = access.duration_ns / 1e6
    words = [
        access.peer or "-",
        access.method,
        _word(access.path),
        access.status,
        f"in={_count(access.bytes_in)}",
        f"out={_count(access.bytes_out)}",
        f"ms={duration_ms:.3f}",
    ]
    if access.model:
        words.append(f"model={_word(access.model)}")
    if access.version:
        words.append(f"version={_word(access.version)}")
    if access.request_id:
        words.append(f"id={access.request_id}")  # last: it may contain spaces
    logger.info(
        "%s",
        " ".join(words),
        extra={
            "peer": access.peer,
            "method": access.method,
            "path": access.path,
            "status": access.status,
            "bytes_in": access.bytes_in,
            "bytes_out": access.bytes_out,
            "duration_ms": round(duration_ms, 3),
            "model": access.model,
            "version": access.version,
            "request_id": access.request_id,
        },
    )


def peer_text(peer: object) -> str:
    """Return the log text of a peer's address, which comes from `transport.get_extra_info("peername")`."""
    if isinstance(peer, tuple) and len(peer) >= 2:
        host = str(peer[0])
        return f"[{host}]:{peer[1]}" if ":" in host else f"{host}:{peer[1]}"
    return peer if isinstance(peer, str) else ""


def _word(text: str) -> str:
    """Return `text` without spaces, so that a name from a client cannot look like another field."""
    return text.replace(" ", "%20")


def _count(count: int | None) -> str:
    return "-" if count is None else str(count)
