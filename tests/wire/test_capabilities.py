"""Parsing of untrusted hellos: every field is validated, the versions first."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_sparse.core.errors import SiteExcluded
from flare_sparse.core.version import VERSION
from flare_sparse.wire import envelope
from flare_sparse.wire.capabilities import Capabilities, Versions, local_capabilities, parse_hello


def code(hello: Any) -> str:
    with pytest.raises(SiteExcluded) as error:
        parse_hello(hello, "site-1")
    return error.value.code


def test_version_in_code_equals_version_of_the_package() -> None:
    assert version("flare-sparse") == VERSION
    assert (local_capabilities().version, local_capabilities().wire) == (VERSION, envelope.VERSION)


def test_hello_round_trips_and_omits_missing_limits() -> None:
    capabilities = local_capabilities(max_upload_bytes=1000, max_upload_share=0.5, rank=2)
    assert parse_hello(capabilities.to_message(), "site-1") == capabilities
    assert local_capabilities().to_message() == {"version": VERSION, "wire": envelope.VERSION}


@pytest.mark.parametrize(
    ("version", "wire", "compatible"),
    [("0.1.0", 1, True), ("0.1.7", 1, True), ("0.2.0", 1, False), ("1.1.0", 1, False), ("0.1.0", 2, False)],
)
def test_versions_of_one_series_and_wire_format_are_compatible(version: str, wire: int, compatible: bool) -> None:
    server = Versions(version="0.1.0", wire=1)
    assert server.is_compatible_with(Versions(version=version, wire=wire)) is compatible


def test_incompatible_version_is_reported_before_other_fields_are_read() -> None:
    hello = {"version": "9.9.1", "wire": 7, "max_upload_bytes": "in another version, a text", "more": [1]}
    with pytest.raises(SiteExcluded) as error:
        parse_hello(hello, "site-2")
    assert str(error.value) == (
        "E_VERSION: site 'site-2' is excluded: it runs flare-sparse 9.9.1 (wire format 7), the server runs "
        f"flare-sparse {VERSION} (wire format {envelope.VERSION}): the versions are incompatible. Install "
        f"flare-sparse {VERSION} at the site, or 9.9.1 on the server and at all other sites"
    )


@pytest.mark.parametrize(
    "changes",
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
    ids=lambda changes: str(changes)[:40],
)
def test_hello_with_a_field_out_of_range_raises(changes: dict[str, Any]) -> None:
    if changes == {"version": "0.1"}:  # the one that is well formed
        assert parse_hello({**local_capabilities().to_message(), **changes}, "site-1").version == "0.1"
    else:
        assert code({**local_capabilities().to_message(), **changes}) == "E_HELLO"


@pytest.mark.parametrize(
    "hello", [None, "E_DATA", [], 3, {}, {"wire": 1}, {"version": VERSION}, dict.fromkeys(range(99))]
)
def test_object_that_is_not_a_hello_raises(hello: Any) -> None:
    assert code(hello) == "E_HELLO"


def test_unknown_fields_of_a_hello_are_ignored() -> None:
    assert parse_hello({**local_capabilities().to_message(), "later": {"deep": [1]}}, "site-1") == local_capabilities()


def test_error_quotes_only_a_short_part_of_a_hello() -> None:
    for hello in ("x" * 10**6, ["x" * 10**6], {"version": "x" * 10**6, "wire": 1}, {"version": [0] * 10**6, "wire": 1}):
        with pytest.raises(SiteExcluded) as error:
            parse_hello(hello, "site-1")
        assert len(str(error.value)) < 300


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(sorted(Capabilities.model_fields)) | st.text(), anything) | anything)
def test_any_object_is_parsed_or_raises_with_a_short_message(hello: Any) -> None:
    text = ""
    try:
        parse_hello(hello, "site-1")
    except SiteExcluded as error:
        text = str(error)
    assert not text or text.startswith(("E_HELLO: ", "E_VERSION: "))
    assert len(text) < 500


def test_caps_are_inclusive() -> None:
    capabilities = local_capabilities(max_upload_bytes=528, max_upload_share=0.1)
    assert capabilities.find_violation(100, 528, 1000) == ""
    assert "at most 528 bytes, the update has 536 or more" in capabilities.find_violation(100, 536, 1000)
    assert "at most 10.0% of the model in a message, the update has 10.1% or more" in capabilities.find_violation(
        101, 528, 1000
    )
    assert local_capabilities().find_violation(10**9, 10**12, 10**9) == ""
