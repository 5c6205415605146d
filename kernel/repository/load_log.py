"""What the log says when models are found and cannot be loaded: Triton's errors, and beside them hints for people."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kernel.errors import ServingError
from kernel.files.file_threads import in_file_thread
from kernel.observe.repeats.limited_log import LimitedLog
from kernel.repository.hints.repositories import name_hint
from kernel.repository.load_failures import not_found_reason
from kernel.repository.local import read_start
from kernel.texts import escaped, is_utf8

if TYPE_CHECKING:
    from collections.abc import Collection

    from kernel.repository.layout import ModelFolder, RepositoryContents

logger = logging.getLogger(__name__)

#: A client may repeat a load request that fails without end.
_failures = LimitedLog(logger)


def log_oddities(found: RepositoryContents) -> None:
    """Log what is unusual about the repositories: folders that are not models, paths that are not repositories."""
    for path in found.misnamed:
        reason = "contains control characters" if is_utf8(path) else "is not UTF-8"
        logger.warning("model directory '%s' is ignored: its name %s", escaped(path), reason)
    for hint in found.hints:
        logger.warning("%s", hint)


def log_not_found(name: str, found: RepositoryContents) -> None:
    """Log that no repository has a model of this name, or that several have it."""
    logger.error("failed to load '%s': %s", name, not_found_reason(name, found))
    if name in found.duplicates:
        logger.error("model '%s': rename one of its folders, or allow this with --model-namespacing=true", name)
    elif hint := name_hint(name, {*found.others, *(folder.name for folder in found.models.values())}):
        logger.error("model '%s': %s", name, hint)


async def log_failure(folder: ModelFolder, error: ServingError, backends: Collection[str]) -> None:
    """Log the error of a load, and a sentence that helps, if there is one. `backends` are those of the server."""
    subject = f"model '{folder.identifier}'"
    if not _failures.log(subject, "failed to load '%s': %s", folder.identifier, error.message.strip()):
        return
    cause = error.__cause__
    text = f"{cause.message} {error.message}" if isinstance(cause, ServingError) else error.message
    if hint := await in_file_thread(hint_for, folder, text, backends):
        logger.error("model '%s': %s", folder.identifier, hint)


def hint_for(folder: ModelFolder, text: str, backends: Collection[str]) -> str:
    """Return the hint for a failed load with this error, or ""; it may need the begin of a file. Blocks."""
    from kernel.repository.hints.failures import Failure, load_hint  # only where something is wrong

    return load_hint(Failure(folder, text, backends, lambda path: read_start(folder.path, path)))
