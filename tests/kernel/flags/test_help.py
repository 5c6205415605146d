"""The help of `run`: all flags in their groups, wrapped to the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kernel.flags.help import print_help
from kernel.flags.read import FLAGS


def help_text(width: int) -> str:
    stream = io.StringIO()
    print_help(Console(file=stream, width=width))
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_lines_fit_into_the_terminal(width: int) -> None:
    assert max(map(len, help_text(width).splitlines())) <= width


def test_every_flag_is_shown_once() -> None:
    words = [word for line in help_text(80).splitlines() if line.startswith("  ") for word in line.split()]
    for name in FLAGS:
        assert f"--{name}" in words, name


def test_flags_without_effect_are_the_last_group() -> None:
    text = help_text(80)
    titles = ["Models", "HTTP", "gRPC", "Metrics", "Log", "Traces", "Server", "Accepted without effect"]
    positions = [text.index(f"\n{title}\n") for title in titles]
    assert positions == sorted(positions)


def test_defaults_are_shown_as_one_would_type_them() -> None:
    text = help_text(80)
    assert "Port; 0 for any free one. [8000]" in text
    assert "[local]" in text
    assert "[17179869184]" in text
    assert "[that of HTTP]" in text


def test_flags_that_tritonserver_lacks_are_marked() -> None:
    text = help_text(80)
    assert "+ Log every HTTP request and gRPC call. [false]" in text
    assert "--http-port PORT            Port" in text
