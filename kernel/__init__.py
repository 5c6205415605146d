"""The server's kernel: models, requests, instances and the events between them.

This module has nothing in it: a worker process can import `kernel.errors` without the server, and a program that
embeds the server can have a package of this name of its own (`naiad`).
"""
