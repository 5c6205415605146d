"""Which model answers, and what is said where none does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from kernel.catalog import Catalog, IndexItem, ModelState, parse_version
from kernel.errors import InvalidArgument, ModelNotFound, ModelNotReady, NoAvailableVersion

if TYPE_CHECKING:
    from kernel.model import Model


def model(name: str, version: int, *, ready: bool = True) -> Model:
    return cast("Model", SimpleNamespace(name=name, version=version, ready=ready))


@pytest.fixture
def catalog() -> Catalog:
    made = Catalog()
    made.set_known({"a", "never"})
    for version in (1, 3):
        made.set_state("a", version, ModelState.READY, "", model("a", version))
    return made


def test_without_a_version_the_newest_ready_one_answers(catalog: Catalog) -> None:
    assert catalog.resolve("a").version == 3
    catalog.set_state("a", 3, ModelState.UNLOADING)
    assert catalog.resolve("a").version == 1


def test_a_version_can_be_asked_for(catalog: Catalog) -> None:
    assert catalog.resolve("a", "1").version == 1


def test_unknown_models_and_versions_are_told_apart(catalog: Catalog) -> None:
    with pytest.raises(ModelNotFound, match="^Request for unknown model: 'b' is not found$"):
        catalog.resolve("b")
    with pytest.raises(ModelNotFound, match="^Request for unknown model: 'a' version 9 is not found$"):
        catalog.resolve("a", "9")
    catalog.set_state("a", 3, ModelState.UNAVAILABLE, "broken")
    with pytest.raises(ModelNotReady, match="'a' version 3 is not at ready state$"):
        catalog.resolve("a", "3")
    catalog.set_state("a", 1, ModelState.UNAVAILABLE, "unloaded")
    with pytest.raises(NoAvailableVersion, match="'a' has no available versions$"):
        catalog.resolve("a")


@pytest.mark.parametrize("text", ["x", "", "1.0", "٣", "9" * 30, "1 "])
def test_a_version_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="failed to get model version from specified version string"):
        parse_version(text)


@pytest.mark.parametrize("text", ["-1", "-7"])
def test_a_negative_version_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="invalid model version specified"):
        parse_version(text)


def test_the_index_shows_every_model_with_state_and_reason(catalog: Catalog) -> None:
    catalog.set_state("a", 1, ModelState.UNAVAILABLE, "unloaded")
    catalog.set_broken("odd", "no configuration")
    assert catalog.index() == [
        IndexItem("a", "1", "UNAVAILABLE", "unloaded"),
        IndexItem("a", "3", "READY"),
        IndexItem("never"),
        IndexItem("odd", "", "UNAVAILABLE", "no configuration"),
    ]
    assert catalog.index(ready=True) == [IndexItem("a", "3", "READY")]


def test_strict_readiness_wants_every_model_alive_but_not_those_unloaded_on_request(catalog: Catalog) -> None:
    assert catalog.all_ready()
    catalog.set_state("a", 1, ModelState.UNAVAILABLE, "unloaded")
    assert catalog.all_ready()
    catalog.set_state("b", 1, ModelState.READY, "", model("b", 1, ready=False))
    assert not catalog.all_ready()
    catalog.set_state("b", 1, ModelState.UNAVAILABLE, "it failed")
    assert not catalog.all_ready()
