"""Variables of a block."""

from __future__ import annotations

import os

import pytest

from flare_sparse.core.environment import set_environment


@pytest.mark.parametrize("fails", [False, True])
def test_variables_are_restored_after_their_block(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BEFORE", "old")
    monkeypatch.delenv("UNSET_BEFORE", raising=False)

    def block() -> None:
        with set_environment({"SET_BEFORE": "new", "UNSET_BEFORE": "new"}):
            assert (os.environ["SET_BEFORE"], os.environ["UNSET_BEFORE"]) == ("new", "new")
            if fails:
                raise KeyError

    if fails:
        with pytest.raises(KeyError):
            block()
    else:
        block()
    assert os.environ["SET_BEFORE"] == "old"
    assert "UNSET_BEFORE" not in os.environ
