"""A hello is believed in nothing that was not checked, and the versions are looked at first."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_sparse.capabilities import Capabilities, Versions, local_capabilities, parse_hello
from flare_sparse.errors import SiteExcluded
from flare_sparse.version import VERSION
from flare_sparse.wire import envelope

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def code(said: Any) -> str:
    with pytest.raises(SiteExcluded) as refused:
        parse_hello(said, "site-1")
    return refused.value.code


def test_the_version_in_the_code_is_that_of_the_package() -> None:
    assert tomllib.loads(PYPROJECT.read_text())["project"]["version"] == VERSION
    assert (local_capabilities().version, local_capabilities().wire) == (VERSION, envelope.VERSION)


def test_what_is_said_is_what_is_heard_and_what_is_not_limited_is_not_said() -> None:
    able = local_capabilities(max_upload_bytes=1000, max_upload_share=0.5, rank=2)
    assert parse_hello(able.to_message(), "site-1") == able
    assert local_capabilities().to_message() == {"version": VERSION, "wire": envelope.VERSION}


@pytest.mark.parametrize(
    ("version", "wire", "fits"),
    [("0.1.0", 1, True), ("0.1.7", 1, True), ("0.2.0", 1, False), ("1.1.0", 1, False), ("0.1.0", 2, False)],
)
def test_ends_of_one_series_and_one_wire_format_fit_together(version: str, wire: int, fits: bool) -> None:
    mine = Versions(version="0.1.0", wire=1)
    assert mine.is_compatible_with(Versions(version=version, wire=wire)) is fits


def test_both_versions_are_named_and_what_to_install_also_when_nothing_else_can_be_read() -> None:
    said = {"version": "9.9.1", "wire": 7, "max_upload_bytes": "in another version, a text", "more": [1]}
    with pytest.raises(SiteExcluded) as refused:
        parse_hello(said, "site-2")
    assert str(refused.value) == (
        "E_VERSION: site 'site-2' is left out: it runs flare-sparse 9.9.1 (wire format 7), the server "
        f"flare-sparse {VERSION} (wire format 1): they do not fit together. Install flare-sparse {VERSION} there, or "
        "9.9.1 at the server and all other sites"
    )


@pytest.mark.parametrize(
    "spoilt",
    [
        {"version": None},
        {"version": "0.1"},
        {"version": "0.1\n"},
        {"version": "0.1.0 <script>"},
        {"version": "0.1." + "0" * 99},
        {"wire": True},
        {"wire": "1"},
        {"wire": -1},
        {"max_upload_bytes": -1},
        {"max_upload_bytes": 2**60},
        {"max_upload_bytes": 10.5},
        {"max_upload_share": 0.0},
        {"max_upload_share": float("nan")},
        {"max_upload_share": 1.5},
        {"rank": 0},
        {"rank": True},
        {"rank": 10**9},
        {"rank": [1]},
        {"rank": 10**4000},
    ],
    ids=lambda spoilt: str(spoilt)[:40],
)
def test_a_field_out_of_range_is_no_hello(spoilt: dict[str, Any]) -> None:
    if spoilt == {"version": "0.1"}:  # the one that is well formed
        assert parse_hello({**local_capabilities().to_message(), **spoilt}, "site-1").version == "0.1"
    else:
        assert code({**local_capabilities().to_message(), **spoilt}) == "E_HELLO"


@pytest.mark.parametrize(
    "said", [None, "E_DATA", [], 3, {}, {"wire": 1}, {"version": VERSION}, dict.fromkeys(range(99))]
)
def test_something_else_is_no_hello(said: Any) -> None:
    assert code(said) == "E_HELLO"


def test_a_name_of_a_later_version_is_not_looked_at() -> None:
    assert parse_hello({**local_capabilities().to_message(), "later": {"deep": [1]}}, "site-1") == local_capabilities()


def test_what_is_shown_of_a_hello_is_short() -> None:
    for said in ("x" * 10**6, ["x" * 10**6], {"version": "x" * 10**6, "wire": 1}, {"version": [0] * 10**6, "wire": 1}):
        with pytest.raises(SiteExcluded) as refused:
            parse_hello(said, "site-1")
        assert len(str(refused.value)) < 300


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
)


@given(st.dictionaries(st.sampled_from(sorted(Capabilities.model_fields)) | st.text(), anything) | anything)
def test_whatever_comes_is_heard_or_refused_with_a_short_text(said: Any) -> None:
    text = ""
    try:
        parse_hello(said, "site-1")
    except SiteExcluded as why:
        text = str(why)
    assert not text or text.startswith(("E_HELLO: ", "E_VERSION: "))
    assert len(text) < 500


def test_the_caps_are_inclusive() -> None:
    able = local_capabilities(max_upload_bytes=528, max_upload_share=0.1)
    assert able.find_violation(100, 528, 1000) == ""
    assert "at most 528 bytes, the answer has 536 or more" in able.find_violation(100, 536, 1000)
    assert "at most 10.0% of the model in a message, the answer has 10.1% or more" in able.find_violation(
        101, 528, 1000
    )
    assert local_capabilities().find_violation(10**9, 10**12, 10**9) == ""
