from __future__ import annotations

import errno
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from kernel.config.load import MAX_BYTE_SIZE
from kernel.errors import InternalError, NoDescriptorLeft
from kernel.repository.layout import ModelFolder, find_models
from kernel.repository.local import list_names, list_repository, read_config, read_file

if TYPE_CHECKING:
    from pathlib import Path


def find_model(repository: str, name: str) -> ModelFolder | None:
    return find_models({repository: list_repository(repository)}).models.get(name)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with model `m`, which has one version."""
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text("pass")
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "python"')
    return tmp_path


def touch(path: Path, modified_ns: int) -> None:
    os.utime(path, ns=(modified_ns, modified_ns))


def test_a_model_is_found_with_its_files(repository: Path) -> None:
    model = find_model(str(repository), "m")
    assert model is not None
    assert model == find_models({str(repository): list_repository(str(repository))}).models["m"]
    assert model.path == str(repository / "m")
    assert list(model.versions) == [1]
    assert model.first_version_files() == {"model.py": False}
    path = model.config_path()
    assert path is not None
    assert read_config(path) == b'backend: "python"'


def test_the_time_of_a_folder_is_that_of_its_newest_child(repository: Path) -> None:
    (repository / "m" / "1" / "data").mkdir()
    touch(repository / "m" / "1" / "data", 5_000)
    touch(repository / "m" / "1" / "model.py", 9_000)
    touch(repository / "m" / "config.pbtxt", 7_000)
    (entry,) = list_repository(str(repository))
    version = entry.child("1")
    assert version is not None
    assert (entry.modified_ns, version.modified_ns) == (9_000, 9_000)
    assert [child.modified_ns for child in version.children] == [5_000, 9_000]


def test_python_s_cache_folder_is_ignored(repository: Path) -> None:
    before = find_model(str(repository), "m")
    (repository / "m" / "1" / "__pycache__").mkdir()
    (repository / "m" / "1" / "__pycache__" / "model.pyc").write_bytes(b"code")
    assert find_model(str(repository), "m") == before


def test_links_are_followed(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "weights"
    elsewhere.mkdir()
    (elsewhere / "model.onnx").write_bytes(b"onnx")
    (repository / "linked").symlink_to(repository / "m")
    (repository / "m" / "2").symlink_to(elsewhere)
    model = find_model(str(repository), "linked")
    assert model is not None
    assert list(model.versions) == [1, 2]
    assert [file.name for file in model.versions[2].children] == ["model.onnx"]


def test_circular_and_broken_links_are_omitted(repository: Path) -> None:
    (repository / "m" / "1" / "up").symlink_to(repository / "m")
    (repository / "m" / "1" / "nothing").symlink_to("/does/not/exist")
    (repository / "m" / "1" / "itself").symlink_to("itself")
    model = find_model(str(repository), "m")
    assert model is not None
    assert model.first_version_files() == {"model.py": False}


def test_a_file_in_a_repository_is_not_a_model(repository: Path) -> None:
    (repository / "file").write_text("")
    assert find_model(str(repository), "file") is None
    assert find_model(str(repository), "absent") is None


def test_a_repository_must_exist(tmp_path: Path) -> None:
    with pytest.raises(InternalError) as caught:
        list_repository(str(tmp_path / "absent"))
    assert caught.value.message == (f"failed to read model repository '{tmp_path / 'absent'}': no such directory")


def test_at_most_one_byte_over_the_limit_of_a_configuration_is_read(repository: Path) -> None:
    path = repository / "m" / "config.pbtxt"
    path.write_bytes(b"#" * (MAX_BYTE_SIZE + 100))
    assert len(read_config(str(path))) == MAX_BYTE_SIZE + 1


def test_a_configuration_that_cannot_be_read_is_an_error(repository: Path) -> None:
    with pytest.raises(InternalError, match=r"failed to read '.*': No such file or directory"):
        read_config(str(repository / "m" / "absent.pbtxt"))


def test_an_impossible_name_is_an_absent_model(repository: Path) -> None:
    assert list_repository(str(repository), "m" * 300) == ()


def test_folders_deep_inside_one_another_are_an_error_and_no_recursion_without_end(repository: Path) -> None:
    inside = os.open(repository / "m" / "1", os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=inside)
        inside, outside = os.open("d", os.O_RDONLY, dir_fd=inside), inside
        os.close(outside)
    os.close(inside)
    with pytest.raises(InternalError, match="more than 100 folders are inside one another$"):
        list_repository(str(repository))
    subprocess.run(["rm", "-r", str(repository / "m" / "1" / "d")], check=True)  # shutil's own is recursive


def test_names_with_control_characters_are_not_listed(repository: Path) -> None:
    (repository / "a\nb").mkdir()
    assert list_names(str(repository)) == ["m"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_without_file_descriptors_the_server_is_unavailable(
    repository: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*given: object, **more: object) -> object:
        raise OSError(number, os.strerror(number), "m")

    monkeypatch.setattr(os, "open", fail)
    monkeypatch.setattr(os, "listdir", fail)
    monkeypatch.setattr(os, "scandir", fail)
    folder = str(repository)
    for read in (
        lambda: list_repository(folder),
        lambda: list_names(folder),
        lambda: read_file(f"{folder}/m", "config.pbtxt", 100),
        lambda: read_config(f"{folder}/m/config.pbtxt"),
    ):
        with pytest.raises(NoDescriptorLeft):
            read()
