"""Imports aiohttp without loading the certificates of authorities, which only its client needs.

aiohttp makes two TLS contexts for its client when it is imported. The certificates that they load take 2.3 MiB and
30 ms, and this server is no client. The contexts load certificates when they are first used instead, so that a client
in the same process (in a program that embeds the server) notices nothing.

`kernel/app.py` imports this module first. Helpers use modules of this folder and no aiohttp.
"""

from __future__ import annotations

import importlib
import ssl
import sys
from typing import Any


class LateContext(ssl.SSLContext):
    """A TLS context that loads the certificates of authorities when it is first used."""

    def _load(self) -> None:
        self.__class__ = ssl.SSLContext  # type: ignore[assignment] # from now on it is like any other
        self.set_default_verify_paths()

    def wrap_socket(self, *args: Any, **options: Any) -> ssl.SSLSocket:
        self._load()
        return self.wrap_socket(*args, **options)

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        self._load()
        return self.wrap_bio(*args, **options)

    def get_ca_certs(self, *args: Any, **options: Any) -> Any:
        self._load()
        return self.get_ca_certs(*args, **options)

    def cert_store_stats(self) -> dict[str, int]:
        self._load()
        return self.cert_store_stats()


def import_lightly(name: str) -> None:
    """Import a module, unless it is imported. The TLS contexts that it makes meanwhile become `LateContext`.

    Those that another thread makes at the same time do, too, which changes nothing for it.
    """
    if name in sys.modules:
        return
    late: list[ssl.SSLContext] = []

    def remember(self: ssl.SSLContext) -> None:
        late.append(self)

    ssl.SSLContext.set_default_verify_paths = remember  # type: ignore[method-assign]
    try:
        importlib.import_module(name)
    finally:
        del ssl.SSLContext.set_default_verify_paths
        for context in late:
            context.__class__ = LateContext


import_lightly("aiohttp")
