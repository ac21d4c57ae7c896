"""The right to send code to a site, as FLARE's own policy engine evaluates it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nvflare.fuel.sec.authz import AuthzContext, Person, Policy, parse_policy_config
from nvflare.lighter import templates
from nvflare.lighter.utils import load_yaml

from flare_sparse.core.errors import ConfigError
from flare_sparse.flare.site.setup import list_code_senders, read_permissions, revoke_code_right


@pytest.fixture(params=["site-1", "server"])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A site's or the server's kit with the authorization that FLARE 2.9 puts into both."""
    local = tmp_path / str(request.param) / "local"
    local.mkdir(parents=True)
    default = load_yaml(str(Path(str(templates.__file__)).with_name("master_template.yml")))["default_authz"]
    (local / "authorization.json.default").write_text(default)
    return local.parent


def has_right(authorization: dict[str, Any], role: str, right: str) -> bool:
    """Whether FLARE grants a right to that role, of another organisation than the site."""
    policy, error = parse_policy_config(authorization, {})
    assert isinstance(policy, Policy), error
    user = Person("someone", "elsewhere", role)
    return bool(policy.evaluate("here", AuthzContext(right, user, user))[0])


def test_revoking_takes_the_right_from_leads_and_admins_who_have_it_by_default(kit: Path) -> None:
    before = read_permissions(kit / "local")
    assert [role for role in before["permissions"] if has_right(before, role, "byoc")] == ["project_admin", "lead"]
    assert revoke_code_right(kit) == ["project_admin", "lead"]
    after = json.loads((kit / "local" / "authorization.json").read_text())
    assert not [role for role in after["permissions"] if has_right(after, role, "byoc")]


def test_revoking_keeps_all_other_rights(kit: Path) -> None:
    before = read_permissions(kit / "local")
    revoke_code_right(kit)
    after = read_permissions(kit / "local")
    rights = {right for rights in before["permissions"].values() if isinstance(rights, dict) for right in rights}
    assert len(rights - {"byoc"}) == 8
    for role in before["permissions"]:
        for right in rights - {"byoc"}:
            assert has_right(before, role, right) == has_right(after, role, right), (role, right)


def test_second_revocation_writes_nothing(kit: Path) -> None:
    revoke_code_right(kit)
    file = kit / "local" / "authorization.json"
    written = file.stat().st_mtime_ns
    assert revoke_code_right(kit) == []
    assert file.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("rights", "may_send_code"),
    [
        ("any", True),
        ("none", False),
        ("o:site", True),
        ({"byoc": "o:site"}, True),
        ({"byoc": "none"}, False),
        ({}, False),
    ],
)
def test_any_rule_but_none_lets_a_role_send_code(rights: Any, may_send_code: bool) -> None:
    assert list_code_senders({"permissions": {"lead": rights}}) == (["lead"] if may_send_code else [])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"permissions": 3}', "\xff"])
def test_malformed_authorization_is_refused_and_kept(kit: Path, text: str) -> None:
    (kit / "local" / "authorization.json").write_text(text)
    with pytest.raises(ConfigError, match=r"authorization\.json"):
        revoke_code_right(kit)
    assert (kit / "local" / "authorization.json").read_text() == text
