"""The files and configuration from which a version was loaded, and whether a change of them needs a reload. Pure.

Triton's rule (model_lifecycle.cc): no reload is needed if the version's folder and the other files in the model's
folder are unchanged, and the configuration has changed only in instance groups and version policy.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

import msgspec

from kernel.config.generated.model_config_pb2 import ModelConfig

if TYPE_CHECKING:
    from kernel.repository.layout import Entry, ModelFolder

#: Fields of a configuration that can change while a version serves.
CHANGEABLE = ("instance_group", "version_policy")


class Origin(msgspec.Struct, frozen=True):
    """The listing of the model's folder, and the configuration before a worker completed it."""

    folder: ModelFolder
    config: ModelConfig
    #: Path of the configuration's file; None if the model has none.
    config_path: str | None = None

    def needs_reload(self, now: Origin, version: int) -> bool:
        """Return whether `version`, loaded from this origin, must be loaded again because of the changes in `now`."""
        return (
            self.folder.path != now.folder.path
            or self.folder.versions.get(version) != now.folder.versions.get(version)
            or self._other_entries() != now._other_entries()
            or _unchangeable(self.config) != _unchangeable(now.config)
        )

    def _other_entries(self) -> list[Entry]:
        """Return the entries of the model's folder that are neither versions nor its configuration: labels, ..."""
        config = "" if self.config_path is None else posixpath.relpath(self.config_path, self.folder.path)
        skipped = {entry.name for entry in self.folder.versions.values()} | {config.partition("/")[0]}
        return [entry for entry in self.folder.entry.children if entry.name not in skipped]


def with_changes(config: ModelConfig, given: ModelConfig) -> ModelConfig:
    """Return a copy of `config` with the `CHANGEABLE` fields of `given`."""
    result = _unchangeable(config)
    result.instance_group.extend(given.instance_group)
    result.version_policy.CopyFrom(given.version_policy)
    return result


def _unchangeable(config: ModelConfig) -> ModelConfig:
    result = ModelConfig()
    result.CopyFrom(config)
    for field in CHANGEABLE:
        result.ClearField(field)
    return result
