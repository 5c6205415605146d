"""The texts of the command line for people: tables of models, backends and options, and a hint for the demo.

Functions return texts, which end with a line feed: a server must not wait for the reader of its standard output.
"""

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
from kernel.texts import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kernel.options import ServerOptions
    from kernel.serving.catalog import Catalog

#: The width of a table that is not printed to a terminal, in columns: enough for the longest reason.
_FILE_WIDTH = 4000


def models_table(catalog: Catalog) -> str:
    """Return Triton's table of models: name, version, status and reason."""
    rows = []
    for item in catalog.index():
        status = item.state or "not loaded"
        if item.reason:
            status = f"{status}: {item.reason.strip()}"
        rows.append((item.name, item.version or "-", status))
    return table_text(("Model", "Version", "Status"), rows)


def backends_table(backends: Mapping[str, str]) -> str:
    """Return the table of backends: the name in configurations, and the class."""
    return table_text(("Backend", "Class"), sorted(backends.items()))


def options_table(options: ServerOptions) -> str:
    """Return Triton's table of options, without the options that have no effect in this server."""
    repository = options.repository
    rows = [
        ("server_id", options.server_id),
        ("server_version", __version__),
        *((f"model_repository_path[{index}]", str(path)) for index, path in enumerate(repository.paths)),
        ("model_control_mode", f"MODE_{repository.control_mode.upper()}"),
        *((f"startup_models_{index}", name) for index, name in enumerate(repository.load_models)),
        ("strict_model_config", str(int(not repository.auto_complete_config))),
        ("model_config_name", repository.config_name),
        ("model_namespacing", str(int(repository.namespacing))),
        ("rate_limit", "OFF" if options.rate_limit.mode == "off" else "EXEC_COUNT"),
        *((f"rate_limit_resource[{index}]", text) for index, text in enumerate(options.rate_limit.resources)),
        ("strict_readiness", str(int(options.strict_readiness))),
        ("exit_timeout", str(options.exit_timeout_s)),
        ("cache_enabled", str(int(bool(options.cache.config or options.cache.local_byte_size)))),
        ("allow_client_shm", options.allow_client_shm),
    ]
    return table_text(("Option", "Value"), rows)


def table_text(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table for standard output. On a terminal, long cells are wrapped; otherwise each row is one line.

    Control characters are written out: reasons and names come from models and clients.
    """
    width = None if sys.stdout.isatty() else _FILE_WIDTH
    console = Console(file=sys.stdout, highlight=False, width=width)
    table = Table(*titles, box=box.ASCII2)
    for row in rows:
        table.add_row(*(escape(printable(cell, keep="\n")) for cell in row))
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def _python() -> str:
    """Return the command for this interpreter; the interpreter of a virtual environment is often not in PATH."""
    if shutil.which("python") == sys.executable:
        return "python"
    return min(os.path.relpath(sys.executable), sys.executable, key=len)


def demo_hint(http_port: int) -> str:
    """Return first requests to try with the demo models."""
    body = DEMO_REPOSITORY / "digit.json"
    url = f"http://localhost:{http_port}/v2/models"
    return (
        "\nThese are demo models. In another terminal, classify a handwritten digit:\n\n"
        f"    curl -s {url}/digits/infer -d @{body}\n\n"
        "or add and subtract numbers, and show the inputs and outputs of a model:\n\n"
        f"    {_python()} -m kernel infer add_sub INPUT0=[1,2,3,4] INPUT1=[10,20,30,40]\n"
        f"    curl -s {url}/digits\n\n"
        "Serve your own models with --model-repository FOLDER. Ctrl-C stops the server.\n\n"
    )
