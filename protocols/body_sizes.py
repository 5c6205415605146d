"""Limits and thresholds for the sizes of request and response bodies, in bytes, of both protocols. Pure."""

from __future__ import annotations

#: The largest body: gRPC's limit for messages (INT32_MAX), and Triton's for HTTP, whose Content-Length is an int.
MAX_BODY_BYTE_SIZE = 2**31 - 1

#: The largest body of a request that only controls the server: all but inference, and loads, which may bring files.
MAX_CONTROL_BYTE_SIZE = 64 * 2**10

#: From this size on, a request body is received into its own memory, if possible that of its model.
RECEIVE_BUFFER_BYTE_SIZE = 64 * 2**10

#: Up to about this size a response is copied into one piece; outputs of a larger one are written from their place.
COPIED_RESPONSE_BYTE_SIZE = 64 * 2**10
