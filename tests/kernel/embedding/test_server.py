"""Options that a server in a Python program refuses."""

from __future__ import annotations

import pytest

from kernel.embedding import BadOption, EmbeddedServer


def test_a_program_is_not_made_to_inherit_processes() -> None:
    with pytest.raises(BadOption, match="an embedded server cannot fork its workers: it would have to inherit"):
        EmbeddedServer(worker_start="fork")
    for start in ("auto", "spawn"):
        EmbeddedServer(worker_start=start)
