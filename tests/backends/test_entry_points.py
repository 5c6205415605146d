from __future__ import annotations

import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

from backends.entry_points import entry_points_of

if TYPE_CHECKING:
    from pathlib import Path

GROUP = "naiad.backends"


def install(site: Path, group: str) -> None:
    folder = site / "doubler-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: doubler\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[{group}]\ndoubler = doubler.backend:Doubler\n")


def test_the_entry_points_of_installed_packages_are_found(tmp_path: Path) -> None:
    install(tmp_path, GROUP)
    (point,) = entry_points_of(GROUP, [str(tmp_path)])
    assert (point.name, point.value) == ("doubler", "doubler.backend:Doubler")


def test_other_groups_are_left_out(tmp_path: Path) -> None:
    install(tmp_path, "console_scripts")
    assert entry_points_of(GROUP, [str(tmp_path)]) == []


def test_a_folder_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert entry_points_of(GROUP, [str(tmp_path / "gone")]) == []


def test_packages_in_an_archive_are_found(tmp_path: Path) -> None:
    install(tmp_path / "unpacked", GROUP)
    archive = tmp_path / "packages.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for each in (tmp_path / "unpacked").rglob("*.*"):
            file.write(each, each.relative_to(tmp_path / "unpacked"))
    assert [point.name for point in entry_points_of(GROUP, [str(archive)])] == ["doubler"]


def test_the_list_of_packages_is_not_imported_where_none_adds_a_backend(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom backends.entry_points import entry_points_of\n"
        f"assert entry_points_of({GROUP!r}, [{str(tmp_path)!r}]) == []\nprint('importlib.metadata' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
