"""The configurations of a cloud repository's models, as of its last listing. Nothing here blocks or waits.

A listing of the whole repository needs them to know the ensembles; loads read those of the copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.config.load import MAX_BYTE_SIZE
from kernel.repository.layout import CONFIG_FILENAME, CONFIGS_FOLDER, TRAFFIC_FILENAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kernel.repository.layout import Entry

#: The most bytes that are asked for together, and the most files.
_PORTION_BYTE_SIZE, _PORTION_FILE_COUNT = 16 << 20, 1000

#: Path in the model's folder → etag and content.
_OfModel = dict[str, tuple[str, bytes]]


class CloudConfigs:
    """Name of a model → its configurations."""

    def __init__(self) -> None:
        self._models: dict[str, _OfModel] = {}

    def content(self, path: str) -> bytes | None:
        """Return the content of a configuration, by its path in the repository; None for what is none."""
        model, _, file = path.partition("/")
        found = self._models.get(model, {}).get(file)
        return None if found is None else found[1]

    def unread(self, models: Iterable[Entry]) -> dict[str, Entry]:
        """Return path in the repository → file, of the configurations that are new or have changed."""
        return {
            f"{model.name}/{path}": each
            for model in models
            for path, each in _config_files(model)
            if self._models.get(model.name, {}).get(path, ("",))[0] != each.etag
        }

    def updated(self, models: Iterable[Entry], read: Mapping[str, bytes | None]) -> dict[str, _OfModel]:
        """Return what `put` gets: the configurations of `models`. `read` has the contents of the unread ones."""
        found: dict[str, _OfModel] = {}
        for model in models:
            known, now = self._models.get(model.name, {}), {}
            for path, each in _config_files(model):
                content = read.get(f"{model.name}/{path}")
                if content is not None:
                    now[path] = (each.etag, content)
                elif known.get(path, ("",))[0] == each.etag:
                    now[path] = known[path]
            if now:
                found[model.name] = now
        return found

    def put(self, updated: dict[str, _OfModel], only: str = "") -> None:
        """Keep the configurations of a listing of the repository, or of the model called `only`."""
        if not only:
            self._models = updated
        elif only in updated:
            self._models[only] = updated[only]
        else:
            self._models.pop(only, None)


def portions(files: Mapping[str, Entry]) -> Iterator[dict[str, Entry]]:
    """Yield `files` in portions that fit into one response."""
    portion: dict[str, Entry] = {}
    byte_size = 0
    for path, each in files.items():
        if portion and (byte_size + each.byte_size > _PORTION_BYTE_SIZE or len(portion) == _PORTION_FILE_COUNT):
            yield portion
            portion, byte_size = {}, 0
        portion[path] = each
        byte_size += each.byte_size
    if portion:
        yield portion


def _config_files(model: Entry) -> Iterator[tuple[str, Entry]]:
    """Yield path in the model's folder and file, of its configurations. The load says that a longer one is too long."""
    for each in model.children:
        if each.is_folder and each.name == CONFIGS_FOLDER:
            for inner in each.children:
                if inner.name.endswith(".pbtxt") and not inner.is_folder and inner.byte_size <= MAX_BYTE_SIZE:
                    yield f"{CONFIGS_FOLDER}/{inner.name}", inner
        elif each.name in (CONFIG_FILENAME, TRAFFIC_FILENAME) and each.byte_size <= MAX_BYTE_SIZE:
            yield each.name, each
