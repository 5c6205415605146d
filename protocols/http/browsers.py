"""What web pages may send to the server: which pages may (CORS), and which of their requests are refused. Pure.

A page can send requests to every server that its browser reaches. It may send a POST without asking (`text/plain`);
then the server sees the page's origin (CSRF). Or an attacker changes the address of the page's name to the server's,
so that the page may also read the responses; then the server sees a foreign name in `Host` (DNS rebinding).

Both attacks need a browser. So requests without any sign of a browser may use every name, unless the operator has
listed the names: clients reach the server through proxies, tunnels and services of Kubernetes, whose names it cannot
know. A name is never foreign if only the owner of the network can make it point to the server.

Triton has no CORS. Without --http-cors-origin no header is added, and OPTIONS is refused.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import BadOption
from kernel.texts import limited

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protocols.access import Header

#: An origin has no path and no slash at its end. `null` is the origin of local files and sandboxes. Browsers that are
#: parts of applications may send `file://` for local files.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,]+|file://|null|\*", re.ASCII)

#: Names of headers, as a browser lists them.
_NAMES = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+(?:[ \t]*,[ \t]*[!#$%&'*+.^_`|~0-9A-Za-z-]+)*")

#: Response headers that a page needs and may not read otherwise.
_EXPOSED = "Inference-Header-Content-Length"

#: Seconds for which a browser need not ask again.
_MAX_AGE_S = 600


class CorsPolicy:
    """The headers for pages of the origins that the operator has listed."""

    def __init__(self, origins: Iterable[str]) -> None:
        """`origins` are as browsers send them, or `*` for all. Raises `BadOption` for anything else."""
        self._origins = frozenset(origins)
        for origin in sorted(self._origins):
            if _ORIGIN.fullmatch(origin) is None:
                raise BadOption(
                    f"--http-cors-origin: '{origin}' is not an origin such as https://example.com, and not *"
                )
        self._any = "*" in self._origins

    def allows(self, origin: str) -> bool:
        """Whether pages of `origin` may call the server."""
        return self._any or origin in self._origins

    def response_headers(self, origin: str | None) -> dict[str, str]:
        """Return what every response to a request from `origin` carries; None stands for no `Origin`."""
        if self._any:
            return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": _EXPOSED}
        headers = {"Vary": "Origin"}  # a cache must not give one origin the response for another
        if origin in self._origins and origin is not None:
            headers |= {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": _EXPOSED}
        return headers

    def preflight_headers(self, origin: str, methods: Iterable[str], requested: str | None) -> dict[str, str]:
        """Return the headers for a browser that asks before it sends a request.

        `methods` are what the path has, `requested` is what `Access-Control-Request-Headers` says.
        """
        headers = self.response_headers(origin)
        if "Access-Control-Allow-Origin" not in headers:
            return headers
        del headers["Access-Control-Expose-Headers"]
        headers["Access-Control-Allow-Methods"] = ", ".join(sorted(methods))
        headers["Access-Control-Max-Age"] = str(_MAX_AGE_S)
        if requested is not None and _NAMES.fullmatch(requested):
            headers["Access-Control-Allow-Headers"] = requested
            headers["Vary"] = ", ".join((*headers.get("Vary", "").split(), "Access-Control-Request-Headers"))
        return headers


#: Methods that change nothing here.
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

#: What `Sec-Fetch-Site` says of a page that the server itself has sent, and of a user who has typed the address. No
#: page can set the header. Browsers send it only to `localhost` and over TLS, with a certificate for the name: so it
#: also rules out DNS rebinding.
_OWN_PAGE = frozenset({"same-origin", "none"})

#: Names below these cannot be registered, so that an attacker on the Internet can let none of them mean this server
#: (RFC 6761, 6762, 8375; ICANN's resolution on `.internal`). The services of Kubernetes are below `local`.
_PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa", ".test")

_NAME = re.compile(r"(?:\*\.)?[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?", re.ASCII)

_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::[0-9]*)?", re.ASCII)

_MAX_SHOWN = 256


class HostNames(msgspec.Struct, frozen=True):
    """The names by which clients may reach the server, in lower case. IP addresses are none."""

    #: Those of the machine.
    own: frozenset[str] = frozenset()
    #: Those of --http-allowed-hosts, some with `*.` before them; None without the flag.
    listed: frozenset[str] | None = None
    #: Whether only programs on this machine reach the server.
    loopback_only: bool = False

    def has(self, name: str) -> bool:
        """Whether `name` is an IP address, or one of the names; without the flag also one that nobody can register.

        The name of a page that was loaded from an IP address is that address, whatever names mean it.
        """
        if self.listed is None:
            return "." not in name or name in self.own or name.endswith(_PRIVATE_SUFFIXES) or _is_address(name)
        always = name in ("", "localhost") or name.endswith(".localhost") or _is_address(name)
        return always or bool(self.listed & {"*", name, *_parents(name)})


class BrowserRules(msgspec.Struct, frozen=True):
    """The rules of one HTTP port."""

    names: HostNames = HostNames()
    #: None where pages of other origins may not call the server.
    cors: CorsPolicy | None = None

    def refusal(self, method: str, header: Header) -> str | None:
        """Return the error for a request that a page must not send, None for one that is admitted."""
        host = _text(header("Host")).lower()
        if self.names.listed is not None and not self.names.has(host_name(host)):
            return (
                f"'{_shown(host)}' is not among the names of this server: start it with "
                f"--http-allowed-hosts={_shown(host_name(host))} if it is one of them"
            )
        origin, site = _text(header("Origin")), _text(header("Sec-Fetch-Site"))
        from_page = bool(origin or site)
        if site in _OWN_PAGE or (origin and self.cors is not None and self.cors.allows(origin)):
            return None
        if from_page and method not in _SAFE_METHODS and (site or origin.partition("://")[2].lower() != host):
            return (
                f"this request comes from a web page of another origin, '{_shown(origin) or site}': start the server "
                f"with --http-cors-origin={_shown(origin) or 'ORIGIN'} if its pages may call it"
            )
        if self._may_rebind(method, header, from_page=from_page) and not self.names.has(host_name(host)):
            return (
                f"this request comes from a browser, and '{_shown(host)}' may be the name of an attacker's page (DNS "
                f"rebinding): start the server with --http-allowed-hosts={_shown(host_name(host))} if it is a name of "
                "this server"
            )
        return None

    def _may_rebind(self, method: str, header: Header, *, from_page: bool) -> bool:
        """Whether a request, if its name is foreign, may be one of a page whose name is rebound to this server.

        A request that only reads carries no origin then. On a port that other machines reach it is admitted: it reveals
        only what is open to others anyway, and can hardly be distinguished from a program behind a proxy. On a port for
        this machine only, it is refused if it has headers that browsers always send and most programs do not.
        """
        if method not in _SAFE_METHODS and from_page:
            return True
        return self.names.loopback_only and (from_page or header("Accept-Language") is not None)


def host_name(host: str) -> str:
    """Return the name or address in the value of a `Host` header, without the port, in lower case."""
    found = _HOST.fullmatch(host)
    name = host if found is None else found[1]
    return name.lower().removesuffix(".")


def parse_host_names(texts: Iterable[str]) -> frozenset[str] | None:
    """Return the names in the values of --http-allowed-hosts, None for no value. Raises `BadOption`."""
    names = [name.strip().lower().removesuffix(".") for text in texts for name in text.split(",")]
    for name in names:
        if name != "*" and not _is_address(name) and _NAME.fullmatch(name) is None:
            raise BadOption(
                f"--http-allowed-hosts: '{name}' is not a name such as models.example.com or *.example.com, without "
                "port, and not *"
            )
    return frozenset(names) or None


def _parents(name: str) -> Iterable[str]:
    """Yield `*.example.com` and `*.com` for `a.example.com`."""
    while "." in name:
        name = name.partition(".")[2]
        yield f"*.{name}"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]").partition("%")[0])
    except ValueError:
        return False
    return True


def _shown(text: str) -> str:
    return limited(text, _MAX_SHOWN)


def _text(value: str | bytes | None) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value or ""
