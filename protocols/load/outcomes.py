"""What a piece of received bytes means for the request that is in flight on a connection of `naiad bench`. Pure."""

from __future__ import annotations

#: The response is not complete yet.
INCOMPLETE = 0
#: The last response has arrived, and it is a success.
DONE = 1
#: The request has failed; `error` of the connection's state says why.
FAILED = 2

#: The most bytes of an error that are kept.
MAX_ERROR_BYTE_SIZE = 2048
