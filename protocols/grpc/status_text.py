"""Texts that are sent over gRPC: always encodable, and short enough for a trailer."""

from __future__ import annotations

from protocols.grpc.grpclib_internals import encode_grpc_message

#: gRPC clients refuse trailers that are larger than 8 KiB, and then show no part of the text.
MAX_STATUS_BYTE_SIZE = 7 * 1024


def clean(text: str) -> str:
    """Return `text` with `?` for what UTF-8 cannot encode, such as bytes of a file name that is not UTF-8."""
    return text.encode(errors="replace").decode()


def status_text(text: str) -> str:
    """Return `text` for a status, cut to a length at which its encoded form is not too large."""
    text = clean(text[:MAX_STATUS_BYTE_SIZE])  # a character is at least one byte
    while (excess := len(encode_grpc_message(text)) - MAX_STATUS_BYTE_SIZE) > 0:
        # A character becomes up to 12 bytes ("%F0%9F%98%80"): cutting this many never cuts too much.
        text = text[: -max(1, excess // 12)]
    return text
