"""The version policy: which versions of a model are served. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from kernel.config.generated.model_config_pb2 import ModelConfig


def choose_versions(config: ModelConfig, available: Iterable[int]) -> list[int]:
    """Return the versions to serve, ascending; `available` are the versions in the repository.

    `config` is normalised. Raises `BadConfig` if no available version satisfies the policy.
    """
    policy = config.version_policy
    ascending = sorted(set(available))
    match policy.WhichOneof("policy_choice"):
        case "latest":
            chosen = ascending[-policy.latest.num_versions :] if policy.latest.num_versions else []
        case "specific":
            chosen = [version for version in ascending if version in policy.specific.versions]
        case _:
            chosen = ascending
    if not chosen:
        raise BadConfig(f"at least one version must be available under the version policy of model '{config.name}'")
    return chosen


def available_versions(config: ModelConfig, found: Collection[int]) -> Collection[int]:
    """Return the versions of a model with the version folders `found`.

    An ensemble has no files, so it needs no folder, either: without one it has those versions that its policy names,
    else version 1. Triton asks for an empty folder, which git and object stores do not keep.
    """
    if found or not config.HasField("ensemble_scheduling"):
        return found
    return tuple(config.version_policy.specific.versions) or (1,)


def missing_versions(config: ModelConfig, available: Iterable[int]) -> list[str]:
    """Return one log line for each version that the policy names and the repository does not contain."""
    present = set(available)
    return [
        f"version {version} is specified for model '{config.name}', but the version directory is not present"
        for version in sorted(set(config.version_policy.specific.versions))
        if version not in present
    ]
