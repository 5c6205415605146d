from grpclib.metadata import encode_grpc_message
from hypothesis import given
from hypothesis import strategies as st

from protocols.grpc.status_text import MAX_STATUS_BYTE_SIZE, clean, status_text


def test_ordinary_text_is_left_as_it_is() -> None:
    text = "line one\nline 'two' \"quoted\" 100% é 😀"
    assert clean(text) == text
    assert status_text(text) == text


def test_characters_that_utf8_cannot_encode_become_question_marks() -> None:
    assert clean("caf\udce9") == "caf?"


@given(st.text("a \n%é😀\udce9", max_size=50), st.integers(1, 400))
def test_a_long_status_is_cut_to_what_clients_accept(piece: str, count: int) -> None:
    text = status_text(piece * count)
    assert len(encode_grpc_message(text)) <= MAX_STATUS_BYTE_SIZE
    assert clean(piece * count).startswith(text)


def test_a_status_that_just_fits_is_not_cut() -> None:
    text = "a" * MAX_STATUS_BYTE_SIZE
    assert status_text(text) == text
    assert status_text(text + "b") == text
