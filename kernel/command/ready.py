"""`naiad ready`: whether a server is ready, as an exit code. For health checks of containers: images have no curl.

It starts often, beside a server that has work to do, so it imports little.
"""

from __future__ import annotations

import http.client
import ssl
import sys
import urllib.parse
from typing import TYPE_CHECKING

from kernel.command.flags.read import read_flags
from kernel.options import BadOption

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Of all that the check waits for. Docker's health checks, as ours is set, have three seconds.
DEFAULT_TIMEOUT_S = 2.0

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
    connection = (
        http.client.HTTPConnection(host, port, timeout=timeout_s)
        if parts.scheme == "http"
        else http.client.HTTPSConnection(host, port, timeout=timeout_s, context=_any_certificate())
    )
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/v2/health/ready", headers={"Connection": "close"})
        status = connection.getresponse().status
    except OSError as error:
        return f"{url}: {error.strerror or error}"
    except http.client.HTTPException:
        return f"{url} does not respond to HTTP/1.1"
    finally:
        connection.close()
    if status == 200:
        return ""
    # 400 as Triton: models of the start load still, or one of them failed.
    return "its models are not all ready" if status == 400 else f"{url} responded with {status}"


def _any_certificate() -> ssl.SSLContext:
    """Return TLS for a server whose certificate names other hosts: nothing is sent that others must not read."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
