"""What installed packages add to the kernel by entry points: schedulers, batching rules and repository agents.

Such code runs in the kernel's process, so only packages count that were installed in the environment of the server. A
model names an extension; a file beside the model is never imported.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

from kernel.config.model_parameters import TOOL_PARSER, TOOL_PARSERS, model_parameters
from kernel.errors import InternalError, InvalidArgument, failing_as
from kernel.naiad_module import make_importable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from kernel.config.generated.model_config_pb2 import ModelConfig

#: Groups of entry points.
SCHEDULERS = "naiad.schedulers"
BATCHING_RULES = "naiad.batching"
REPOSITORY_AGENTS = "naiad.repository_agents"
TOOL_PARSER_PACKAGES = "naiad.tool_parsers"

#: What a member of a group is, in errors.
_TITLES = {
    SCHEDULERS: "scheduler",
    BATCHING_RULES: "batching rule",
    REPOSITORY_AGENTS: "repository agent",
    TOOL_PARSER_PACKAGES: "tool parser",
}


async def import_extensions(config: ModelConfig) -> None:
    """Import the extensions that a model names, in a thread: an import can take seconds. Raises as `extension`."""
    parameters = model_parameters(config)
    for group, name in ((SCHEDULERS, parameters.scheduler), (BATCHING_RULES, parameters.batching)):
        if name:
            await asyncio.to_thread(extension, group, name)
    if TOOL_PARSER in config.parameters:
        name = config.parameters[TOOL_PARSER].string_value
        if name not in TOOL_PARSERS:
            await asyncio.to_thread(_tool_parser, name)


def _tool_parser(name: str) -> None:
    """Import a tool parser of a package. Raises as `extension`, with the names of the server's own."""
    try:
        extension(TOOL_PARSER_PACKAGES, name)
    except InvalidArgument as error:
        raise InvalidArgument(f"{error.message}; the server has {', '.join(TOOL_PARSERS)}") from None


@functools.cache
def extension(group: str, name: str) -> object:
    """Import and return what the entry point `name` of `group` stands for.

    Raises `InvalidArgument` if no package has this entry point, or several have, and `InternalError` if it cannot be
    imported. What was found once is not looked up again: to search all installed packages takes milliseconds.
    """
    title = _TITLES[group]
    found = _installed(group)
    named = [point for point in found if point.name == name]
    if not named:
        names = ", ".join(sorted(f"'{point.name}' of package {_package(point)}" for point in found))
        raise InvalidArgument(
            f"there is no {title} '{name}'; "
            + (f"installed are {names}" if names else f"no installed package has an entry point of the group '{group}'")
        )
    if len(named) > 1:
        packages = " and ".join(sorted(map(_package, named)))
        raise InvalidArgument(f"{title} '{name}' is not unique: the packages {packages} each have one with this name")
    make_importable()
    with failing_as(
        lambda error: InternalError(
            f"{title} '{name}' of package {_package(named[0])} cannot be imported from '{named[0].value}': "
            f"{type(error).__name__}: {error}"
        )
    ):
        loaded: object = named[0].load()
    return loaded


def _installed(group: str) -> list[EntryPoint]:
    """Return the entry points of a group; of a package that is found twice on the path, the first counts."""
    from importlib.metadata import entry_points  # imported late: most servers do without it

    found: dict[tuple[str, str], EntryPoint] = {}
    for point in entry_points(group=group):
        found.setdefault((point.name, _package(point).partition(" ")[0]), point)
    return list(found.values())


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "without a name"
