"""A POC federation: FLARE's own commands have a time limit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flare_sparse.core.errors import FlareSparseError
from flare_sparse.flare.launch import poc
from flare_sparse.tasks.task import SiteData


def test_command_of_flare_that_does_not_return_is_ended_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvflare"
    # The child holds the outputs open, as a server does that FLARE has started.
    program.write_text("#!/bin/sh\necho waiting for the server\nsleep 60 &\nwait\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(poc, "COMMAND_TIMEOUT_S", 0.5)
    monkeypatch.setattr(poc, "PORTS", ())
    with (
        pytest.raises(FlareSparseError, match=r"nvflare poc prepare did not end within 0 s:\n  waiting for the server"),
        poc.start_poc(tmp_path / "poc", {"site-1": SiteData("site-1", tmp_path)}, tmp_path / "checkpoints"),
    ):
        pass


def test_federation_without_an_admin_and_a_folder_with_a_space_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poc, "PORTS", ())
    monkeypatch.setattr(poc, "_run_poc_command", lambda *_, **__: None)
    (tmp_path / "poc" / "project" / "prod_00" / "server" / "startup").mkdir(parents=True)
    for folder, message in (("poc", "created no admin, only server"), ("my poc", "contains a space, which FLARE")):
        with (
            pytest.raises(FlareSparseError, match=message),
            poc.start_poc(tmp_path / folder, {}, tmp_path / "checkpoints"),
        ):
            pass
