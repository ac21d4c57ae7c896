"""A run resumes from damaged checkpoints: it continues, saves, and sends nothing twice."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import toy
from damage import DAMAGES, copy_folder
from local_federation import LocalFederation

from flare_sparse.checkpoint.store import Store
from flare_sparse.endpoints.server import SERVER
from flare_sparse.endpoints.site_state import SiteSnapshot
from flare_sparse.federation import RoundRecord, RoundRules
from flare_sparse.params import compute_digest
from flare_sparse.seeds import limit_threads

SITE = "site-2"
COMMITS = 3
"""Number of rounds of five that are on disk when the run is killed."""


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


@pytest.mark.parametrize("damages", list(product(DAMAGES, repeat=2)), ids=" and ".join)
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
    assert store.list_damaged() == sorted(damaged)


@pytest.mark.parametrize("damage", DAMAGES)
def test_run_whose_newest_server_checkpoint_is_damaged_resumes_from_the_one_before(
    damage: str, killed: Path, digest: str, tmp_path: Path
) -> None:
    folder = copy_folder(killed, tmp_path / "run")
    damage_newest(Store(folder / SERVER, {}), (damage,))
    federation = build(folder)
    assert compute_digest(federation.run(resume=True).weights) == digest
    assert min(number for number, _ in federation.requested) == COMMITS


@pytest.mark.parametrize("damages", list(product(DAMAGES, repeat=2)), ids=" and ".join)
def test_site_whose_checkpoints_are_damaged_contributes_and_saves(
    damages: tuple[str, str], killed: Path, tmp_path: Path
) -> None:
    folder = copy_folder(killed, tmp_path / "run")
    store = Store(folder / SITE, {})
    damaged = damage_newest(store, damages)
    outcome = build(folder).run(resume=True)
    assert all(len(record.sites_contributed) == 3 for record in outcome.rounds[:5])
    assert len(store.list_numbers()) == 2
    assert min(store.list_numbers()) > max(damaged)
    assert store.list_damaged() == sorted(damaged)


@pytest.mark.parametrize("values", ["float32", "bfloat16"])
# A request over zeros, as those of fedavg, does not tell a site which of its updates the server has.
@pytest.mark.parametrize(("name", "is_removed"), [("topk_ef", False), ("fedavg", False), ("topk_ef", True)])
def test_site_without_its_newest_checkpoint_sends_nothing_twice(
    name: str, values: str, is_removed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The residual before the lost update holds what that update sent. The next update starts without it."""
    folder = run_until_killed(tmp_path / "run", name=name, values=values)
    store = Store(folder / SITE, {})
    newest = store.list_numbers()[-1]
    if is_removed:
        store.delete(newest)
    else:
        DAMAGES["byte flipped"](store.folder / f"{newest:08d}")
    resumed = build(folder, name, values)
    memories = []
    resumed.change_update = lambda upload: (
        (memories.append(upload.endpoint._state.memory) if upload.site == SITE else None) or upload
    )
    resumed.run(resume=True)
    assert memories[0].residual is None
    assert memories[0].method == {}
    assert "is lost; the next update starts without it" in caplog.text
    loaded = store.load(SiteSnapshot)
    assert loaded is not None
    assert bool(loaded[1].memory.method) == (name == "topk_ef"), "later updates are remembered again"
