"""Which models and versions the server knows, in what state, and which of them answers a request.

States and texts are Triton's (model_lifecycle.h, model_repository_manager.cc). Pure: the lifecycle
changes it, front doors and the kernel read it.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InvalidArgument, ModelNotFound, ModelNotReady, NoAvailableVersion

if TYPE_CHECKING:
    from kernel.model import Model


class ModelState(enum.Enum):
    """State of one version."""

    UNKNOWN = "UNKNOWN"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"


class VersionEntry(msgspec.Struct):
    """A version that the server knows. `model` is set while it is READY or UNLOADING."""

    state: ModelState
    reason: str = ""
    model: Model | None = None


class IndexItem(msgspec.Struct, frozen=True):
    """One line of the repository index. A model that was never loaded has a name only."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


class Catalog:
    """Versions by model name and number. `known` are models in the repository that were never loaded."""

    def __init__(self) -> None:
        self._models: dict[str, dict[int, VersionEntry]] = {}
        #: The READY version with the highest number of each model.
        self._newest: dict[str, Model] = {}
        #: Models that cannot be loaded at all, and why (no valid configuration, found twice).
        self._broken: dict[str, str] = {}
        self._known: set[str] = set()

    # ---- changed by the lifecycle ------------------------------------------------------------

    def set_known(self, names: set[str]) -> None:
        """Tell which models the repository has."""
        self._known = set(names)

    def set_broken(self, name: str, reason: str | None) -> None:
        """Remember why no version of a model can be loaded; None forgets it."""
        if reason is None:
            self._broken.pop(name, None)
        else:
            self._broken[name] = reason

    def set_state(
        self, name: str, version: int, state: ModelState, reason: str = "", model: Model | None = None
    ) -> None:
        """Set the state of one version. `model` comes with READY, and stays with UNLOADING."""
        self._models.setdefault(name, {})[version] = VersionEntry(state, reason, model)
        ready = [e.model for _, e in sorted(self._models[name].items()) if e.state is ModelState.READY]
        if ready and ready[-1] is not None:
            self._newest[name] = ready[-1]
        else:
            self._newest.pop(name, None)

    # ---- read by everyone --------------------------------------------------------------------

    def resolve(self, name: str, version: str = "") -> Model:
        """Return the model that answers for `name` and `version`; an empty version means the newest.

        Raises `ModelNotFound`, `NoAvailableVersion`, `ModelNotReady` or `InvalidArgument`.
        """
        if not version:
            newest = self._newest.get(name)
            if newest is not None:
                return newest
            if name in self._models or name in self._broken:
                raise NoAvailableVersion(name)
            raise ModelNotFound(name)
        number = parse_version(version)
        entry = self._models.get(name, {}).get(number)
        if entry is None:
            raise ModelNotFound(name, version) if name in self._models else ModelNotFound(name)
        if entry.state is not ModelState.READY or entry.model is None:
            raise ModelNotReady(name, number)
        return entry.model

    def entry(self, name: str, version: int) -> VersionEntry | None:
        return self._models.get(name, {}).get(version)

    def versions(self, name: str) -> dict[int, VersionEntry]:
        """Return all versions of a model that were ever loaded, in the order of their numbers."""
        return dict(sorted(self._models.get(name, {}).items()))

    def ready_models(self, name: str = "") -> list[Model]:
        """Return the READY versions of all models, or of one, by name and number."""
        return [
            entry.model
            for model_name, versions in sorted(self._models.items())
            if name in ("", model_name)
            for _, entry in sorted(versions.items())
            if entry.state is ModelState.READY and entry.model is not None
        ]

    def index(self, ready: bool = False) -> list[IndexItem]:
        """Return the repository index by name and version; with `ready` only what is READY."""
        items: list[IndexItem] = []
        for name in sorted(self._known | set(self._models) | set(self._broken)):
            versions = self._models.get(name, {})
            if versions:
                items += [
                    IndexItem(name, str(number), entry.state.value, entry.reason)
                    for number, entry in sorted(versions.items())
                    if not ready or entry.state is ModelState.READY
                ]
            elif not ready and name in self._broken:
                items.append(IndexItem(name, "", ModelState.UNAVAILABLE.value, self._broken[name]))
            elif not ready:
                items.append(IndexItem(name))
        return items

    def all_ready(self) -> bool:
        """Whether every version that was asked to load is READY and has a living instance.

        Versions that were unloaded on request do not count (Triton's strict readiness).
        """
        if self._broken:
            return False
        for versions in self._models.values():
            for entry in versions.values():
                if entry.state is ModelState.READY:
                    if entry.model is not None and not entry.model.ready:
                        return False
                elif entry.reason != "unloaded":
                    return False
        return True


def parse_version(text: str) -> int:
    """Return the number of a version string, with Triton's errors for what is none."""
    if not text.isascii() or not text.lstrip("+-").isdigit() or len(text) > 19:
        raise InvalidArgument(
            f"failed to get model version from specified version string '{text}' (details: stol), "
            "version should be an integral value > 0"
        )
    number = int(text)
    if number < 0:  # no folder is called 0 either, but Triton looks for it
        raise InvalidArgument(f"invalid model version specified '{text}' , version should be an integral value > 0")
    return number
