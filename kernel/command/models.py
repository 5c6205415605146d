"""`python -m kernel models`: every model of a repository, and whether its configuration is valid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.command.start_messages import print_table
from kernel.errors import ServingError
from kernel.options import BadOption
from kernel.repository.limits import refuse_unsupported
from kernel.repository.source import ModelSource, scan
from kernel.serving.catalog import DUPLICATE_REASON

if TYPE_CHECKING:
    from pathlib import Path


def print_models(repositories: tuple[Path, ...]) -> int:
    """Print the table; returns 1 where a configuration is not valid, else 0.

    Model files are not opened: what a backend would complete or refuse shows when the server loads them.
    """
    for path in repositories:
        if not path.is_dir():
            raise BadOption(f"model repository '{path}' is not a folder")
    found = scan(repositories)
    rows: list[tuple[str, ...]] = []
    faults = len(found.duplicates)
    for name, folder in found.models.items():
        source = ModelSource(folder, gpu_count=0, auto_complete=True)
        try:
            config = source.read()
            versions = ", ".join(map(str, source.versions(config)))
            source.check_label_files(config)
            refuse_unsupported(config)
        except ServingError as error:
            faults += 1
            rows.append((name, "-", "-", f"{error.code.title}: {error.message}"))
            continue
        completed = "" if folder.config_path() else " (no config.pbtxt: completed from the model file)"
        rows.append((name, versions, config.backend, f"valid{completed}"))
    rows += [(name, "-", "-", DUPLICATE_REASON) for name in found.duplicates]
    print_table(("Model", "Versions", "Backend", "Configuration"), sorted(rows))
    return 1 if faults else 0
