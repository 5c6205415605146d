"""Which model answers, and what is said where none does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from kernel.errors import InvalidArgument, ModelNotFound, ModelNotReady, NoAvailableVersion
from kernel.serving.catalog import Catalog, IndexItem, ModelState, parse_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.serving.model import Model


def model(name: str, version: int, *, ready: bool = True, trouble: str = "", steps: Sequence[str] = ()) -> Model:
    parts = [SimpleNamespace(model_name=step, model_version="", namespace="") for step in steps]
    ensemble = SimpleNamespace(steps=parts)
    spec = SimpleNamespace(ensemble=ensemble if steps else None)
    made = SimpleNamespace(name=name, version=version, ready=ready, trouble=trouble, spec=spec)
    made.follows, made.finishes_sequences = lambda former: None, False
    return cast("Model", made)


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


def test_a_listing_without_news_leaves_what_was_found_before_valid(catalog: Catalog) -> None:
    before = catalog.generation
    catalog.set_known({"a", "never"})
    assert catalog.generation == before
    catalog.set_known({"a", "never"}, {"a"})
    catalog.set_known({"a", "new"}, {"a"})
    assert catalog.generation == before + 2


def test_a_version_can_be_asked_for(catalog: Catalog) -> None:
    assert catalog.resolve("a", "1").version == 1


def test_unknown_models_and_versions_are_told_apart(catalog: Catalog) -> None:
    with pytest.raises(ModelNotFound, match="^Request for unknown model: 'b' is not found$"):
        catalog.resolve("b")
    with pytest.raises(ModelNotFound, match="^Request for unknown model: 'a' version 9 is not found$"):
        catalog.resolve("a", "9")
    with pytest.raises(ModelNotFound, match="'a' version 0 is not found$"):
        catalog.resolve("a", "0x1")
    catalog.set_state("a", 3, ModelState.UNAVAILABLE, "broken")
    with pytest.raises(ModelNotReady, match="'a' version 3 is not at ready state$"):
        catalog.resolve("a", "3")
    catalog.set_state("a", 1, ModelState.UNAVAILABLE, "unloaded")
    with pytest.raises(NoAvailableVersion, match="'a' has no available versions$"):
        catalog.resolve("a")


@pytest.mark.parametrize("text", ["x", "", " ", "+-1", "٣", "\u20031", "9" * 30, "-" + "9" * 30, "9" * 5000])
def test_a_version_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="failed to get model version from specified version string"):
        parse_version(text)


@pytest.mark.parametrize("text", [" 1", "\t1", "+1", "01", "1x", "1 ", "1.5", "0" * 100 + "1"])
def test_a_version_is_the_number_that_the_text_begins_with(text: str) -> None:
    assert parse_version(text) == 1


@pytest.mark.parametrize("text", ["-1", "-7"])
def test_a_negative_version_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="invalid model version specified"):
        parse_version(text)


def test_the_index_leaves_out_an_unloaded_model_that_is_no_longer_in_the_repositories(catalog: Catalog) -> None:
    catalog.set_state("gone", 1, ModelState.UNAVAILABLE, "unloaded")
    catalog.set_state("gone", 2, ModelState.UNLOADING)
    assert "gone" in catalog.identifiers()
    catalog.set_state("gone", 2, ModelState.UNAVAILABLE, "unloaded")
    assert "gone" not in catalog.identifiers()
    catalog.set_state("failed", 1, ModelState.UNAVAILABLE, "it does not start")
    assert "failed" in catalog.identifiers()


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


def test_the_index_says_what_is_wrong_with_a_version_that_serves(catalog: Catalog) -> None:
    catalog.set_state("a", 3, ModelState.READY, "", model("a", 3, trouble="instance 'a_0' busy for 73 s"))
    assert catalog.index(ready=True) == [
        IndexItem("a", "1", "READY"),
        IndexItem("a", "3", "READY", "instance 'a_0' busy for 73 s"),
    ]
    catalog.set_state("a", 3, ModelState.READY, "the reload failed", model("a", 3, trouble="busy"))
    assert catalog.index(ready=True)[1].reason == "the reload failed"


def test_a_version_without_a_living_instance_is_unavailable_wherever_a_client_looks(catalog: Catalog) -> None:
    lost = model("a", 3, ready=False, trouble="instance 'a_0' was lost and is started again: exit code 7")
    catalog.set_state("a", 3, ModelState.READY, "", lost)
    assert catalog.index()[1] == IndexItem("a", "3", "UNAVAILABLE", lost.trouble)
    assert [item.version for item in catalog.index(ready=True)] == ["1"]
    assert not catalog.can_execute(lost)
    assert not catalog.all_ready()
    assert catalog.resolve("a") is lost, "requests wait for the next worker"


def test_an_ensemble_is_unavailable_while_a_model_of_its_steps_is(catalog: Catalog) -> None:
    inner, outer = model("inner", 1, steps=["a"]), model("outer", 1, steps=["inner"])
    for each in (inner, outer):
        catalog.set_state(each.name, 1, ModelState.READY, "", each)
    assert catalog.can_execute(outer)
    assert catalog.all_ready()
    catalog.set_state("a", 3, ModelState.READY, "", model("a", 3, ready=False))
    assert not catalog.can_execute(outer)
    assert catalog.index()[-1] == IndexItem("outer", "1", "UNAVAILABLE", "model 'inner' of a step cannot execute now")
    for version in (1, 3):
        catalog.set_state("a", version, ModelState.UNAVAILABLE, "unloaded")
    assert not catalog.can_execute(outer)


def test_wanted_are_the_versions_that_serve_or_should(catalog: Catalog) -> None:
    catalog.set_known({"a", "b", "never_loaded"})
    catalog.set_state("a", 1, ModelState.UNAVAILABLE, "unloaded")
    catalog.set_state("b", 1, ModelState.UNAVAILABLE, "it failed")
    catalog.set_broken("odd", "no configuration", is_model=False)
    assert [(item.name, item.version, item.state) for item in catalog.wanted() if item.name != "a"] == [
        ("b", "1", "UNAVAILABLE"),
        ("odd", "", "UNAVAILABLE"),
    ]
    assert [item.version for item in catalog.wanted() if item.name == "a"] == ["3"]


def test_strict_readiness_wants_every_model_alive_but_not_those_unloaded_on_request(catalog: Catalog) -> None:
    assert catalog.all_ready()
    catalog.set_state("a", 1, ModelState.UNAVAILABLE, "unloaded")
    assert catalog.all_ready()
    catalog.set_state("b", 1, ModelState.READY, "", model("b", 1, ready=False))
    assert not catalog.all_ready()
    catalog.set_state("b", 1, ModelState.UNAVAILABLE, "it failed")
    assert not catalog.all_ready()
    catalog.set_state("b", 1, ModelState.UNLOADING, "", model("b", 1))
    assert not catalog.all_ready()


def test_strict_readiness_does_not_want_folders_without_a_valid_configuration(catalog: Catalog) -> None:
    catalog.set_broken("odd", "no configuration", is_model=False)
    assert catalog.all_ready()
    catalog.set_broken("odd", "no version")
    assert not catalog.all_ready()
    catalog.set_broken("odd", None)
    assert catalog.all_ready()


def test_a_model_in_two_repositories_is_always_shown_and_asked_of_nobody(catalog: Catalog) -> None:
    catalog.set_known({"a", "twice"}, {"twice", "a"})
    duplicate = "model appears in two or more repositories"
    assert catalog.index(ready=True) == [
        IndexItem("a", "", "UNAVAILABLE", duplicate),
        IndexItem("twice", "", "UNAVAILABLE", duplicate),
    ]
    assert catalog.all_ready(), "it was not asked to load"
    with pytest.raises(ModelNotFound):
        catalog.resolve("twice")


@pytest.fixture
def both() -> Catalog:
    """The same name in two repositories."""
    made = Catalog(namespacing=True)
    made.set_known({"/a::m": "m", "/b::m": "m", "/b::n": "n"})
    for number, identifier in ((1, "/a::m"), (2, "/b::m"), (1, "/b::n")):
        made.set_state(identifier, number, ModelState.READY, "", model(identifier[-1], number))
    return made


def test_one_name_for_two_models_is_no_answer(both: Catalog) -> None:
    assert both.resolve("n").version == 1
    for version in ("", "1"):
        with pytest.raises(InvalidArgument) as caught:
            both.resolve("m", version)
        assert caught.value.message == (
            "There are 2 identifiers of model 'm' in global map, model namespace must be provided to resolve ambiguity."
        )


def test_once_the_other_is_unloaded_the_name_is_plain(both: Catalog) -> None:
    both.set_state("/a::m", 1, ModelState.UNAVAILABLE, "unloaded")
    both.set_state("/b::m", 2, ModelState.READY, "", model("m", 2))
    assert both.resolve("m").version == 2
    assert both.resolve("m", "2").version == 2
    both.set_state("/a::m", 1, ModelState.READY, "", model("m", 1))
    with pytest.raises(InvalidArgument):
        both.resolve("m")


def test_unknown_names_have_a_code_of_their_own(both: Catalog) -> None:
    with pytest.raises(InvalidArgument, match="^Request for unknown model: 'x' is not found$"):
        both.resolve("x")


def test_the_index_has_both(both: Catalog) -> None:
    assert both.index() == [
        IndexItem("m", "1", "READY"),
        IndexItem("m", "2", "READY"),
        IndexItem("n", "1", "READY"),
    ]
    assert [ready.version for ready in both.ready_models("m")] == [1, 2]
