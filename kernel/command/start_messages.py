"""What the server prints for people when it has started: the table of models, and what to type next."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kernel import __version__
from kernel.options import DEMO_REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kernel.options import ServerOptions
    from kernel.serving.catalog import Catalog

#: Columns of a table that no terminal shows: enough for the longest reason.
_FILE_WIDTH = 4000


def print_models_table(catalog: Catalog) -> None:
    """Print Triton's table of models: name, version, and the status with its reason."""
    rows = []
    for item in catalog.index():
        status = item.state or "not loaded"
        if item.reason:
            status = f"{status}: {item.reason.strip()}"
        rows.append((item.name, item.version or "-", status))
    print_table(("Model", "Version", "Status"), rows)


def print_backends_table(backends: Mapping[str, str]) -> None:
    """Print what models may name as their backend, and the class that each is."""
    print_table(("Backend", "Class"), sorted(backends.items()))


def print_options_table(options: ServerOptions) -> None:
    """Print Triton's table of how the server was started, as far as the options mean something here."""
    repository = options.repository
    rows = [
        ("server_id", options.server_id),
        ("server_version", __version__),
        *((f"model_repository_path[{place}]", str(path)) for place, path in enumerate(repository.paths)),
        ("model_control_mode", f"MODE_{repository.control_mode.upper()}"),
        *((f"startup_models_{place}", name) for place, name in enumerate(repository.load_models)),
        ("strict_model_config", str(int(not repository.auto_complete_config))),
        ("model_config_name", repository.config_name),
        ("model_namespacing", str(int(repository.namespacing))),
        ("strict_readiness", str(int(options.strict_readiness))),
        ("exit_timeout", str(options.exit_timeout_s)),
        ("allow_client_shm", options.allow_client_shm),
    ]
    print_table(("Option", "Value"), rows)


def print_table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print a table: on a terminal long cells are folded, elsewhere a row is a line."""
    width = None if sys.stdout.isatty() else _FILE_WIDTH
    console = Console(file=sys.stdout, highlight=False, width=width)
    table = Table(*titles, box=box.ASCII2)
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
    sys.stdout.flush()


def _python() -> str:
    """Return what to type for this interpreter: that of a virtual environment is often not on the path."""
    if shutil.which("python") == sys.executable:
        return "python"
    return min(os.path.relpath(sys.executable), sys.executable, key=len)


def print_demo_hint(http_port: int) -> None:
    """Tell somebody who started the server for the first time what to try."""
    body = DEMO_REPOSITORY / "digit.json"
    url = f"http://localhost:{http_port}/v2/models"
    print(
        "\nThese are demo models. In another terminal, have a handwritten digit classified:\n\n"
        f"    curl -s {url}/digits/infer -d @{body}\n\n"
        "or add and subtract, and look at what a model takes:\n\n"
        f"    {_python()} -m kernel infer add_sub INPUT0=[1,2,3,4] INPUT1=[10,20,30,40]\n"
        f"    curl -s {url}/digits\n\n"
        "Serve your own models with --model-repository FOLDER; Ctrl-C ends the server.\n",
        flush=True,
    )
