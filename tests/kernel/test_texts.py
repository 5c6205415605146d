"""Texts of clients and models are cut, and lose what controls a terminal or ends a line.

Texts for clients have no paths of the server.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import InternalError, ModelLoadFailed
from kernel.texts import SERVER_PATHS, ServerPaths, has_control, limited, printable


@given(st.text(max_size=200), st.integers(8, 100))
def test_a_text_within_the_limit_stays_and_a_longer_one_names_its_length(text: str, limit: int) -> None:
    byte_size = len(text.encode(errors="surrogatepass"))
    found = limited(text, limit)
    if byte_size <= limit:
        assert found == text
    else:
        assert f"… ({byte_size} bytes) …" in found
        assert len(found.encode(errors="surrogatepass")) <= limit + 30


def test_the_begin_and_the_end_of_a_long_text_stay() -> None:
    found = limited(f"model '{'x' * 5000}' is not found", 100)
    assert found == f"model '{'x' * 68}… (5021 bytes) …{'x' * 11}' is not found"


def test_a_cut_never_falls_into_a_character() -> None:
    for limit in range(8, 40):
        assert "\ufffd" not in limited("é€😀" * 20, limit)


@pytest.mark.parametrize("character", ["\0", "\n", "\r", "\x1b", "\x7f", "\x85", "\x9b", "\u2028", "\u2029"])
def test_control_characters_are_written_out(character: str) -> None:
    assert has_control(f"a{character}b")
    shown = printable(f"a{character}b")
    assert not has_control(shown)
    assert shown.startswith("a\\")
    assert printable(f"a{character}b", keep=character) == f"a{character}b"


@given(st.text(max_size=50))
def test_other_characters_stay(text: str) -> None:
    assert printable(text, keep="".join(each for each in text if has_control(each))) == text
    assert not has_control(printable(text))


def hidden(text: str, *folders: str) -> str:
    paths = ServerPaths()
    for folder in folders:
        paths.add(folder)
    return paths.hidden_in(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("unable to find '/srv/models/m/1/model.onnx'", "unable to find 'm/1/model.onnx'"),
        ("At:\n  /srv/models/m/1/model.py(3): initialize\n", "At:\n  m/1/model.py(3): initialize\n"),
        ("failed to read model repository '/srv/models': no such directory", "failed to read model repository 'models'"
         ": no such directory"),
        ("/srv/models/m/config.pbtxt:3:7: wrong", "m/config.pbtxt:3:7: wrong"),
        ("load failed for model '/srv/models::m'", "load failed for model 'models::m'"),
        ("/srv/models//m/1", "m/1"),
    ],
)  # fmt: skip
def test_paths_in_a_folder_of_the_server_become_relative(text: str, shown: str) -> None:
    assert hidden(text, "/srv/models") == shown
    assert hidden(text, "/srv/models/") == shown


@pytest.mark.parametrize("text", ["/data/srv/models/m", "/srv/models2/m", "/srv/models.old", "no path", "a / b", "//"])
def test_other_paths_stay(text: str) -> None:
    assert hidden(text, "/srv/models") == text


def test_the_innermost_of_several_folders_is_hidden() -> None:
    assert hidden("'/srv/a/m' '/srv/a/inner/m'", "/srv/a", "/srv/a/inner") == "'m' 'm'"


@pytest.mark.parametrize("folder", ["/", "//", "", ".", "models", "./models"])
def test_the_root_and_relative_paths_say_nothing_of_the_server(folder: str) -> None:
    assert hidden("/models/m models/m", folder) == "/models/m models/m"


@pytest.mark.parametrize("letter", ["+", "(", "\\", "é", " "])
def test_a_folder_may_have_any_letters(letter: str) -> None:
    assert hidden(f"'/srv/a{letter}b/m/1'", f"/srv/a{letter}b") == "'m/1'"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("'/tmp/naiad-model-a_1b/1/model.py'", "'1/model.py'"),
        ("/home/me/.venv/lib/python3.11/site-packages/torch/nn.py(7): f", "torch/nn.py(7): f"),
        ("/usr/lib/python3/dist-packages/x.py", "x.py"),
        ("/usr/local/lib64/python3.14/json/decoder.py", "json/decoder.py"),
        ("in=/opt/lib/python3.12/site-packages", "in=site-packages"),
        ("venv/lib/python3.11/x.py and/or /python3", "venv/lib/python3.11/x.py and/or /python3"),
    ],
)
def test_files_of_load_requests_and_of_python_are_always_hidden(text: str, shown: str) -> None:
    assert hidden(text) == shown


@pytest.mark.parametrize("piece", ["/a", "/", "/!", "a", "/lib/python3.x", "/naiad-model-", "/naiad-model-a"])
def test_texts_of_clients_take_time_in_proportion_to_their_length(piece: str) -> None:
    text = f"/python3 {piece * 40_000}"  # with squared time this would be minutes
    assert len(hidden(text, "/srv/models")) <= len(text)


def test_a_text_of_megabytes_is_cut_before_it_is_searched() -> None:
    SERVER_PATHS.add("/srv/of-a-test")
    error = InternalError("'/srv/of-a-test/m' " + "/" * 10**7)
    assert error.text.startswith("'m' ////")
    assert len(error.text) < 1100


def test_what_clients_read_of_an_error_has_no_path_but_the_log_has() -> None:
    SERVER_PATHS.add("/srv/of-a-test")
    error = ModelLoadFailed("cannot read '/srv/of-a-test/m/1/model.py'")
    assert error.text == "cannot read 'm/1/model.py'"
    assert error.message == "cannot read '/srv/of-a-test/m/1/model.py'"
    assert InternalError("/srv/of-a-test").text == "of-a-test"
