"""Builds the distribution: setuptools does it, and the public module `naiad` is added.

`naiad` is in `kernel/importable`, because the top of the repository has no other folders, and setuptools can install it
from there only by an import hook of its own, which slows each start of Python and which type checkers do not follow.
So a wheel gets a copy of it beside the other packages, and an editable installation one more line of a path file.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_FOLDER = Path(__file__).resolve().parent.parent / "importable"
_PATH_FILE = "naiad_importable.pth"


def build_wheel(
    wheel_directory: str, config_settings: Mapping[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """See PEP 517. The wheel has the files of `kernel/importable` at its top."""
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    files = {
        path.relative_to(_FOLDER).as_posix(): path.read_bytes()
        for path in sorted(_FOLDER.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }
    add_files(Path(wheel_directory, name), files)
    return name


def build_editable(
    wheel_directory: str, config_settings: Mapping[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """See PEP 660. The path of the interpreter gets `kernel/importable` too."""
    name: str = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    add_files(Path(wheel_directory, name), {_PATH_FILE: os.fsencode(f"{_FOLDER}\n")})
    return name


def add_files(wheel: Path, files: Mapping[str, bytes]) -> None:
    """Add files (name → content) to a wheel, and to its list of files."""
    written = wheel.with_suffix(".tmp")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                content += _record(files).encode()
            new.writestr(entry, content, zipfile.ZIP_DEFLATED)
        for name, content in files.items():
            new.writestr(name, content)
    written.replace(wheel)


def _record(files: Mapping[str, bytes]) -> str:
    """Return lines of RECORD: the name, digest and size of each file."""
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        writer.writerow([name, f"sha256={digest}", len(content)])
    return lines.getvalue()
