"""Which pages of other origins may call the server from a browser, and the headers that say so. Pure.

Triton has no CORS. Without --http-cors-origin no header is added, and OPTIONS is refused.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kernel.options import BadOption

if TYPE_CHECKING:
    from collections.abc import Iterable

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

        `methods` are those of the path, `requested` is what `Access-Control-Request-Headers` says.
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
