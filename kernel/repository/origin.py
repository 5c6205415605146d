"""What a version was loaded from, and whether what is there now can be served without loading it again. Pure.

Triton's rule (model_lifecycle.cc): the version's folder and whatever else lies in the model's are as they were,
and of the configuration nothing but instance groups and the version policy has changed.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

import msgspec

from kernel.config.generated.model_config_pb2 import ModelConfig

if TYPE_CHECKING:
    from kernel.repository.layout import Entry, ModelFolder

#: Fields of a configuration that a version which serves can take over.
CHANGEABLE = ("instance_group", "version_policy")


class Origin(msgspec.Struct, frozen=True):
    """The model's folder as it was listed, and the configuration before a worker completed it."""

    folder: ModelFolder
    config: ModelConfig
    #: Path of the configuration's file, None where there is none.
    config_path: str | None = None

    def needs_reload(self, now: Origin, version: int) -> bool:
        """Whether `version`, which was loaded from here, must be loaded again to be what `now` says."""
        return (
            self.folder.path != now.folder.path
            or self.folder.versions.get(version) != now.folder.versions.get(version)
            or self._other_entries() != now._other_entries()
            or _unchangeable(self.config) != _unchangeable(now.config)
        )

    def _other_entries(self) -> list[Entry]:
        """Return what the model's folder has beside versions and the configuration: labels, warm-up, ..."""
        config = "" if self.config_path is None else posixpath.relpath(self.config_path, self.folder.path)
        skipped = {entry.name for entry in self.folder.versions.values()} | {config.partition("/")[0]}
        return [entry for entry in self.folder.entry.children if entry.name not in skipped]


def with_changes(config: ModelConfig, given: ModelConfig) -> ModelConfig:
    """Return `config` with what it can take over from `given`."""
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
