"""A server within a Python program. `EmbeddedServer` is the public entry, see `kernel.embedding.server`."""

from kernel.embedding.server import BadOption, EmbeddedServer, NotRunning, ServingError, StartFailed

__all__ = ["BadOption", "EmbeddedServer", "NotRunning", "ServingError", "StartFailed"]
