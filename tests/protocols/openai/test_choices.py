from __future__ import annotations

import itertools
import random

import pytest

from protocols.openai.choices import ChoiceText, StopWords, WholeCharacters


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Return `data` in pieces that end at `places`."""
    ends = [0, *sorted(places), len(data)]
    return [data[begin:end] for begin, end in itertools.pairwise(ends)]


def before_stop(text: str, words: list[str]) -> str:
    """Return the text before the stop word that ends first; of several the longest."""
    for end in range(1, len(text) + 1):
        if found := [len(word) for word in words if text[:end].endswith(word)]:
            return text[: end - max(found)]
    return text


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語 is fine", "a👍🏽b👨‍👩‍👧c", ""])
def test_a_character_is_sent_whole_wherever_the_pieces_end(text: str) -> None:
    data = text.encode()
    for first in range(len(data) + 1):
        for second in range(first, len(data) + 1):
            characters = WholeCharacters()
            sent = [characters.add(piece) for piece in cut(data, [first, second])]
            assert "\ufffd" not in "".join(sent)
            assert "".join(sent) + characters.end() == text


def test_a_replaced_character_is_held_back_until_its_token_is_complete() -> None:
    characters = WholeCharacters()
    assert characters.add("ok \ufffd".encode()) == "ok "
    assert characters.add(b"next") == "\ufffdnext"
    assert characters.add(b"more") == "more"


def test_replaced_characters_are_not_held_back_for_ever() -> None:
    characters = WholeCharacters()
    sent = [characters.add("\ufffd".encode()) for _ in range(5)]
    assert sent == ["", "", "", "", "\ufffd" * 5]
    assert characters.end() == ""


def test_bytes_that_are_no_utf8_are_replaced_and_what_is_incomplete_comes_at_the_end() -> None:
    characters = WholeCharacters()
    assert characters.add(b"a\xffb") == "a\ufffdb"
    assert characters.add(b"\xe2\x82") == ""
    assert characters.end() == "\ufffd"


def test_the_text_ends_before_a_stop_word_wherever_the_pieces_end() -> None:
    text, words = "one two STOP three", ["STOP"]
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            stop = StopWords(words)
            sent = "".join(stop.add(piece) for piece in (text[:first], text[first:second], text[second:]))
            assert (sent, stop.stopped) == ("one two ", True)


def test_stop_words_cut_random_texts_as_a_search_in_the_whole_text_does() -> None:
    source = random.Random(5)
    for _ in range(3000):
        text = "".join(source.choice("ab") for _ in range(source.randrange(30)))
        words = ["".join(source.choice("ab") for _ in range(source.randrange(1, 6))) for _ in range(3)]
        stop, rest, sent = StopWords(words), text, ""
        while rest:
            length = source.randrange(1, 6)
            sent, rest = sent + stop.add(rest[:length]), rest[length:]
        assert sent + stop.end() == before_stop(text, words), (text, words)


def test_long_pieces_are_cut_as_short_ones_are() -> None:
    """They are searched in another way, and what is at their ends goes on in the next piece."""
    chosen = random.Random(7)
    for _ in range(300):
        words = ["".join(chosen.choices("ab", k=chosen.randint(1, 12))) for _ in range(chosen.randint(1, 3))]
        alphabet = chosen.choice(("ab", "ccccccccab"))
        text = "".join(chosen.choices(alphabet, k=2000))
        short, long = StopWords(words), StopWords(words)
        expected = "".join([short.add(character) for character in text]) + short.end()
        cuts = sorted(chosen.choices(range(2000), k=2))
        pieces = [text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]]
        assert "".join([long.add(piece) for piece in pieces]) + long.end() == expected, (words, text, cuts)
        assert long.stopped is short.stopped


def test_the_beginning_of_a_stop_word_is_held_back_and_sent_when_it_becomes_another_word() -> None:
    stop = StopWords(["###"])
    assert stop.add("a##") == "a"
    assert stop.add("b") == "##b"
    assert stop.add("c##") == "c"
    assert stop.end() == "##"
    assert not stop.stopped


def test_nothing_follows_a_stop_word() -> None:
    text = ChoiceText(["\n\n"])
    assert text.add(b"line\n") == "line"
    assert text.add(b"\nmore") == ""
    assert text.stopped
    assert text.add(b"much more") == text.end() == ""


def test_the_search_for_stop_words_takes_time_in_proportion_to_the_text() -> None:
    """Comparisons are counted, not measured: a text in which every beginning of the word nearly fits."""

    class Counted(str):
        compared = 0

        def __getitem__(self, place):  # type: ignore[no-untyped-def]
            Counted.compared += 1
            return str.__getitem__(self, place)

    def comparisons(length: int) -> int:
        stop, Counted.compared = StopWords(["a" * 255 + "b"]), 0
        [search] = stop._searches
        search.find_end(Counted("a" * length), 0)
        return Counted.compared

    assert comparisons(20_000) <= 2.2 * comparisons(10_000) <= 2.2 * 3 * 10_000
