"""A server whose newest checkpoint is damaged goes back a commit; sites that have answered later rounds follow it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from damage import DAMAGES
from stepped_federation import SteppedFederation

from flare_sparse.core.params import compute_digest
from flare_sparse.rounds.endpoints.events import SERVER


def run_to_the_end(federation: SteppedFederation, *, resume: bool = False) -> str:
    """Return the digest of the final model."""
    event, content = federation.start(resume=resume)
    while event == "attempt":
        event, content = federation.proceed({})
    assert event == "finished", content
    return compute_digest(content.weights)


@pytest.mark.slow
@pytest.mark.parametrize("values", ["float32", "bfloat16"])
def test_sites_that_answered_two_rounds_more_follow_a_server_that_goes_back(
    values: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is killed with the updates of round 3; its commit of round 2 is damaged, and it asks round 2 again."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    planned = run_to_the_end(SteppedFederation("topk_ef", values, None, rounds=4, fraction=0.1, down=0.2, decay=0.8))
    killed = SteppedFederation("topk_ef", values, tmp_path, rounds=4, fraction=0.1, down=0.2, decay=0.8)
    killed.start(resume=False)
    for _ in range(2):
        killed.proceed({})
    assert killed.proceed({}, dies="before saving")[0] == "killed"
    DAMAGES["byte flipped"](tmp_path / SERVER / "00000002")
    assert sorted(folder.name for folder in (tmp_path / "site-1").iterdir()) == ["00000001", "00000002", "00000003"]
    resumed = SteppedFederation("topk_ef", values, tmp_path, rounds=4, fraction=0.1, down=0.2, decay=0.8)
    assert run_to_the_end(resumed, resume=True) == planned
    assert min(number for number, _ in resumed.requested) == 2
    assert not resumed.without_base
