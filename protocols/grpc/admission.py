"""Which calls are refused by their headers and by the address of their client. Pure.

Every RPC belongs to one of Triton's nine categories; a call is refused before its handler is found. TraceSetting and
LogSettings also read settings: their handlers refuse the changes of clients that may not administer the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.restricted import Category

if TYPE_CHECKING:
    from protocols.grpc.h2.headers import Fields, RequestHead
    from protocols.restricted import Restrictions

_INFERENCE_SERVICE = "inference.GRPCInferenceService"

_RPCS: dict[Category, tuple[str, ...]] = {
    Category.HEALTH: ("ServerLive", "ServerReady", "ModelReady"),
    Category.METADATA: ("ServerMetadata", "ModelMetadata"),
    Category.INFERENCE: ("ModelInfer", "ModelStreamInfer"),
    Category.SHARED_MEMORY: tuple(
        f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Status", "Register", "Unregister")
    ),
    Category.MODEL_CONFIG: ("ModelConfig",),
    Category.MODEL_REPOSITORY: ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
    Category.STATISTICS: ("ModelStatistics",),
    Category.TRACE: ("TraceSetting",),
    Category.LOGGING: ("LogSettings",),
}

#: The category of each call by its path.
CATEGORIES: dict[str, Category] = {
    **{f"/{_INFERENCE_SERVICE}/{name}": category for category, names in _RPCS.items() for name in names},
    "/grpc.health.v1.Health/Check": Category.HEALTH,
    "/grpc.health.v1.Health/Watch": Category.HEALTH,
    # Which services there are is metadata of the server; Triton has no reflection.
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": Category.METADATA,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Category.METADATA,
}


#: The calls of those who administer the server alone (--admin-access).
ADMINISTERS = frozenset(
    f"/{_INFERENCE_SERVICE}/{name}"
    for name in (
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        *(f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Register", "Unregister")),
    )
)


class Admission:
    """Refuses calls. Made only where anything is restricted."""

    def __init__(self, restrictions: Restrictions) -> None:
        self._restrictions = restrictions
        self._paths = ADMINISTERS if restrictions.restricts_admin else frozenset()
        self._paths |= {path for path, category in CATEGORIES.items() if restrictions.of(category) is not None}

    def refusal(self, request_head: RequestHead, peer: object) -> str | None:
        """Return the error text for a call that is refused to this client, None for a call that is allowed."""
        path = request_head.path
        if path not in self._paths:
            return None
        return self._restrictions.refusal(
            CATEGORIES[path],
            lambda name: _first_value(request_head.fields, name),
            peer,
            administers=path in ADMINISTERS,
        )


def _first_value(fields: Fields, name: str) -> bytes | None:
    """Return the value of a header. Of one that is sent twice Triton's multimap returns the first."""
    wanted = name.lower()
    value = next((value for found, value in fields if found == wanted), None)
    return None if value is None else value.encode("latin-1")
