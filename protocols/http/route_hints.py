"""What a client probably wanted that asked for a path which this server does not have. Pure.

Newcomers send what other servers understand (`/predict`, `/v1/models/NAME:predict`) or mistype a path. The hint follows
Triton's text, so that every client shows it.
"""

from __future__ import annotations

import difflib
import heapq
import re
from typing import TYPE_CHECKING

from kernel.texts import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

#: How a hint begins, behind Triton's text.
HINT = ". Did you mean "

#: Longer paths get no hint: what is compared with all routes must be short.
_MAX_PATH_SIZE = 200

#: How many models a hint names.
_MAX_NAMES = 10

_INFER = "POST /v2/models/{model}/infer"

#: What stands for a name in the routes.
_MODEL, _VERSION = "{model}", "{version}"

#: Paths of other servers → what this one has for it. Group 1 is the model's name.
_FOREIGN = (
    (re.compile(r"/(?:v1|v2|api)/models/([^/:]+)(?:/versions/[0-9]+)?[:/]predict/?"), _INFER),
    (re.compile(r"/predictions/([^/]+)/?"), _INFER),
    (re.compile(r"/v1/models/([^/:]+)/?"), "GET /v2/models/{model}"),
    (re.compile(r"/(?:v1/|v2/|api/)?(?:predict|predictions|invocations|infer|inference|score)/?()"), _INFER),
    (re.compile(r"/(?:v1/|v2/|api/)?models/?()"), "POST /v2/repository/index, which lists the models"),
    (re.compile(r"/(?:v2/)?(?:health|healthz|ready|readyz|livez|ping|status)/?()"), "GET /v2/health/ready"),
    (re.compile(r"/(?:openapi\.json|swagger\.json|redoc)/?()"), "GET /docs, or GET /v2/openapi.json"),
    (re.compile(r"/()"), "GET /v2"),
    (re.compile(r"/metrics/?()"), "GET /metrics on the port of the metrics, 8002 unless --metrics-port names another"),
)

#: The routes, in which a typing mistake is looked for.
ROUTE_HINTS = (
    "GET /v2",
    "GET /v2/health/live",
    "GET /v2/health/ready",
    "GET /v2/models/stats",
    "GET /v2/models/{model}",
    "GET /v2/models/{model}/config",
    "GET /v2/models/{model}/ready",
    "GET /v2/models/{model}/stats",
    "GET /v2/models/{model}/versions/{version}",
    "GET /v2/models/{model}/versions/{version}/config",
    "GET /v2/models/{model}/versions/{version}/ready",
    "GET /v2/models/{model}/versions/{version}/stats",
    "POST /v2/models/{model}/infer",
    "POST /v2/models/{model}/generate",
    "POST /v2/models/{model}/generate_stream",
    "POST /v2/models/{model}/versions/{version}/infer",
    "POST /v2/models/{model}/versions/{version}/generate",
    "POST /v2/models/{model}/versions/{version}/generate_stream",
    "GET /v2/models/{model}/trace/setting",
    "POST /v2/repository/index",
    "POST /v2/repository/models/{model}/load",
    "POST /v2/repository/models/{model}/unload",
    "GET /v2/systemsharedmemory/status",
    "GET /v2/cudasharedmemory/status",
    "GET /v2/trace/setting",
    "GET /v2/logging",
)
_BY_PATH = {route.partition(" ")[2]: route for route in ROUTE_HINTS}

#: Newcomers send requests for inference to it.
_MODEL_ALONE = re.compile(r"/v2/models/[^/]+(?:/versions/[^/]+)?")

#: What people and programs send that want something; others, such as OPTIONS, ask what there is.
_METHODS = frozenset({"GET", "POST", "PUT", "DELETE"})

_NAMED_MODEL = re.compile(r"/(?:v2/)?models?/([^/]+)")
_NAMED_VERSION = re.compile(r"/versions?/([^/]+)")


def route_hint(path: str, list_models: Callable[[], Collection[str]]) -> str:
    """Return how the error goes on for a client that asked for `path`, which no route has; empty if nothing is near.

    `list_models` returns the names of models that the client may know of: none where it may not list them. It is called
    only for a hint that needs them.
    """
    if len(path) > _MAX_PATH_SIZE:
        return ""
    route, model = _meant(path)
    if not route:
        return ""
    if _MODEL not in route:
        return printable(f"{HINT}{route}?")
    models = list_models()
    known = ""
    if models and model not in models:
        shown = heapq.nsmallest(_MAX_NAMES, models)
        more = f" and {len(models) - len(shown)} more" if len(models) > len(shown) else ""
        known = f" The models are: {', '.join(shown)}{more}."
    if not model:
        model = next(iter(models)) if len(models) == 1 else "NAME"
    return printable(f"{HINT}{route.replace(_MODEL, model)}?{known}")


def method_hint(path: str, method: str, allowed: Collection[str]) -> str:
    """Return how the error goes on for a client that sent `method` to `path`, whose route takes those in `allowed`."""
    if len(path) > _MAX_PATH_SIZE or method not in _METHODS:
        return ""
    sends_to_model = method == "POST" and _MODEL_ALONE.fullmatch(path) is not None
    meant = f"POST {path}/infer" if sends_to_model else f"{next(iter(allowed))} {path}"
    return printable(f"{HINT}{meant}?")


def _end_alike(asked: str, route: str) -> bool:
    """Whether the last parts of two paths are alike: what stands before them is alike for most routes of models."""
    last, of_route = (path.rpartition("/")[2] for path in (asked, route))
    return difflib.SequenceMatcher(None, last, of_route).ratio() >= 0.6


def _meant(path: str) -> tuple[str, str]:
    """Return the route that was probably meant, with its method, and the name of the model in `path`, if any."""
    for pattern, route in _FOREIGN:
        if (match := pattern.fullmatch(path)) is not None:
            return route, match[1]
    model, version = "", ""
    asked = path.rstrip("/").lower()
    if (found := _NAMED_MODEL.search(asked)) is not None and found[1] != "stats":
        model = path[found.start(1) : found.end(1)]
        asked = asked[: found.start(1)] + _MODEL + asked[found.end(1) :]
    if (found := _NAMED_VERSION.search(asked)) is not None:
        version = found[1]
        asked = asked[: found.start(1)] + _VERSION + asked[found.end(1) :]
    near = difflib.get_close_matches(asked, _BY_PATH, n=1, cutoff=0.8)
    if not near or not _end_alike(asked, near[0]):
        return "", model
    return _BY_PATH[near[0]].replace(_VERSION, version or "1"), model
