"""The page offers what the API would allow to the same client, and no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.options import AdminOptions, HttpOptions
from protocols.http.dashboard.viewer import ACTIONS, Viewer, find_viewer
from protocols.http.request_rules import make_request_rules

if TYPE_CHECKING:
    from collections.abc import Mapping

LOCAL, REMOTE = ("127.0.0.1", 5), ("192.0.2.7", 5)


def viewer(
    options: HttpOptions | None = None,
    admin: AdminOptions | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    peer: object = LOCAL,
    explicit_control: bool = True,
    owned_regions: bool = False,
) -> Viewer:
    rules = make_request_rules(options or HttpOptions(), admin=admin)
    given = {"host": "localhost:8000"} | {name.lower(): value for name, value in (headers or {}).items()}
    return find_viewer(
        rules,
        lambda name: given.get(name.lower()),
        peer,
        explicit_control=explicit_control,
        owned_regions=owned_regions,
    )


def allowed(found: Viewer) -> set[str]:
    return {action for action in ACTIONS if found.may(action)}


def test_everybody_may_do_everything_on_an_open_server() -> None:
    found = viewer(peer=REMOTE)
    assert allowed(found) == set(ACTIONS)
    assert found.headers == ()


def test_models_are_loaded_only_in_explicit_mode() -> None:
    found = viewer(explicit_control=False)
    assert allowed(found) == set(ACTIONS) - {"load"}
    assert "--model-control-mode=explicit" in found.permissions["load"].reason


@pytest.mark.parametrize("peer", [LOCAL, REMOTE])
def test_who_may_not_administer_sees_no_log(peer: object) -> None:
    found = viewer(admin=AdminOptions("local"), peer=peer)
    administering = {"load", "log_settings", "trace_settings", "log"}
    assert allowed(found) == (set(ACTIONS) if peer is LOCAL else set(ACTIONS) - administering)


def test_a_key_that_is_missing_is_named() -> None:
    admin = AdminOptions("key", "secret")
    found = viewer(admin=admin)
    assert not found.may("load")
    assert found.headers == ("admin-key",)
    assert viewer(admin=admin, headers={"Admin-Key": "wrong"}).headers == ("admin-key",)
    right = viewer(admin=admin, headers={"Admin-Key": "secret"})
    assert allowed(right) == set(ACTIONS)
    assert right.headers == ()


def test_restricted_categories_are_refused_without_their_header() -> None:
    options = HttpOptions(restricted_api=("model-repository,shared-memory:X-Key=a", "inference:X-Other=b"))
    found = viewer(options)
    assert allowed(found) == set(ACTIONS) - {"index", "traffic", "load", "regions", "infer"}
    assert found.headers == ("X-Other", "X-Key")
    assert "X-Key" in found.permissions["regions"].reason
    assert viewer(options, headers={"X-Key": "a"}).may("load")


def test_regions_that_have_owners_are_not_shown_to_others() -> None:
    assert not viewer(owned_regions=True).may("regions")


def test_a_page_by_a_foreign_name_may_not_post() -> None:
    found = viewer(headers={"Host": "models.example.com:8000"})
    assert allowed(found) == {"metadata", "regions", "traffic"}
    assert "--http-allowed-hosts" in found.permissions["load"].reason
    listed = HttpOptions(allowed_hosts=("models.example.com",))
    assert viewer(listed, headers={"Host": "models.example.com:8000"}).may("load")
