"""docs/openai.md has the table of fields that the server has, its routes, and an example that runs."""

from __future__ import annotations

import re

from bench.oracle.openai_differences import CHANGED, LEFT_OUT
from kernel.config.model_parameters import DECLARABLE_FIELDS, DECLARABLE_PARTS, TOOL_PARSERS
from protocols.openai.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DETOKENIZE_FIELDS,
    EMBEDDING_FIELDS,
    RESPONSE_FIELDS,
    RESPONSE_STREAM_OPTIONS,
    RESPONSE_TEXT,
    STREAM_OPTIONS,
    TOKENIZE_FIELDS,
    Treatment,
)
from protocols.openai.routes import PATHS
from tests.docs.documents import document, section, table

PAGE = document("docs/openai.md")
TABLES = (CHAT_FIELDS, COMPLETION_FIELDS, EMBEDDING_FIELDS)


def test_every_field_is_in_the_table_with_its_treatment() -> None:
    found = {}
    for names, *treatments in table(section(PAGE, "Fields")):
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in found
            found[name] = tuple(treatments)
    known = {
        name: tuple("—" if name not in each else each[name].treatment.value for each in TABLES)
        for name in set().union(*TABLES)
    }
    known |= {f"stream_options.{name}": (*(each.treatment.value,) * 2, "—") for name, each in STREAM_OPTIONS.items()}
    assert found == known


def test_every_field_of_the_responses_api_is_in_its_table() -> None:
    rows = table(section(PAGE, "The Responses API"))
    found = {name: treatment for names, treatment in rows for name in re.findall(r"`([^`]+)`", names)}
    members = {f"stream_options.{name}": each for name, each in RESPONSE_STREAM_OPTIONS.items()}
    members["text.verbosity"] = RESPONSE_TEXT["verbosity"]
    assert found == {name: each.treatment.value for name, each in (RESPONSE_FIELDS | members).items()}


def test_every_route_is_in_the_table() -> None:
    routes = " ".join(row[0] for row in table(PAGE[: PAGE.index("## A chat model")]))
    assert set(re.findall(r"/[a-z][\w/]*", routes)) == set(PATHS)


def test_the_tests_of_triton_that_differ_are_in_the_tables() -> None:
    found = table(section(PAGE, "Triton's own tests"))
    expected = [*LEFT_OUT.items(), *CHANGED.items()]
    assert [(name.strip("`"), reason) for name, reason in found if name not in ("tests", "---")] == expected


def test_what_models_may_declare_is_what_is_refused_without_it() -> None:
    declared = {name for each in TABLES for name, field in each.items() if field.treatment is Treatment.DECLARED}
    assert declared == DECLARABLE_FIELDS
    assert all(f"`{name}`" in PAGE for name in DECLARABLE_PARTS)


def test_fields_of_tokenizing_are_named() -> None:
    described = section(PAGE, "Chat templates and tokenizers")
    for name in (TOKENIZE_FIELDS.keys() | DETOKENIZE_FIELDS.keys()) - {"model"}:
        assert f"`{name}`" in described


def test_every_tool_parser_is_in_the_table() -> None:
    found = {name for row in table(section(PAGE, "Tools")) for name in re.findall(r"`([a-z0-9]+)`", row[0])}
    assert found == set(TOOL_PARSERS)
