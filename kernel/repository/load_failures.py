"""What clients, the log and the index say when a model cannot be loaded: Triton's errors, and hints in the log."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from kernel.errors import InternalError, ModelLoadFailed, NoDescriptorLeft, ServingError
from kernel.file_threads import in_file_thread
from kernel.observe.limited_log import LimitedLog
from kernel.repository.local import read_start
from kernel.repository.path_hints import name_hint
from kernel.serving.catalog import UNLOADED, ModelState
from kernel.texts import MAX_TEXT_BYTE_SIZE, escaped, is_utf8, limited

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Iterable, Mapping

    from kernel.repository.layout import ModelFolder, RepositoryContents
    from kernel.repository.loading import LoadedVersion
    from kernel.serving.catalog import Catalog

#: A client may repeat a load request that fails without end.
_failures = LimitedLog(logging.getLogger(__name__))


async def all_loaded(loads: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for the loads of the models of one name; only with namespacing there are several. Raises `ServingError`."""
    results = await asyncio.gather(*loads, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    texts = [error.message for error in errors if isinstance(error, ModelLoadFailed)]
    if len(errors) > 1 and len(texts) == len(errors):
        raise ModelLoadFailed("".join(texts))
    if errors:
        raise errors[0]


def note_failure(
    catalog: Catalog,
    identifier: str,
    errors: Mapping[int, BaseException],
    others: Collection[int],
    serving: Mapping[int, LoadedVersion],
    staying: Mapping[int, LoadedVersion],
) -> ServingError:
    """Put the errors of failed versions into the catalog, and return the error of the load. Old versions still serve.

    `others` are the versions that were loaded and do not serve, because of those that failed.
    """
    text = ""
    for version, error in sorted(errors.items()):
        if not isinstance(error, Exception):
            raise error  # the load was cancelled
        if not isinstance(error, ServingError):
            error = unexpected_failure(identifier, error)
        reason = f"{error.code.title}: {error.message}"
        state = ModelState.READY if version in staying else ModelState.UNAVAILABLE
        text += f"version {version} is at {state.value} state: {reason};"
        if version in staying:
            catalog.set_state(identifier, version, state, reason, staying[version].model)
        elif version not in serving:
            catalog.set_state(identifier, version, state, reason)
    for version in others:
        if version not in serving:
            catalog.set_state(identifier, version, ModelState.UNAVAILABLE, UNLOADED)
    if any(isinstance(error, NoDescriptorLeft) for error in errors.values()):
        return NoDescriptorLeft()
    return ModelLoadFailed(f"load failed for model '{identifier}': {text}\n")


class UnexpectedFailure(InternalError):
    """The load of a model has failed with an unexpected exception."""


def unexpected_failure(identifier: str, error: Exception) -> UnexpectedFailure:
    """Log an exception that no code expects, and return the error of the model's load: other models are not affected.

    It is a bug, or a file or a library does what was never seen.
    """
    _failures.log(f"model '{identifier}'", "the load of '%s' has failed", identifier, exc_info=error)
    return UnexpectedFailure(f"unexpected {type(error).__name__}: {limited(str(error), MAX_TEXT_BYTE_SIZE)}")


def poll_failed(name: str, reason: ServingError | str) -> ServingError:
    """Log why a configuration is missing or wrong, and return Triton's general error for the client."""
    text = reason if isinstance(reason, str) else reason.message
    _failures.log(f"model '{name}'", "Poll failed for model directory '%s': %s", name, text)
    if isinstance(reason, NoDescriptorLeft):
        return NoDescriptorLeft()
    return InternalError(f"failed to load '{name}', failed to poll from model repository")


def not_found_reason(name: str, found: RepositoryContents) -> str:
    if name in found.duplicates:
        return f"not unique across all model repositories: {', '.join(found.duplicates[name])}"
    return "model not found in any model repository."


logger = logging.getLogger(__name__)

#: A client may repeat a load request that fails without end.
_logged_failures = LimitedLog(logger)


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
    """Log the error of a load, and a sentence that helps, if there is one. `backends` are the server's."""
    subject = f"model '{folder.identifier}'"
    if not _logged_failures.log(subject, "failed to load '%s': %s", folder.identifier, error.message.strip()):
        return
    cause = error.__cause__
    text = f"{cause.message} {error.message}" if isinstance(cause, ServingError) else error.message
    if hint := await in_file_thread(hint_for, folder, text, backends):
        logger.error("model '%s': %s", folder.identifier, hint)


def hint_for(folder: ModelFolder, text: str, backends: Collection[str]) -> str:
    """Return the hint for a failed load with this error, or ""; it may need the begin of a file. Blocks."""
    from kernel.repository.load_hints import Failure, load_hint  # only where something is wrong

    return load_hint(Failure(folder, text, backends, lambda path: read_start(folder.path, path)))
