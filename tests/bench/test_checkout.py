"""Copies of the source tree have the right files, and are removed after an interrupt too."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from bench.checkout import UnknownCommit, checkout, short_hash, snapshot

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path


def git(repository: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    (root / "folder").mkdir(parents=True)
    git(root, "init", "--quiet")
    (root / "folder" / "file.py").write_text("old\n")
    (root / "deleted.py").write_text("old\n")
    (root / ".gitignore").write_text("ignored.py\n")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "first")
    (root / "folder" / "file.py").write_text("changed\n")
    (root / "folder" / "new.py").write_text("new\n")
    (root / "ignored.py").write_text("ignored\n")
    (root / "deleted.py").unlink()
    return root


def files(tree: Path) -> dict[str, str]:
    return {str(path.relative_to(tree)): path.read_text() for path in tree.rglob("*") if path.is_file()}


def test_a_checkout_has_what_was_committed(repository: Path) -> None:
    with checkout("HEAD", repository) as tree:
        assert files(tree) == {"folder/file.py": "old\n", "deleted.py": "old\n", ".gitignore": "ignored.py\n"}


def test_a_snapshot_has_what_was_changed_since_but_not_what_git_ignores(repository: Path) -> None:
    with snapshot(repository) as tree:
        (repository / "folder" / "file.py").write_text("later\n")
        assert files(tree) == {
            "folder/file.py": "changed\n", "folder/new.py": "new\n", ".gitignore": "ignored.py\n",
        }  # fmt: skip


def test_copies_are_removed_after_an_interrupt(repository: Path) -> None:
    def interrupted(copy: AbstractContextManager[Path]) -> None:
        with copy as tree:
            trees.append(tree)
            raise KeyboardInterrupt

    trees: list[Path] = []
    for copy in (checkout("HEAD", repository), snapshot(repository)):
        with pytest.raises(KeyboardInterrupt):
            interrupted(copy)
    assert len(trees) == 2
    assert not any(tree.parent.exists() for tree in trees)
    assert git(repository, "worktree", "list").count("\n") == 0


@pytest.mark.parametrize("commit", ["nonsense", "", "--help", "HEAD~99"])
def test_an_unknown_commit_is_one_clear_line(repository: Path, commit: str) -> None:
    with pytest.raises(UnknownCommit) as raised, checkout(commit, repository):
        pass
    assert str(raised.value) == f"git knows no commit '{commit}' in {repository}"


def test_a_branch_is_known_by_its_commit(repository: Path) -> None:
    git(repository, "branch", "old")
    assert short_hash("old", repository) == git(repository, "rev-parse", "--short", "HEAD")
