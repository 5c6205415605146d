"""What is imported before workers are forked, and what is not."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from backends import registry
from backends.worker.preloading import PreloadFailed
from backends.zygote.preloader import Preloader, ThreadsStarted, thread_names

if TYPE_CHECKING:
    from pathlib import Path


def test_what_all_workers_need_is_imported_and_telemetry_is_off(
    one_thread: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    Preloader()
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"
    assert "backends.worker.loop" in sys.modules


def test_the_worker_that_forks_become_is_made_once(one_thread: list[str]) -> None:
    preloader = Preloader()
    prepared = preloader.prepared
    preloader.import_backend("identity")
    assert preloader.prepared is prepared
    assert prepared.channel.progress[0] == 0
    assert not prepared.worker.rehearses


def test_what_the_operator_says_of_telemetry_stays(one_thread: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "0")
    Preloader()
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "0"


def test_built_in_backends_are_imported_and_others_are_not(
    one_thread: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "backends.builtin.decoupled", raising=False)
    preloader = Preloader()
    preloader.import_backend("no such backend")
    preloader.import_backend("square")
    assert "backends.builtin.decoupled" in sys.modules
    monkeypatch.delitem(sys.modules, "backends.builtin.decoupled")
    preloader.import_backend("square")
    assert "backends.builtin.decoupled" not in sys.modules, "it is imported once"


def test_a_backend_that_cannot_be_imported_is_left_to_the_worker(
    one_thread: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.BUILT_IN, "square", "no_such_module_x:Backend")
    Preloader().import_backend("square")


def test_modules_are_imported_before_the_file_is_run(one_thread: list[str], tmp_path: Path) -> None:
    file = tmp_path / "preload.py"
    file.write_text(
        "import sys, pathlib; pathlib.Path(__file__).with_name('ran').write_text(str('wave' in sys.modules))"
    )
    Preloader().import_chosen(("colorsys",), str(file))
    assert (tmp_path / "ran").read_text() == str("wave" in sys.modules)
    assert "colorsys" in sys.modules


@pytest.mark.parametrize(
    ("modules", "source", "text"),
    [
        (
            ("json", "no_such_module_x"),
            "",
            "'no_such_module_x' cannot be imported: ModuleNotFoundError: No module named",
        ),
        ((), "1 / 0", "preload.py failed: ZeroDivisionError: division by zero"),
        ((), "if", "preload.py failed: SyntaxError: "),
    ],
)
def test_a_failure_says_what_it_was(
    one_thread: list[str], tmp_path: Path, modules: tuple[str, ...], source: str, text: str
) -> None:
    file = tmp_path / "preload.py"
    file.write_text(source)
    with pytest.raises(PreloadFailed) as failure:
        Preloader().import_chosen(modules, str(file) if source else "")
    assert str(failure.value).startswith(text)


def test_threads_that_are_left_are_named(one_thread: list[str]) -> None:
    preloader = Preloader()
    one_thread.append("left")
    with pytest.raises(ThreadsStarted) as failure:
        preloader.import_chosen(("json",), "")
    assert str(failure.value) == "2 threads (zygote, left)"


def test_threads_are_counted() -> None:
    before = len(thread_names())
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    assert len(thread_names()) == before + 1
    go_on.set()
    thread.join()
