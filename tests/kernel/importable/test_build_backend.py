"""Our build backend adds the public module to what setuptools builds."""

from __future__ import annotations

import csv
import hashlib
import zipfile
from base64 import urlsafe_b64encode
from typing import TYPE_CHECKING

from kernel.packaging.build_backend import add_files

if TYPE_CHECKING:
    from pathlib import Path


def test_added_files_are_in_the_wheel_and_in_its_list(tmp_path: Path) -> None:
    wheel = tmp_path / "a-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr("a.py", "A = 1\n")
        files.writestr("a-1.0.dist-info/RECORD", "a.py,,\na-1.0.dist-info/RECORD,,\n")
    add_files(wheel, {"naiad/__init__.py": b"N = 1\n", "with, comma.pth": b"/x\n"})
    with zipfile.ZipFile(wheel) as files:
        assert files.testzip() is None
        assert files.read("naiad/__init__.py") == b"N = 1\n"
        assert files.read("a.py") == b"A = 1\n"
        rows = list(csv.reader(files.read("a-1.0.dist-info/RECORD").decode().splitlines()))
        assert sorted(files.namelist()) == sorted(row[0] for row in rows)
    digest = urlsafe_b64encode(hashlib.sha256(b"N = 1\n").digest()).rstrip(b"=").decode()
    assert ["naiad/__init__.py", f"sha256={digest}", "6"] in rows
    assert ["with, comma.pth", rows[-1][1], "3"] in rows
    assert list(tmp_path.iterdir()) == [wheel]
