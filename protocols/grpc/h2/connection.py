"""The server side of one HTTP/2 connection, without its socket: the parts and how they belong together. Pure.

    bytes ──▶ ReceivingHalf ──▶ StreamFrames ───────▶ Streams: events ──▶ calls
                   │       └──▶ CompleteFrames ──────────▲                  │
                   │ acknowledgements, GOAWAY            │ DATA_SENT        │ responses
                   ▼                                     │                  ▼
    bytes ◀── WriteQueue ◀─────────────────────────── SendingHalf ◀─────────┘

Both halves share `Streams` (streams.py) and, of flow_control.py, the connection's `ReceiveWindow` and the
`PeerLimits`. What a client may send in which state is in states.py, how much of it in limits.py.

The order of use: `receiving.receive`, handle `streams.events`, respond with `sending`, `sending.pump`, write what
`sending.write_queue.take` returns, and call `sending.releases` when it has been written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.grpc.h2 import limits
from protocols.grpc.h2.flow_control import PeerLimits, ReceiveWindow
from protocols.grpc.h2.frames import H2ErrorCode
from protocols.grpc.h2.receiving import ReceivingHalf
from protocols.grpc.h2.sending import SendingHalf
from protocols.grpc.h2.streams import Streams

if TYPE_CHECKING:
    from protocols.grpc.framing import MessageMemory
    from protocols.grpc.h2.keepalive import KeepaliveRules


class H2Connection:
    """The parts of one connection."""

    def __init__(self, rules: KeepaliveRules | None = None, memory: MessageMemory | None = None) -> None:
        receive_window = ReceiveWindow(limits.CONNECTION_WINDOW_BYTE_SIZE)
        self.peer_limits = PeerLimits()
        self.streams = Streams(memory)
        self.sending = SendingHalf(self.streams, self.peer_limits, receive_window)
        self.receiving = ReceivingHalf(self.streams, self.peer_limits, receive_window, self.sending, rules)

    def check_progress(self, now_ns: int) -> None:
        """End what has waited for the client too long: handshake, header blocks, and output. Called now and then."""
        if self.sending.ended:
            return
        if self.receiving.is_too_slow(now_ns):
            self.sending.fail(H2ErrorCode.PROTOCOL_ERROR, "the client is too slow")
        else:
            self.sending.reset_stalled(now_ns)
