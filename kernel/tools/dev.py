"""`naiad dev MODEL_DIR`: serves one model to its author, and loads it again when its files are saved.

When a model's files have changed and its author has finished saving them. Pure: callers list the files.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import re
import termios
import time
from typing import TYPE_CHECKING

import anyio
import msgspec

from kernel.errors import BadOption, ServingError
from kernel.flags.read import read_flags, split_words
from kernel.options import check_options
from kernel.repository.load_failures import hint_for
from kernel.start import start
from kernel.texts import printable
from kernel.tools.first_requests import request_lines
from kernel.tools.printing import program, server_url
from kernel.tools.target import model_target
from kernel.tools.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from kernel.options import ServerOptions
    from kernel.repository.layout import Entry
    from kernel.serving.catalog import Catalog
    from kernel.serving.kernel import Kernel
    from kernel.settings import LogSettings
    from kernel.tools.target import Target

#: How long files must be unchanged before a reload: editors and `git` write several files one after the other.
QUIET_NS = 300_000_000

#: Names that editors and tools give to files of their own.
_NOT_OF_MODELS = (".pyc", ".pyo", ".swp", ".swx", ".tmp", "~")

#: Path → time of the last change in nanoseconds.
Files = dict[str, int]


def files_of(entries: Iterable[Entry]) -> Files:
    """Return the files of models, without files of editors, caches, and an author's tests."""
    return {path: modified_ns for entry in entries for path, modified_ns in _files(entry, "")}


def _files(entry: Entry, parent: str) -> Iterator[tuple[str, int]]:
    name = entry.name
    if name.startswith((".", "#")) or name.endswith(_NOT_OF_MODELS) or name == "4913":  # vim writes 4913 as a trial
        return
    path = f"{parent}{name}"
    if not entry.is_folder:
        if not (name.startswith("test_") and name.endswith(".py")):
            yield path, entry.modified_ns
        return
    for child in entry.children:
        yield from _files(child, f"{path}/")


class ChangeWatch:
    """Compares listings of files. Times are monotonic nanoseconds."""

    def __init__(self, files: Files) -> None:
        """`files` are those that were loaded."""
        self._loaded = files
        self._seen = files
        self._changed_ns = 0

    def look(self, files: Files, now_ns: int) -> list[str]:
        """Return the paths that differ from what was loaded, if they have been quiet for long enough; else nothing.

        What is returned counts as loaded from now on.
        """
        if files != self._seen:
            self._seen, self._changed_ns = files, now_ns
        if files == self._loaded or now_ns - self._changed_ns < QUIET_NS:
            return []
        loaded, self._loaded = self._loaded, files
        return sorted(path for path in loaded.keys() | files.keys() if loaded.get(path) != files.get(path))


#: The time between two looks at the model's files, in seconds.
_LOOK_S = 0.2

#: Flags of `run` that `dev` sets itself.
_OWN_FLAGS = ("model-repository", "model-store", "model-control-mode", "load-model", "repository-poll-secs")

#: How long requests may take to end after Ctrl-C: one may be stopped in a debugger.
_EXIT_TIMEOUT_S = 2

#: Workers of versions that were replaced may be stopped in a debugger.
_NEVER_S = 10**8

#: What stands before the reason why the only version of a model did not load.
_POLL_FAILED = "failed to poll from model repository"

_LOAD_FAILED = re.compile(r"^load failed for model '[^']*': (version \d+ is at UNAVAILABLE state: )?")

#: In an error's text, where the frames of the model begin. If there is a terminal, the worker has shown them there.
_FRAMES = "\n\nAt:\n"


def serve_for_author(path: Path, words: Sequence[str]) -> int:
    """Serve the model at `path` with the flags in `words`; returns the exit code. Raises `BadOption`."""
    target = model_target(path)
    device = terminal_device()
    options, notes = dev_options(target, words, os.environ, device)
    # Python takes a source file that was saved twice within a second, with the same size, for unchanged.
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    if not device:
        os.environ["PYTHONBREAKPOINT"] = "0"
    with _restored_terminal():
        return start(options, notes, AuthorTerminal(options, notes, target, device))


def terminal_device() -> str:
    """Return the path of the terminal that is this process's standard input; "" if it is not a terminal."""
    try:
        return os.ttyname(0) if os.isatty(0) else ""
    except OSError:
        return ""


@contextlib.contextmanager
def _restored_terminal() -> Iterator[None]:
    """Restore the terminal's settings after the block: a debugger that is killed leaves it without echo."""
    try:
        before = termios.tcgetattr(0)
    except termios.error:
        yield
        return
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def dev_options(
    target: Target, words: Sequence[str], environment: Mapping[str, str], device: str
) -> tuple[ServerOptions, list[str]]:
    """Return the options for one model, and log lines as `read_flags` does. Raises `BadOption`."""
    given = split_words(words)
    for name in _OWN_FLAGS:
        if name in given:
            raise BadOption(f"--{name} has no meaning for dev, which serves one model; use 'run' for a repository")
    defaults = [f"--{door}-address=127.0.0.1" for door in ("http", "grpc") if f"{door}-address" not in given]
    if "exit-timeout-secs" not in given:
        defaults.append(f"--exit-timeout-secs={_EXIT_TIMEOUT_S}")
    options, notes = read_flags([*defaults, *words], environment)
    terminal = (f"python,terminal={device}",) if device else ()
    options = msgspec.structs.replace(
        options,
        repository=msgspec.structs.replace(
            options.repository,
            paths=(target.repository,),
            control_mode="explicit",
            load_models=(target.name,),
            exit_on_error=False,
            load_timeout_s=0,
            unload_timeout_s=_NEVER_S,
            backend_config=(*options.repository.backend_config, *terminal),
        ),
        execution_timeout_s=0,
        response_wait_timeout_s=0,
        execution_report_s=0,
        debugging=True,
    )
    check_options(options)
    return options, notes


class AuthorTerminal(Terminal):
    """Shows what an author needs, and loads the model again when its files are saved."""

    def __init__(self, options: ServerOptions, notes: Sequence[str], target: Target, device: str) -> None:
        super().__init__(options, notes, dict)
        self._verbose = options.log.verbose > 0
        self._target = target
        self._device = device
        self._kernel: Kernel | None = None
        self._opened: asyncio.Event
        self._watch: ChangeWatch
        self._serving_since = ""

    # ---- ServerOperator ----------------------------------------------------------------------

    def begin(self, log: LogSettings) -> None:
        super().begin(log)
        self._opened = asyncio.Event()
        self._watch = ChangeWatch(self._files())
        if not self._verbose:
            for handler in logging.getLogger().handlers:
                handler.addFilter(lambda record: for_author(record, shown_by_worker=bool(self._device)))

    async def wait_for_stop(self, stop: asyncio.Event) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._reload_on_save)
            await super().wait_for_stop(stop)

    def models_loaded(self, catalog: Catalog) -> None:
        """Say whether the model serves."""
        if self._display is not None:
            self._display.close()
        failures = [item.reason for item in catalog.index() if item.name == self._target.name and item.state != "READY"]
        if failures:
            self._say(f"{self._target.name} does not load: {self._helped(failures[0])}\nSave a file to try again.")

    def opened(self, kernel: Kernel, ports: Mapping[str, int]) -> None:
        """Say where the model serves, and what to try."""
        self._kernel, self._ports = kernel, ports
        self._opened.set()
        where = [f"{name} {self._url(name).partition('//')[2]}" for name in ("http", "grpc") if name in ports]
        self._say(f"Serving {self._target.repository / self._target.name} ({', '.join(where)})")
        self._ready()
        breakpoints = "breakpoint() stops here" if self._device else "breakpoint() does nothing: there is no terminal"
        self._say(f"Saved files are loaded at once; {breakpoints}; Ctrl-C ends.")

    # ---- reloads -----------------------------------------------------------------------------

    async def _reload_on_save(self) -> None:
        await self._opened.wait()
        while True:
            await asyncio.sleep(_LOOK_S)
            changed = self._watch.look(await asyncio.to_thread(self._files), time.monotonic_ns())
            if changed:
                await self._reload(changed)

    def _files(self) -> Files:
        """List the model's files, and the files of the models of an ensemble's steps. Blocks."""
        try:
            return files_of(folder.entry for folder in self._target.scan().models.values())
        except ServingError:  # a folder that is being replaced
            return {}

    async def _reload(self, changed: Sequence[str]) -> None:
        assert self._kernel is not None, "a reload before the start"
        name, began = self._target.name, time.monotonic()
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        self._say(f"{_now()} saved {', '.join(changed[:3])}{more}: loading")
        try:
            await self._kernel.repository.load(name)
        except ServingError as error:
            kept = f"; the version of {self._serving_since} still serves" if self._serving_since else ""
            # Of a wrong configuration Triton's error says only that there is one; its cause says where.
            wrong = error.__cause__ if _POLL_FAILED in error.message else None
            reason = wrong.message if isinstance(wrong, ServingError) else error.message
            self._say(f"{_now()} {name} does not load: {await asyncio.to_thread(self._helped, reason)}{kept}")
        else:
            self._say(f"{_now()} loaded in {time.monotonic() - began:.2f} s")
            self._ready(again=bool(self._serving_since))

    def _ready(self, *, again: bool = False) -> None:
        """Note that the model serves, if so; show requests to try unless they were shown before."""
        assert self._kernel is not None, "ready before the start"
        try:
            spec = self._kernel.catalog.resolve(self._target.name).spec
        except ServingError:
            return
        self._serving_since = _now()
        if not again and "http" in self._ports:
            lines = request_lines(spec, self._url("http"), program())
            self._say("Try it in another terminal:\n" + "".join(f"\n    {line}\n" for line in lines))

    def _helped(self, reason: str) -> str:
        """Return a reason as an author needs it, and what helps in a line of its own, if that is known. Blocks."""
        try:
            folder = self._target.scan().models.get(self._target.name)
        except ServingError:  # a folder that is being replaced
            folder = None
        # By its name: no package imports one above it, but for the composition root.
        registry = importlib.import_module("backends.registry")
        backends = registry.known_backends(self._options.repository.backend_directory)
        hint = "" if folder is None else hint_for(folder, reason, backends)
        return self._short(reason) + (f"\nhint: {hint}" if hint else "")

    def _short(self, reason: str) -> str:
        """Return a reason without what an author of one model knows, and without frames that the worker has shown."""
        reason = reason.partition(_FRAMES)[0] if self._device else reason
        return _LOAD_FAILED.sub("", reason).strip().rstrip(";")

    def _url(self, door: str) -> str:
        listener = self._options.http_listener if door == "http" else self._options.grpc_listener
        return server_url(listener.address, self._ports[door])

    def _say(self, text: str) -> None:
        self._print(f"{printable(text, keep=chr(10))}\n")


def for_author(record: logging.LogRecord, *, shown_by_worker: bool) -> bool:
    """Whether an author wants to see a line of the log: what the model says, and what is wrong.

    `shown_by_worker`: the worker has a terminal, and shows exceptions of the model there.
    """
    if record.name == "model":
        return not shown_by_worker or _FRAMES not in record.getMessage()
    if record.levelno >= logging.ERROR:
        return not record.name.startswith("kernel.repository")  # `AuthorTerminal` says why a load has failed
    return record.levelno >= logging.WARNING


def _now() -> str:
    return time.strftime("%H:%M:%S")
