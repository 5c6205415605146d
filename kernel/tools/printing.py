"""The texts of the command line for people: tables of models, backends and options, and a hint for the demo.

Functions return texts, which end with a line feed: a server must not wait for the reader of its standard output.

A bar for commands that take a while: on standard error, and only if that is a terminal.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import sys
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.options import DEMO_REPOSITORY
from kernel.texts import printable
from kernel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kernel.options import ServerOptions
    from kernel.serving.catalog import Catalog

#: Where `naiad infer` looks for a server without --url, when the server has its default port.
DEFAULT_URL = "http://localhost:8000"

#: Addresses of a listener that this machine reaches as localhost.
_THIS_MACHINE = ("0.0.0.0", "::", "127.0.0.1", "::1", "localhost")


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
    cells = [tuple(printable(cell, keep="\n") for cell in row) for row in rows]
    return _wrapped_table(titles, cells) if sys.stdout.isatty() else file_table(titles, cells)


def file_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose rows are as wide as their cells; a line feed in a cell begins a line of the same row.

    It looks like `_wrapped_table`. A server whose log goes to a file does without rich, which takes 5 MiB.
    """
    widths = [max(_width(line) for row in (titles, *rows) for line in row[n].split("\n")) for n in range(len(titles))]
    border = f"+{'+'.join('-' * (width + 2) for width in widths)}+\n"
    lines = [border, *_row_lines(titles, widths), border]
    for row in rows:
        lines += _row_lines(row, widths)
    return "".join([*lines, border])


def _row_lines(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    columns = zip_longest(*(cell.split("\n") for cell in row), fillvalue="")
    return [
        "|"
        + "|".join(f" {cell}{' ' * (width - _width(cell))} " for cell, width in zip(line, widths, strict=True))
        + "|\n"
        for line in columns
    ]


def _width(text: str) -> int:
    """Return how many columns a text takes on a terminal: East Asian letters take two, combining ones none."""
    if text.isascii():
        return len(text)
    import unicodedata

    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(unicodedata.combining(letter) != 0 for letter in text)


def _wrapped_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table that fits into the terminal."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(file=sys.stdout, highlight=False)
    table = Table(*titles, box=box.ASCII2)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def pretty_json(value: Any) -> str:
    """Return a value as JSON for people, with a line for each member."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def program() -> str:
    """Return the command that is this program at the terminal where the server was started.

    A virtual environment that is not activated is not in PATH; and a checkout may have no `naiad` beside Python.
    """
    beside = os.path.join(os.path.dirname(sys.executable), "naiad")
    found = shutil.which("naiad")
    if found is not None and os.path.realpath(found) == os.path.realpath(beside):
        return "naiad"
    if os.access(beside, os.X_OK):
        return shlex.quote(min(os.path.relpath(beside), beside, key=len))
    return f"{python_program()} -m kernel"


def python_program() -> str:
    """Return the command that is this program's Python at that terminal."""
    python = sys.executable
    return next(
        (name for name in ("python", "python3") if shutil.which(name) == python),
        shlex.quote(min(os.path.relpath(python), python, key=len)),
    )


def server_url(address: str, port: int, *, tls: bool = False) -> str:
    """Return the URL by which this machine reaches a port that listens at `address`."""
    host = "localhost" if address in _THIS_MACHINE else f"[{address}]" if ":" in address else address
    return f"{'https' if tls else 'http'}://{host}:{port}"


def demo_hint(url: str) -> str:
    """Return first requests to try with the demo models of the server at `url`. They can be typed in any shell."""
    body = DEMO_REPOSITORY / "digit.json"
    models = f"{url}/v2/models"
    elsewhere = "" if url == DEFAULT_URL else f" --url {url}"
    return (
        "\nThese are demo models. In another terminal, classify a handwritten digit:\n\n"
        f"    curl -s {models}/digits/infer -d @{shlex.quote(str(body))}\n\n"
        "or add and subtract numbers, and show the inputs and outputs of a model:\n\n"
        f"    {program()} infer add_sub 'INPUT0=[1,2,3,4]' 'INPUT1=[10,20,30,40]'{elsewhere}\n"
        f"    curl -s {models}/digits\n\n"
        f"Serve your own models with '{program()} run FOLDER'. Ctrl-C stops the server.\n\n"
    )


class WorkProgress:
    """Shows how far the work of a command is."""

    def __init__(self, update: Callable[..., object]) -> None:
        """`update` takes arguments of `rich.progress.Progress.update`."""
        self._update = update

    def works_on(self, text: str) -> None:
        """Show what is worked on now."""
        self._update(description=text)

    def done(self) -> None:
        """One more part of the work is done."""
        self._update(advance=1)

    def reached(self, parts: float, text: str) -> None:
        """The first `parts` parts of the work are done; `text` is what is worked on now."""
        self._update(completed=parts, description=text)


@contextlib.contextmanager
def progress_bar(total: float, *, time_left: bool = False) -> Iterator[WorkProgress]:
    """Show a bar of `total` parts during the block, if standard error is a terminal; the bar is gone after it.

    With `time_left` it has the time that is left, else the time that has passed.
    """
    if not sys.stderr.isatty():
        yield WorkProgress(lambda **_: None)
        return
    from rich.console import Console  # takes memory, which only terminals need
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    time = TimeRemainingColumn() if time_left else TimeElapsedColumn()
    columns = (BarColumn(), MofNCompleteColumn(), time, TextColumn("{task.description}", markup=False))
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as shown:
        yield WorkProgress(functools.partial(shown.update, shown.add_task("", total=total)))
