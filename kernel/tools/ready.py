"""`naiad ready`: whether a server is ready, as an exit code. For health checks of containers: images have no curl.

It starts often, beside a server that has work to do, so it imports little.
"""

from __future__ import annotations

import http.client
import ssl
import sys
import urllib.parse
from typing import TYPE_CHECKING

from kernel.errors import BadOption
from kernel.flags.read import read_flags

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Of all that the check waits for. Docker's health checks, as ours is set, have three seconds.
DEFAULT_TIMEOUT_S = 2.0

#: The most models that are named: the output of a health check is kept in a log.
_MOST_SHOWN = 5

#: Addresses of a listener at which this machine reaches it by another one.
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def print_ready(url: str, timeout_s: float, environment: Mapping[str, str]) -> int:
    """Ask the server at `url`; "" for `NAIAD_URL`, or else for the server that `environment` has the flags of.

    Returns the exit code, 0 if the server is ready. Raises `BadOption`.
    """
    url = url or environment.get("NAIAD_URL", "") or own_url(environment)
    problem = find_problem(url, timeout_s)
    if problem:
        print(f"not ready: {problem}", file=sys.stderr)
        return 1
    print("ready")
    return 0


def own_url(environment: Mapping[str, str]) -> str:
    """Return the URL of the HTTP port of the server that has its flags in `environment`, as in a container.

    Raises `BadOption` for wrong flags, and where the server has no HTTP port.
    """
    options, _ = read_flags([], environment, variables=True)
    listener = options.http_listener
    if not listener.allow:
        raise BadOption("the server has no HTTP port (NAIAD_ALLOW_HTTP): ask its gRPC port with grpc.health.v1")
    address = _ANY_ADDRESS.get(listener.address, listener.address)
    host = f"[{address}]" if ":" in address else address
    return f"{'http' if options.http.tls is None else 'https'}://{host}:{listener.port}"


def find_problem(url: str, timeout_s: float) -> str:
    """Return why the server at `url` (a URL, or HOST:PORT) is not ready; "" if it is. Raises `BadOption`."""
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    try:
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise BadOption(f"'{url}' is not an address of a server: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise BadOption(f"'{url}' is not an address of a server: give HOST:PORT, or a URL with http:// or https://")

    def ask(method: str, path: str) -> tuple[int, bytes]:
        connection = (
            http.client.HTTPConnection(host, port, timeout=timeout_s)
            if parts.scheme == "http"
            else http.client.HTTPSConnection(host, port, timeout=timeout_s, context=_any_certificate())
        )
        try:
            connection.request(method, f"{parts.path.rstrip('/')}{path}", headers={"Connection": "close"})
            response = connection.getresponse()
            return response.status, response.read() if method == "POST" else b""
        finally:
            connection.close()

    try:
        status, _ = ask("GET", "/v2/health/ready")
    except OSError as error:
        return f"{url}: {error.strerror or error}"
    except http.client.HTTPException:
        return f"{url} does not respond to HTTP/1.1"
    if status == 200:
        return ""
    if status != 400:
        return f"{url} responded with {status}"
    # As Triton: models of the start load still, or one of them failed.
    try:
        _, index = ask("POST", "/v2/repository/index")
    except (OSError, http.client.HTTPException):
        index = b""
    return f"its models are not all ready{missing(index)}"


def missing(index: bytes) -> str:
    """Return the models that are not ready, by the repository index of a server; "" if it does not say."""
    import json  # imported late: a server that is ready needs it not

    try:
        items = [item for item in json.loads(index) if item.get("state", "READY") != "READY"]
        shown = [
            f"{item['name']} {item['state']}{': ' * bool(item.get('reason'))}{item.get('reason', '')}" for item in items
        ]
    except (ValueError, TypeError, AttributeError, KeyError):  # the index is restricted, or it is another server
        return ""
    more = len(shown) - _MOST_SHOWN
    text = "".join(f"\n  {line.splitlines()[0]}" for line in shown[:_MOST_SHOWN])
    return f"{text}\n  and {more} more" if more > 0 else text


def _any_certificate() -> ssl.SSLContext:
    """Return TLS for a server whose certificate names other hosts: nothing is sent that others must not read."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
