"""Messages of a call that are not bytes ready to be parsed. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kernel.errors import ServingError
    from shm.tensor import Buffer


class CompressedMessage(msgspec.Struct, frozen=True):
    """A message that becomes too large to be inflated on the event loop."""

    content: Buffer
    #: As in `grpc-encoding`.
    encoding: str


class RefusedMessage(msgspec.Struct, frozen=True):
    """A message that was read and forgotten, because there is no memory or no model for it."""

    error: ServingError
    #: Its first bytes.
    start: bytes


#: The types of messages that are bytes.
BYTES_TYPES = (bytes, bytearray, memoryview)

#: What `MessageReader.messages` has: usually bytes.
if TYPE_CHECKING:
    ReceivedMessage = Buffer | CompressedMessage | RefusedMessage
