"""In which file each trace is written."""

from __future__ import annotations

from kernel.settings import TraceValues
from kernel.tracing.output.files import FileChoice, TraceFiles


def choice(files: TraceFiles, **settings: int) -> FileChoice:
    return FileChoice(TraceValues(("TIMESTAMPS",), **settings), "/t", files)  # type: ignore[arg-type]


def paths(choice: FileChoice, *parents: int) -> list[str]:
    """Return the files of traces with these parents, as the output of a writer chooses them."""
    found: list[str] = []
    for parent in parents:
        path = found[-1] if choice.room else choice.next_file().path
        choice.room -= not parent
        found.append(path)
    return found


def test_all_traces_share_one_file_without_a_log_frequency() -> None:
    files = TraceFiles()
    first, second = choice(files), choice(files)
    assert paths(first, 0, 0) == ["/t", "/t"]
    assert first.next_file() is second.next_file(), "also with other settings"


def test_a_log_frequency_gives_each_number_of_traces_a_file_and_children_do_not_count() -> None:
    assert paths(choice(TraceFiles(), log_frequency=2), 0, 1, 1, 0, 2, 0, 0, 0) == [
        "/t.0", "/t.0", "/t.0", "/t.0", "/t.1", "/t.1", "/t.1", "/t.2",
    ]  # fmt: skip


def test_traces_that_are_limited_in_number_have_a_file_with_an_index() -> None:
    assert paths(choice(TraceFiles(), trace_count=5), 0, 0) == ["/t.0", "/t.0"]


def test_indexes_go_on_when_settings_change() -> None:
    files = TraceFiles()
    assert paths(choice(files, log_frequency=1), 0, 0) == ["/t.0", "/t.1"]
    assert paths(choice(files, log_frequency=5), 0) == ["/t.2"]
