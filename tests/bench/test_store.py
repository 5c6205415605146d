"""Results are written completely or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench import store

if TYPE_CHECKING:
    from pathlib import Path


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    store.write(path, b"old")

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(KeyboardInterrupt):
        store.write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_folders_are_made_with_the_first_result(tmp_path: Path) -> None:
    store.write_json(tmp_path / "a" / "b.json", {"x": 1})
    assert (tmp_path / "a" / "b.json").read_text() == '{\n "x": 1\n}\n'


def test_a_quick_run_does_not_touch_what_is_published() -> None:
    assert store.stem("curve", quick=True).parent != store.stem("curve", quick=False).parent == store.PUBLISHED
