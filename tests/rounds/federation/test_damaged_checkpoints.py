"""A run resumes from damaged checkpoints: it continues, saves, and sends nothing twice."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import toy
from damage import DAMAGES, copy_folder
from local_federation import LocalFederation, Upload

from flare_sparse.core.checkpoint.store import DAMAGED, Store
from flare_sparse.core.params import compute_digest
from flare_sparse.core.seeds import limit_threads
from flare_sparse.rounds.endpoints.events import SERVER, Event
from flare_sparse.rounds.endpoints.site import SiteSnapshot
from flare_sparse.rounds.federation.records import RoundRecord
from flare_sparse.rounds.federation.rules import RoundRules

SITE = "site-2"
COMMITS = 3
"""Number of rounds of five that are on disk when the run is killed."""
PAIRS = [pytest.param(pair, id=" and ".join(pair)) for pair in product(DAMAGES, repeat=2)]


class Killed(BaseException):
    """Ends the run as a kill of the process would."""


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the flushes to disk, which take most of the time and which no test here needs."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def build(folder: Path, name: str = "topk_ef", values: Any = "float32") -> LocalFederation:
    return LocalFederation(
        name,
        toy.ToyBench(),
        rules=RoundRules(min_sites=3),
        values=values,
        stores=lambda end: Store(folder / end, {}),
        rounds=5,
    )


def run_until_killed(folder: Path, **settings: Any) -> Path:
    """Run until the last commit that is on disk, and return the folder of the checkpoints."""
    federation = build(folder, **settings)

    def kill(record: RoundRecord) -> None:
        if record.round == COMMITS:
            raise Killed

    federation.on_round = kill
    with pytest.raises(Killed):
        federation.run()
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with limit_threads(1):
        return run_until_killed(tmp_path_factory.mktemp("killed"))


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of the model of the undisturbed run."""
    with limit_threads(1):
        return compute_digest(build(tmp_path_factory.mktemp("undisturbed")).run().weights)


def damage_newest(store: Store, damages: tuple[str, ...]) -> list[int]:
    """Damage the newest checkpoints, the newest one first, and return their numbers."""
    numbers = store.list_numbers()[: -len(damages) - 1 : -1]
    for number, damage in zip(numbers, damages, strict=True):
        DAMAGES[damage](store.folder / f"{number:08d}")
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize("damages", PAIRS)
def test_run_whose_server_checkpoints_are_damaged_starts_again_and_saves(
    damages: tuple[str, str], killed: Path, digest: str, tmp_path: Path
) -> None:
    folder = copy_folder(killed, tmp_path / "run")
    store = Store(folder / SERVER, {})
    damaged = damage_newest(store, damages)
    outcome = build(folder).run(resume=True)
    assert compute_digest(outcome.weights) == digest
    assert [record.round for record in outcome.rounds][:5] == [1, 2, 3, 4, 5]
    assert store.list_numbers() == [4, 5]
    assert store.list_numbers(DAMAGED) == sorted(damaged)
    first = outcome.rounds[0]
    assert [(event.round, event.site, event.event) for event in first.events] == [
        (1, SERVER, "checkpoint_damaged"),
        (1, SERVER, "checkpoint_damaged"),
        (1, SERVER, "started_over"),
    ]
    assert outcome.events == first.events


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_run_whose_newest_server_checkpoint_is_damaged_resumes_from_the_one_before(
    damage: str, killed: Path, digest: str, tmp_path: Path
) -> None:
    folder = copy_folder(killed, tmp_path / "run")
    damage_newest(Store(folder / SERVER, {}), (damage,))
    federation = build(folder)
    outcome = federation.run(resume=True)
    assert compute_digest(outcome.weights) == digest
    detail = f"checkpoint {COMMITS:08d} failed its checksums and is kept as damaged-{COMMITS:08d}"
    assert outcome.events == [Event(COMMITS, SERVER, "checkpoint_damaged", detail)]
    assert min(number for number, _ in federation.requested) == COMMITS


@pytest.mark.slow
@pytest.mark.parametrize("values", ["float32", "bfloat16"])
def test_sites_that_have_answered_the_next_round_follow_a_server_that_falls_back_a_commit(
    values: str, tmp_path: Path
) -> None:
    """The sites are two requests ahead of the older commit, and each still has the checkpoint that belongs to it."""
    undisturbed = build(tmp_path / "undisturbed", values=values).run()
    killed = build(tmp_path / "run", values=values)

    def kill(upload: Upload) -> Upload:
        if (upload.site, upload.attempt.round) == ("site-3", COMMITS + 1):
            raise Killed
        return upload

    killed.change_message = kill
    with pytest.raises(Killed):
        killed.run()
    damage_newest(Store(tmp_path / "run" / SERVER, {}), ("byte flipped",))
    outcome = build(tmp_path / "run", values=values).run(resume=True)
    assert compute_digest(outcome.weights) == compute_digest(undisturbed.weights)
    assert [(event.round, event.event) for event in outcome.events] == [(COMMITS, "checkpoint_damaged")]


@pytest.mark.slow
@pytest.mark.parametrize("damages", PAIRS)
def test_site_whose_checkpoints_are_damaged_contributes_and_saves(
    damages: tuple[str, str], killed: Path, tmp_path: Path
) -> None:
    folder = copy_folder(killed, tmp_path / "run")
    store = Store(folder / SITE, {})
    damaged = damage_newest(store, (*damages, damages[0]))
    outcome = build(folder).run(resume=True)
    assert all(len(record.sites_contributed) == 3 for record in outcome.rounds[:5])
    assert len(store.list_numbers()) == 3
    assert min(store.list_numbers()) > max(damaged)
    assert store.list_numbers(DAMAGED) == sorted(damaged)


LOSSES = {"damaged": 1, "newest removed": 1, "all removed": 3}
"""How a site loses checkpoints: by name, how many of its three."""


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("values", ["float32", "bfloat16"])
# A request over zeros, as those of fedavg, does not tell a site which vector the server expects it to hold.
@pytest.mark.parametrize("name", ["topk_ef", "fedavg"])
def test_site_without_its_newest_checkpoint_sends_nothing_twice(
    name: str, values: str, loss: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The residual before the lost update holds what that update sent. The next update starts without it."""
    folder = run_until_killed(tmp_path / "run", name=name, values=values)
    store = Store(folder / SITE, {})
    newest = store.list_numbers()[-1]
    if loss == "damaged":
        DAMAGES["byte flipped"](store.folder / f"{newest:08d}")
    else:
        store.delete(newest + 1 - LOSSES[loss])
    resumed = build(folder, name, values)
    memories = []
    resumed.change_update = lambda upload: (
        (memories.append(upload.endpoint._current.memory) if upload.site == SITE else None) or upload
    )
    outcome = resumed.run(resume=True)
    assert memories[0].residual is None
    assert memories[0].method == {}
    expected = ["checkpoint_damaged"] * (loss == "damaged") + ["memory_dropped"]
    events = [event for event in outcome.events if event.event != "base_lost"]
    assert [(event.round, event.site, event.event) for event in events] == [
        (COMMITS + 1, SITE, event) for event in expected
    ]
    assert all(event.detail in caplog.text for event in events)
    loaded = store.load(SiteSnapshot)
    assert loaded is not None
    assert bool(loaded[1].memory.method) == (name == "topk_ef"), "later updates are remembered again"


@pytest.mark.slow
def test_site_keeps_its_memory_if_the_damaged_update_was_never_committed(tmp_path: Path) -> None:
    """The run is killed after a site's update and before the commit; the round is retried from the memory before it."""
    undisturbed = build(tmp_path / "undisturbed", values="bfloat16").run()
    folder = tmp_path / "run"
    killed = build(folder, values="bfloat16")

    def kill(upload: Upload) -> Upload:
        if (upload.site, upload.attempt.round) == ("site-3", COMMITS):
            raise Killed
        return upload

    killed.change_message = kill
    with pytest.raises(Killed):
        killed.run()
    damage_newest(Store(folder / SITE, {}), ("byte flipped",))
    outcome = build(folder, values="bfloat16").run(resume=True)
    assert compute_digest(outcome.weights) == compute_digest(undisturbed.weights)
    assert outcome.events == []


def test_report_of_a_site_is_recorded_once_even_if_its_update_is_lost(tmp_path: Path) -> None:
    folder = run_until_killed(tmp_path / "run")
    Store(folder / SITE, {}).delete(COMMITS)
    resumed = build(folder)
    lost = iter([True])
    resumed.change_message = lambda upload: None if upload.site == SITE and next(lost, False) else upload
    outcome = resumed.run(resume=True)
    assert [event.event for event in outcome.events if event.event != "base_lost"] == ["memory_dropped"]
