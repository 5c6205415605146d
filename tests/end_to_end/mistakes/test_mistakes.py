"""What a person sees after the commonest mistakes is what the texts beside this file show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.end_to_end.mistakes.cases import MISTAKES
from tests.end_to_end.mistakes.transcript import FOLDER, expected, transcript

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end.mistakes.cases import Mistake


@pytest.mark.parametrize("mistake", MISTAKES, ids=[each.name for each in MISTAKES])
def test_a_person_sees_what_is_wrong_and_what_to_do(mistake: Mistake, tmp_path: Path) -> None:
    assert transcript(mistake, tmp_path.resolve()) == expected(mistake)


def test_every_text_has_its_mistake() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == {each.name for each in MISTAKES}
    assert len(MISTAKES) >= 20
