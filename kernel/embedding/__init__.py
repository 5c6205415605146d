"""A server inside a Python program. `EmbeddedServer` is the public class, see `kernel.embedding.server`."""

from kernel.embedding.server import BadOption, EmbeddedServer, NotRunning, ServingError, StartFailed

__all__ = ["BadOption", "EmbeddedServer", "NotRunning", "ServingError", "StartFailed"]
