"""The access log: one line for every HTTP request and gRPC call, where --log-access asks for it.

Front doors say what they know when an answer is complete. Without the flag they never get here.
"""

from __future__ import annotations

import logging

import msgspec

logger = logging.getLogger("access")


class Access(msgspec.Struct):
    """What is known of one request. None stands for a size that nobody counted."""

    #: Address and port; empty where the peer has none.
    peer: str
    #: Of HTTP, or "gRPC".
    method: str
    #: As it was sent, with the query; of a gRPC call "/service/method".
    path: str
    #: 200, or OK.
    status: str
    duration_ns: int
    #: Of the body.
    bytes_in: int | None = None
    #: Of the body; over HTTP with the head.
    bytes_out: int | None = None
    model: str = ""
    version: str = ""
    request_id: str = ""


def log_access(access: Access) -> None:
    """Write the line of `access`."""
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
    """Return a peer's address, as `transport.get_extra_info("peername")` gives it, for the log."""
    if isinstance(peer, tuple) and len(peer) >= 2:
        host = str(peer[0])
        return f"[{host}]:{peer[1]}" if ":" in host else f"{host}:{peer[1]}"
    return peer if isinstance(peer, str) else ""


def _word(text: str) -> str:
    """Return `text` without spaces: what a client has called something cannot pass for another field."""
    return text.replace(" ", "%20")


def _count(count: int | None) -> str:
    return "-" if count is None else str(count)
