"""The model of the world: models, requests, instances and the events between them.

Imports nothing, so that a worker process can import `kernel.errors` without the server.
"""

__version__ = "0.1.0"
