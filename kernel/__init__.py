"""The server's kernel: models, requests, instances and the events between them.

This module imports nothing, so that a worker process can import `kernel.errors` without the server.
"""

__version__ = "0.1.0"
