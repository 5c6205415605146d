"""What has come in part of a connection: header blocks and DATA frames that go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from protocols.grpc.h2.streams import Stream


class OpenBlock(msgspec.Struct):
    """A header block that goes on in CONTINUATION frames."""

    number: int
    end_stream: bool
    octets: bytearray
    frame_count: int = 0


class DataFrame(msgspec.Struct):
    """A DATA frame whose payload is passing through."""

    #: None where nobody wants it.
    stream: Stream | None
    byte_size: int
    content_left: int
    padding_left: int
    end_stream: bool
