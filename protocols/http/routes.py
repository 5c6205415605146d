"""Which handler is for which method and path, and in which restricted category. Paths are never decoded.

The patterns are Triton's: `%2f` in a model's name stays what it is, and no name can contain a slash.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import msgspec

from protocols.access import Category
from protocols.http import web
from protocols.http.call import HttpCall
from protocols.http.endpoints import (
    dashboard,
    docs,
    generate,
    infer,
    models,
    repository,
    settings,
    shared_memory,
    traffic,
)

Handler = Callable[[HttpCall], Awaitable[web.StreamResponse]]


class Endpoint(msgspec.Struct, frozen=True):
    """The handlers of a path by method. `plain_errors`: errors start as `text/plain`."""

    #: Required: an endpoint without a category could not be restricted.
    category: Category
    handlers: dict[str, Handler]
    plain_errors: bool = False
    #: Whether its POST is for those who administer the server alone (--admin-access).
    administers: bool = False
    #: Whether that is so for its GET too: it shows what clients have sent.
    reveals: bool = False
    #: Whether it is there only with --http-dashboard.
    dashboard: bool = False


_TRACE_SETTING = Endpoint(Category.TRACE, {"GET": settings.get_trace, "POST": settings.update_trace}, administers=True)

LITERAL_ENDPOINTS = {
    "/v2": Endpoint(Category.METADATA, {"GET": models.server_metadata}),
    "/v2/openapi.json": Endpoint(Category.METADATA, {"GET": models.openapi}),
    "/v2/health/live": Endpoint(Category.HEALTH, {"GET": models.live}, plain_errors=True),
    "/v2/health/ready": Endpoint(Category.HEALTH, {"GET": models.ready}, plain_errors=True),
    "/v2/models/stats": Endpoint(Category.STATISTICS, {"GET": models.statistics}),
    "/v2/trace/setting": _TRACE_SETTING,
    "/v2/logging": Endpoint(Category.LOGGING, {"GET": settings.get_log, "POST": settings.update_log}, administers=True),
}

_ENDPOINTS = r"(?:/(?P<endpoint>infer|generate|generate_stream|ready|config|stats|trace/setting|poison/clear"
_MODEL = re.compile(
    r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[0-9]+))?"
    + _ENDPOINTS
    + r"|traffic|traffic/reset|traffic/shadow/worst|feedback"
    r"|rollout|rollout/(?:pause|resume|promote|abort)))?"
)
#: A label in place of the number of a version: Triton has no such path, so it exists only for labels that a model has.
_LABELLED = re.compile(
    r"/v2/models/(?P<model>[^/]+)/versions/(?P<version>[A-Za-z_][A-Za-z0-9_.-]{0,63})" + _ENDPOINTS + "))?"
)
#: What belongs to a model and not to a version.
_WITHOUT_VERSION = frozenset(
    {
        "trace/setting",
        "traffic",
        "traffic/reset",
        "traffic/shadow/worst",
        "feedback",
        "rollout",
        *(f"rollout/{action}" for action in traffic.ACTIONS),
    }
)
MODEL_ENDPOINTS = {
    "": Endpoint(Category.METADATA, {"GET": models.metadata}),
    "infer": Endpoint(Category.INFERENCE, {"POST": infer.infer}, plain_errors=True),
    "generate": Endpoint(Category.INFERENCE, {"POST": generate.generate}),
    "generate_stream": Endpoint(Category.INFERENCE, {"POST": generate.generate_stream}),
    "ready": Endpoint(Category.HEALTH, {"GET": models.model_ready}, plain_errors=True),
    "config": Endpoint(Category.MODEL_CONFIG, {"GET": models.config}),
    "stats": Endpoint(Category.STATISTICS, {"GET": models.statistics}),
    "trace/setting": _TRACE_SETTING,
    "traffic": Endpoint(Category.MODEL_REPOSITORY, {"GET": traffic.report, "POST": traffic.change}, administers=True),
    "traffic/shadow/worst": Endpoint(
        Category.MODEL_REPOSITORY, {"GET": traffic.worst_pairs}, administers=True, reveals=True
    ),
    "feedback": Endpoint(Category.INFERENCE, {"POST": traffic.feedback}),
    "traffic/reset": Endpoint(Category.MODEL_REPOSITORY, {"POST": traffic.reset}, administers=True),
    "rollout": Endpoint(
        Category.MODEL_REPOSITORY, {"GET": traffic.rollout_status, "POST": traffic.start_rollout}, administers=True
    ),
    **{
        f"rollout/{action}": Endpoint(Category.MODEL_REPOSITORY, {"POST": traffic.command_rollout}, administers=True)
        for action in traffic.ACTIONS
    },
    "poison/clear": Endpoint(Category.MODEL_REPOSITORY, {"POST": models.clear_poison}, administers=True),
}

_REPOSITORY = re.compile(
    r"/v2/repository(?:/(?P<repository>[^/]+))?/(?P<endpoint>index|models/(?P<model>[^/]+)/(?:load|unload))"
)
REPOSITORY_ENDPOINTS = {
    "index": Endpoint(Category.MODEL_REPOSITORY, {"POST": repository.index}),
    "load": Endpoint(Category.MODEL_REPOSITORY, {"POST": repository.load}, administers=True),
    "unload": Endpoint(Category.MODEL_REPOSITORY, {"POST": repository.unload}, administers=True),
}

_SHARED_MEMORY = re.compile(
    r"/v2/(?P<endpoint>(?:system|cuda)sharedmemory(?:/region/(?P<region>[^/]+))?/(?:status|register|unregister))"
)
SHARED_MEMORY_ENDPOINTS = {
    "system/status": Endpoint(Category.SHARED_MEMORY, {"GET": shared_memory.system_status}),
    "system/register": Endpoint(Category.SHARED_MEMORY, {"POST": shared_memory.system_register}, administers=True),
    "system/unregister": Endpoint(Category.SHARED_MEMORY, {"POST": shared_memory.system_unregister}, administers=True),
    "cuda/status": Endpoint(Category.SHARED_MEMORY, {"GET": shared_memory.cuda_status}),
    "cuda/register": Endpoint(Category.SHARED_MEMORY, {"POST": shared_memory.cuda_register}, administers=True),
    "cuda/unregister": Endpoint(Category.SHARED_MEMORY, {"POST": shared_memory.cuda_unregister}, administers=True),
}

#: Web pages. They are not part of the OpenAPI document.
_PAGES = {docs.PAGE_PATH: Endpoint(Category.METADATA, {"GET": docs.page})} | dict.fromkeys(
    (f"{docs.PAGE_PATH}/{name}" for name in (*docs.FILES, docs.SCRIPT)),
    Endpoint(Category.METADATA, {"GET": docs.file}),
)

_DASHBOARD_PAGE = Endpoint(Category.STATISTICS, {"GET": dashboard.page}, dashboard=True)
_DASHBOARD_FILE = Endpoint(Category.STATISTICS, {"GET": dashboard.file}, dashboard=True)
_PAGES |= dict.fromkeys(dashboard.PAGE_PATHS, _DASHBOARD_PAGE) | {
    dashboard.EVENTS_PATH: Endpoint(Category.STATISTICS, {"GET": dashboard.events}, dashboard=True)
}


def find_endpoint(
    path: str, is_label: Callable[[str, str], bool] | None = None
) -> tuple[Endpoint, dict[str, str]] | None:
    """Return the endpoint of `path`, and the names in it, empty if the path leaves one out.

    `is_label` says whether a model has a label, which can stand in place of the number of a version; None: none has.
    """
    endpoint = LITERAL_ENDPOINTS.get(path)
    if endpoint is not None:
        return endpoint, {}
    if (match := _MODEL.fullmatch(path)) is not None:
        names = match.groupdict("")
        if names["version"] and names["endpoint"] in _WITHOUT_VERSION:
            return None
        return MODEL_ENDPOINTS[names["endpoint"]], names
    if is_label is not None and (match := _LABELLED.fullmatch(path)) is not None:
        names = match.groupdict("")
        if names["endpoint"] not in _WITHOUT_VERSION and is_label(names["model"], names["version"]):
            return MODEL_ENDPOINTS[names["endpoint"]], names
        return None
    if (match := _REPOSITORY.fullmatch(path)) is not None:
        names = match.groupdict("")
        return REPOSITORY_ENDPOINTS[names["endpoint"].rpartition("/")[2]], names
    if (match := _SHARED_MEMORY.fullmatch(path)) is not None:
        names = match.groupdict("")
        kind = "system" if names["endpoint"].startswith("system") else "cuda"
        return SHARED_MEMORY_ENDPOINTS[f"{kind}/{names['endpoint'].rpartition('/')[2]}"], names
    if path.startswith(dashboard.FILE_PREFIX):
        return _DASHBOARD_FILE, {"file": path.removeprefix(dashboard.FILE_PREFIX)}
    page = _PAGES.get(path)
    return None if page is None else (page, {"file": path.rpartition("/")[2]})


def request_path(target: str) -> str:
    """Return the path of a request target: without the query, and without the authority of a full URL."""
    path = target.partition("?")[0]
    if path.startswith(("http://", "https://")):
        _, slash, rest = path.partition("://")[2].partition("/")
        path = slash + rest
    return path
