"""Copies of the source tree, of a commit or of the working tree, in temporary folders."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The working tree that these measurements belong to.
ROOT = Path(__file__).parents[1]


class UnknownCommit(Exception):
    """Git does not know the commit; the message is one line."""


def short_hash(commit: str, repository: Path = ROOT) -> str:
    """Return the short hash of a commit, tag or branch. Raises `UnknownCommit`."""
    name = f"{commit}^{{commit}}"
    command = ["git", "rev-parse", "--verify", "--quiet", "--short", "--end-of-options", name]
    try:
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UnknownCommit(f"git cannot be run: {error}") from None
    if done.returncode or not commit:
        raise UnknownCommit(f"git knows no commit '{commit}' in {repository}")
    return done.stdout.strip().splitlines()[-1]


@contextlib.contextmanager
def checkout(commit: str, repository: Path = ROOT) -> Iterator[Path]:
    """Yield a folder with the files of `commit`. It is removed at the end. Raises `UnknownCommit`."""
    commit = short_hash(commit, repository)
    with tempfile.TemporaryDirectory(prefix=f"naiad-{commit}-") as temporary:
        archive, tree = Path(temporary) / "commit.tar", Path(temporary) / "tree"
        subprocess.run(["git", "archive", f"--output={archive}", commit], cwd=repository, check=True)
        with tarfile.open(archive) as files:
            files.extractall(tree, filter="data")
        archive.unlink()
        yield tree


@contextlib.contextmanager
def snapshot(repository: Path = ROOT) -> Iterator[Path]:
    """Yield a folder with a copy of the working tree, with changes that are not committed. It is removed at the end.

    Later edits do not change the copy. Files that git ignores are left out, as in a checkout.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=repository, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory(prefix="naiad-now-") as temporary:
        tree = Path(temporary) / "tree"
        for name in filter(None, listed.decode().split("\0")):
            if (repository / name).is_file():  # a deleted file is still listed
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(repository / name, tree / name)
        yield tree
