"""How optional packages of this project are installed, in the words of error texts: in one place."""

from __future__ import annotations


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra of `pyproject.toml`, such as `redis`.

    From a checkout: no index has the package yet.
    """
    return f"pip install '.[{extra}]' (in a checkout of Naiad)"
