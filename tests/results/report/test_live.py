"""The page of a run that proceeds: what it shows, how it ends, and that names from sites are only text."""

from __future__ import annotations

from typing import Any

from flare_sparse.results.report.live import REFRESH_S, format_live_page

HOSTILE = "<script>alert(1)</script>"


def line(number: int, **more: Any) -> dict[str, Any]:
    return {
        "run": "ab" * 8, "round": number, "rounds": 3, "kind": "train", "sites_asked": ["a", "b"],
        "sites_contributed": ["a"], "metric": "mae", "metrics": {"mae": 4.0 + number}, "unit": "years",
        "site_metrics": {"a": {"mae": 2.5}}, "bytes_up": 1500, "bytes_down": 500, "dense_bytes": 8000, "seconds": 3.0,
        "rejected": {}, "timed_out": ["b"], **more,
    }  # fmt: skip


def test_page_loads_itself_again_until_the_run_has_ended() -> None:
    lines = [line(1), line(2)]
    running, ended = (format_live_page(lines, has_ended=has_ended) for has_ended in (False, True))
    reload = f'<meta http-equiv="refresh" content="{REFRESH_S}">'
    assert reload in running
    assert reload not in ended
    assert "waiting for the first round" in format_live_page([], has_ended=False)


def test_page_shows_rounds_bytes_metric_and_who_is_missing() -> None:
    page = format_live_page([line(1), line(2, spent_epsilon={"a": 0.5, "b": 0.75})], has_ended=False)
    for cell in ("2 of 3", "6.000", "4.0 kB", "4.0x less than dense", "0.75"):
        assert f"<b>{cell}</b>" in page or f"<span>{cell}</span>" in page
    assert "<tr><td>a</td><td>2 of 2</td><td>2.500</td><td>answered</td></tr>" in page
    assert "<tr><td>b</td><td>0 of 2</td><td>-</td><td>did not reply in time</td></tr>" in page
    assert 'points="60.0,192.0 590.0,12.0"' in page
    assert "about 3 s left" in page


def test_reason_of_a_rejection_is_a_code_and_a_name_of_a_site_only_text() -> None:
    lines = [line(1, sites_asked=["a", HOSTILE], rejected={HOSTILE: "E_NORM: 17.3 of the patient"}, timed_out=[])]
    page = format_live_page(lines, has_ended=True)
    assert "<td>E_NORM</td>" in page
    assert "17.3" not in page
    assert HOSTILE not in page
