"""Models that are served without a model repository."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from kernel.config.autofill import FORMATS
from kernel.errors import BadOption
from kernel.flags.read import DEFAULTS
from kernel.tools.run import KINDS, folders_of, is_single_model, options_with_repositories
from kernel.tree_files import TREE_FILE_NAMES

if TYPE_CHECKING:
    from kernel.options import ServerOptions


def options_for(*paths: Path) -> ServerOptions:
    return msgspec.structs.replace(DEFAULTS, repository=msgspec.structs.replace(DEFAULTS.repository, paths=paths))


def local_paths(options: ServerOptions) -> list[Path]:
    return [path for path in options.repository.paths if isinstance(path, Path)]


def write(path: Path, text: str = "model") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_is_the_first_version_of_a_model_with_its_name(tmp_path: Path) -> None:
    file = write(tmp_path / "resnet-50.v2.onnx")
    with options_with_repositories(options_for(file)) as options:
        [repository] = local_paths(options)
        assert [each.name for each in repository.iterdir()] == ["resnet-50.v2"]
        assert (repository / "resnet-50.v2" / "1" / "model.onnx").read_text() == "model"
    assert not repository.exists()
    assert file.exists()


def test_weights_beside_a_file_are_beside_its_model(tmp_path: Path) -> None:
    file = write(tmp_path / "net.onnx")
    for name in ("net.onnx.data", "net_weights", "decoder.onnx_data", "other.onnx", "photo.jpg"):
        write(tmp_path / name, name)
    with options_with_repositories(options_for(file)) as options:
        version = local_paths(options)[0] / "net" / "1"
        assert {each.name for each in version.iterdir()} == {
            "model.onnx", "net.onnx.data", "net_weights", "decoder.onnx_data",
        }  # fmt: skip
        assert (version / "net.onnx.data").read_text() == "net.onnx.data"


def test_folders_stay_and_several_files_share_a_repository(tmp_path: Path) -> None:
    files = [write(tmp_path / folder / "model.onnx", folder) for folder in ("a", "b")]
    with options_with_repositories(options_for(files[0], tmp_path, files[1])) as options:
        made, folder = local_paths(options)
        assert folder == tmp_path
        assert {each.name: (each / "1/model.onnx").read_text() for each in made.iterdir()} == {"a": "a", "b": "b"}


def test_a_name_of_a_file_that_no_url_can_have_is_changed(tmp_path: Path) -> None:
    with options_with_repositories(options_for(write(tmp_path / "my net (1)?.onnx"))) as options:
        assert [each.name for each in local_paths(options)[0].iterdir()] == ["my-net-1"]


def test_a_system_without_room_for_links_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> tuple[str, int]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kernel.tools.run.new_locked_folder", full)
    with (
        pytest.raises(BadOption, match="cannot be served: .*No space left"),
        options_with_repositories(options_for(write(tmp_path / "net.onnx"))),
    ):
        pass


def test_commands_for_folders_get_a_repository_in_place_of_files(tmp_path: Path) -> None:
    file = write(tmp_path / "net.onnx")
    with folders_of([file, tmp_path]) as [made, folder]:
        assert (made / "net" / "1" / "model.onnx").read_text() == "model"
        assert folder == tmp_path
    assert not made.exists()
    with folders_of([tmp_path, tmp_path / "absent.onnx"]) as paths:
        assert paths == [tmp_path, tmp_path / "absent.onnx"]


def test_models_of_one_name_get_two(tmp_path: Path) -> None:
    files = [write(tmp_path / folder / "net.onnx", folder) for folder in ("a", "b")]
    with options_with_repositories(options_for(*files)) as options:
        [made] = local_paths(options)
        assert {each.name: (each / "1/model.onnx").read_text() for each in made.iterdir()} == {"net": "a", "net-2": "b"}


def test_a_python_file_is_a_model_with_the_files_and_packages_beside_it(tmp_path: Path) -> None:
    file = write(tmp_path / "service.py", "code")
    for name in ("helper.py", "weights.npz", "package/__init__.py", "photos/1.jpg", ".hidden"):
        write(tmp_path / name)
    write(tmp_path / "config.pbtxt", "configuration")
    with options_with_repositories(options_for(file)) as options:
        model = local_paths(options)[0] / "service"
        assert (model / "1" / "model.py").read_text() == "code"
        assert {each.name for each in (model / "1").iterdir()} == {"model.py", "helper.py", "weights.npz", "package"}
        assert (model / "config.pbtxt").read_text() == "configuration"


def test_a_file_called_model_has_the_name_of_its_model_s_folder(tmp_path: Path) -> None:
    files = [write(tmp_path / "double/1/model.py"), write(tmp_path / "flat/model.py")]
    with options_with_repositories(options_for(*files)) as options:
        assert {each.name for each in local_paths(options)[0].iterdir()} == {"double", "flat"}


def test_the_folder_of_one_model_is_served_beside_others(tmp_path: Path) -> None:
    write(tmp_path / "models/one/1/model.onnx", "one")
    write(tmp_path / "models/two/1/model.onnx", "two")
    file = write(tmp_path / "three.onnx", "three")
    with options_with_repositories(options_for(tmp_path / "models/one", file)) as options:
        [made] = local_paths(options)
        assert {each.name: (each / "1/model.onnx").read_text() for each in made.iterdir()} == {
            "one": "one", "three": "three",
        }  # fmt: skip


def test_repositories_and_what_cannot_be_read_are_no_single_models(tmp_path: Path) -> None:
    write(tmp_path / "models/one/1/model.onnx")
    write(tmp_path / "photo.jpg")
    assert is_single_model(tmp_path / "models/one")
    for path in ("models", "photo.jpg", "absent.onnx", "models/one/1/model.onnx/inside"):
        assert not is_single_model(tmp_path / path)


@pytest.mark.parametrize(
    ("name", "content", "filename"),
    [
        ("churn.json", b'{ "learner" : {}}', "xgboost.json"),
        ("churn.ubj", b"{L\0\0\0\0\0\0\0\7learner", "xgboost.ubj"),
        ("churn.bst", b"{L\0\0\0\0\0\0\0\7learner", "xgboost.ubj"),
        ("churn.model", b"binf\0\0\0\0", "xgboost.model"),
        ("churn.txt", b"tree\nversion=v4\n", "model.txt"),
        ("churn.tl", b"\4\0\0\0\1\0\0\0\0\0\0\0\3\3", "checkpoint.tl"),
        ("churn.skops", b"PK", "model.skops"),
        ("churn.joblib", b"\x80\4", "model.joblib"),
        ("churn.pkl", b"\x80\4", "model.pkl"),
        ("churn.pickle", b"\x80\4", "model.pickle"),
        ("churn.pt", b"PK", "model.pt"),
        ("churn.pt2", b"PK", "model.pt2"),
    ],
)
def test_files_of_libraries_have_the_names_that_their_backends_look_for(
    tmp_path: Path, name: str, content: bytes, filename: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with options_with_repositories(options_for(tmp_path / name)) as options:
        [repository] = local_paths(options)
        assert [each.name for each in (repository / "churn" / "1").iterdir()] == [filename]


@pytest.mark.parametrize("name", ["package.json", "notes.txt", "x.model", "x.ubj", "x.tl"])
def test_other_files_with_such_endings_are_no_models(tmp_path: Path, name: str) -> None:
    assert not is_single_model(write(tmp_path / name, '{"name": "x"}'))
    (tmp_path / name).unlink()
    assert not is_single_model(tmp_path / name)


def test_a_folder_of_mlflow_is_the_version_of_a_model(tmp_path: Path) -> None:
    write(tmp_path / "churn/MLmodel", "flavors: {}")
    write(tmp_path / "churn/data/model.ubj", "trees")
    assert is_single_model(tmp_path / "churn")
    assert not is_single_model(tmp_path)
    write(tmp_path / "churn/config.pbtxt", 'backend: "mlflow"')
    with options_with_repositories(options_for(tmp_path / "churn")) as options:
        [repository] = local_paths(options)
        assert (repository / "churn/1/data/model.ubj").read_text() == "trees"
        assert (repository / "churn/config.pbtxt").read_text() == 'backend: "mlflow"'


def test_the_table_of_files_names_only_what_the_table_of_formats_finds() -> None:
    found = {kind.filename for kind in KINDS.values() if kind.filename} | set(TREE_FILE_NAMES.values())
    assert found <= {each.filename for each in FORMATS}
