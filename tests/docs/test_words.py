"""Documents are written in the words of the glossary, and stay short where readers begin."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.docs.documents import DOCUMENTS, document, name_of, prose, section, table

if TYPE_CHECKING:
    from pathlib import Path

GLOSSARY = document("docs/glossary.md")

#: How a word of the glossary's list may end in a text.
_ENDINGS = r"(?:s|es|ed|ing)?"


def unwanted_words() -> list[str]:
    """Return the words and phrases that documents do not use."""
    rows = table(section(GLOSSARY, "Words that are not used"))
    return [word.strip() for row in rows for word in row[0].split(",")]


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.name != "glossary.md"], ids=name_of)
def test_words_that_the_glossary_excludes_are_not_used(path: Path) -> None:
    text = re.sub(r"\s+", " ", prose(path.read_text()))
    found = [
        text[max(match.start() - 40, 0) : match.end() + 40]
        for word in unwanted_words()
        for match in re.finditer(rf"\b{re.escape(word)}{_ENDINGS}\b", text, re.IGNORECASE)
    ]
    assert found == []


def test_the_glossary_explains_each_word_once() -> None:
    explained = [row[0] for row in table(GLOSSARY[: GLOSSARY.index("## Verbs")])]
    words = [word.strip(" *") for cell in explained for word in cell.split(",")]
    assert len(words) > 50
    assert len(words) == len(set(words))
    assert set(words) & set(unwanted_words()) == set()


def test_the_readme_is_read_in_one_sitting() -> None:
    assert len(document("README.md").splitlines()) < 150


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_lines_are_not_wider_than_a_screen(path: Path) -> None:
    """Rows of tables cannot be broken, nor can commands and links."""
    wide = [
        line
        for line in path.read_text().splitlines()
        if len(line) > 120 and not line.startswith(("|", "    ", "make ", "![", "curl "))
    ]
    assert wide == []


def test_every_decision_is_in_the_index_with_its_four_parts() -> None:
    index = document("docs/decisions/README.md")
    pages = [path for path in DOCUMENTS if path.parent.name == "decisions" and path.name != "README.md"]
    for page in pages:
        assert f"({page.name})" in index
        headings = re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE)
        assert headings == ["Context", "Decision", "Figures", "Consequences"], page.name
