from __future__ import annotations

import pytest

from kernel.errors import InvalidArgument
from kernel.repository.layout import (
    Entry,
    can_be_model,
    check_model_name,
    find_models,
    known_names,
    model_folder,
    overriding_folder,
)
from kernel.texts import has_control


def folder(name: str, *children: Entry | str) -> Entry:
    """Return a folder. A string among `children` is the name of a file."""
    inside = tuple(child if isinstance(child, Entry) else Entry(child) for child in children)
    return Entry(name, is_folder=True, children=inside)


def test_version_folders_are_sorted_by_their_number() -> None:
    model = model_folder("/repository", folder("m", folder("10"), folder("9"), folder("0"), "2"))
    assert list(model.versions) == [0, 9, 10]
    assert model.warnings == ()
    assert model.path == "/repository/m"


def test_folders_that_look_like_versions_cause_warnings() -> None:
    model = model_folder(
        "/r",
        folder("m", folder("01"), folder("abc"), folder("-1"), folder("٣"), folder("9" * 19), folder("1")),
    )
    assert list(model.versions) == [1]
    assert model.warnings == (
        "ignore version directory '-1' which fails to convert to integral number",
        "ignore version directory '01' which contains leading zeros in its directory name",
        "ignore version directory '9999999999999999999' which fails to convert to integral number",
        "ignore version directory 'abc' which fails to convert to integral number",
        "ignore version directory '٣' which fails to convert to integral number",
    )


def test_the_other_folders_of_a_model_cause_no_warnings() -> None:
    model = model_folder("/r", folder("m", *map(folder, ("configs", "warmup", "initial_state", ".git", "1"))))
    assert list(model.versions) == [1]
    assert model.warnings == ()


def test_an_alternative_configuration_is_selected_by_name() -> None:
    model = model_folder("/r", folder("m", "config.pbtxt", folder("configs", "fast.pbtxt")))
    assert model.config_path() == "/r/m/config.pbtxt"
    assert model.config_path("fast") == "/r/m/configs/fast.pbtxt"
    assert model.config_path("unknown") == "/r/m/config.pbtxt"
    assert model.config_path("../config") == "/r/m/config.pbtxt"


def test_a_model_may_have_no_configuration() -> None:
    assert model_folder("/r", folder("m", folder("config.pbtxt"))).config_path() is None
    assert model_folder("/r", folder("m")).config_path() is None


def test_the_backend_is_guessed_from_the_version_whose_name_sorts_first() -> None:
    model = model_folder("/r", folder("m", folder("9", "model.py"), folder("10", "model.onnx", folder("data"))))
    assert model.first_version_files() == {"model.onnx": False, "data": True}
    assert model_folder("/r", folder("m", folder("x", "model.py"))).first_version_files() is None


def test_models_are_the_folders_of_all_repositories() -> None:
    contents = find_models(
        {"/a": [folder("m2", folder("1")), Entry("README.md"), folder(".git")], "/b": [folder("m1")]}
    )
    assert list(contents.models) == ["m1", "m2"]
    assert contents.models["m2"].path == "/a/m2"
    assert contents.duplicates == {}


def test_a_model_in_two_repositories_is_a_duplicate() -> None:
    contents = find_models({"/a": [folder("m"), folder("n")], "/b": [folder("m")]})
    assert list(contents.models) == ["n"]
    assert contents.duplicates == {"m": ("/a/m", "/b/m")}


def test_a_change_of_any_file_makes_folders_unequal() -> None:
    before = model_folder("/r", folder("m", folder("1", Entry("model.py", modified_ns=1))))
    same = model_folder("/r", folder("m", folder("1", Entry("model.py", modified_ns=1))))
    after = model_folder("/r", folder("m", folder("1", Entry("model.py", modified_ns=2))))
    assert before == same
    assert before != after


@pytest.mark.parametrize("name", ["m", "a.b", ".a.", "ü", " m"])
def test_names_of_folders_are_accepted(name: str) -> None:
    check_model_name(name)


@pytest.mark.parametrize("name", [".", "..", "..a", "a..b", "../m", "a/b", "/m", "a\\b", "a\0"])
def test_names_with_path_traversal_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_model_name(name)
    assert caught.value.message == (
        f"invalid model name '{name}', model name must not contain path traversal characters"
    )


def test_with_namespacing_every_repository_has_its_own_model_of_a_name() -> None:
    contents = find_models({"/a": [folder("m")], "/b": [folder("m")]}, namespacing=True)
    assert list(contents.models) == ["/a::m", "/b::m"]
    assert [model.name for model in contents.named("m")] == ["m", "m"]
    assert contents.duplicates == {}
    assert known_names({"/a": ["m"], "/b": ["m"]}, namespacing=True) == ({"/a::m": "m", "/b::m": "m"}, set())


def test_known_names_contain_duplicates() -> None:
    assert known_names({"/a": ["m", "n"], "/b": ["m"]}) == ({"m": "m", "n": "n"}, {"m"})


def test_an_overriding_folder_has_the_name_of_its_model() -> None:
    model = overriding_folder("m", "/tmp/x", (folder("1", "model.py"), Entry("config.pbtxt")))
    assert (model.name, model.identifier, model.path, list(model.versions)) == ("m", "m", "/tmp/x", [1])


def test_a_name_of_only_white_space_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="^model name must not contain only whitespace characters$"):
        check_model_name(" \t")


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"^Model name cannot be empty"):
        check_model_name("")


@pytest.mark.parametrize("character", ["\n", "\r", "\x1b", "\x7f", "\x85", "\u2028"])
def test_a_name_with_a_control_character_is_refused_and_none_is_in_the_error(character: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_model_name(f"a{character}b")
    assert caught.value.message.endswith("', model name must not contain control characters")
    assert not has_control(caught.value.message)


def test_a_name_that_no_folder_can_have_is_refused() -> None:
    check_model_name("é" * 127)
    with pytest.raises(InvalidArgument, match="model name must have at most 255 bytes, it has 256$"):
        check_model_name("é" * 128)


def test_folders_with_control_characters_in_their_names_are_not_models() -> None:
    contents = find_models({"/a": [folder("m"), folder("a\x1b[2J", folder("1")), Entry("x\ny"), folder(".\n")]})
    assert list(contents.models) == ["m"]
    assert contents.misnamed == ("/a/a\x1b[2J",)
    assert [can_be_model(name) for name in ("m", ".m", "a\nb", "é x")] == [True, False, False, True]
