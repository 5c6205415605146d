"""How many calls of Python functions a request may take."""

from __future__ import annotations

#: The most calls with CPython 3.11 (later versions call no function for a comprehension): as many as there are now,
#: over HTTP for a request that arrives in one piece, over gRPC for the frames that gRPC core sends. A function that is
#: added to the path of every request needs a good reason. `shared` is a request over HTTP with tensors in two regions
#: of the client, to a model with dynamic batching.
MOST_CALLS = {"http": 24, "grpc": 33, "shared": 53}

#: The deepest stack when the message is given to the worker's channel; the callback of the connection is the first.
#: A change that shortens the path lowers the limit.
MOST_DEPTH = {"http": 9, "grpc": 10, "shared": 10}
