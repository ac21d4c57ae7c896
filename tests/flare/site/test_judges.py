"""What really leaves a site, judged by worlds: serialized results, refusals and codes of a history of jobs.

The asker knows the table but for one bit of a few people. The history is replayed in every table that remains, from the
same secret of the site; a bit is determined if all tables with the same bytes agree on it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from described_site import DescribedSite
from nvflare.apis.shareable import Shareable

from flare_sparse.config.assemble import assemble
from flare_sparse.config.loading import parse_job
from flare_sparse.config.people import PEOPLE_FILE
from flare_sparse.config.policy.policy import PRESETS
from flare_sparse.flare.egress import serialize
from flare_sparse.flare.executor import SparseExecutor
from flare_sparse.flare.filters import DecodeRequest, EncodeUpdate
from flare_sparse.flare.payload import (
    HELLO,
    QUESTION,
    TASK,
    get_refusal_code,
    message_to_shareable,
    question_to_shareable,
)
from flare_sparse.flare.questions import build_question
from flare_sparse.flare.session import SiteSession
from flare_sparse.flare.statistics import StatisticsExecutor
from flare_sparse.privacy.release.site import RELEASE_FOLDER
from flare_sparse.rounds.endpoints.server import ServerEndpoint
from flare_sparse.tasks.data.source import WITHDRAWN_FILE
from flare_sparse.wire.ledger import Ledger

PEOPLE, UNKNOWN = 120, 3
World = tuple[int, ...]


class Hospital:
    """A site of one world, and all that left it, as FLARE serializes it."""

    def __init__(self, folder: Path, world: World, policy: dict[str, Any]):
        self.folder, self.policy = folder / "site-1", policy
        bits = [*world, *(i * 7 % 5 // 3 for i in range(PEOPLE - UNKNOWN))]
        rows = [f"p{i},{20 + i},{'FM'[i % 2]},{bit}" for i, bit in enumerate(bits)]
        (self.folder / "local").mkdir(parents=True)
        (folder / "t.csv").write_text("\n".join(["id,age,sex,sick", *rows]) + "\n")
        people = {"id": "id", "table": str(folder / "t.csv"), "columns": {"sex": [["F"], ["M"]]}}
        (self.folder / "local" / PEOPLE_FILE).write_text(yaml.safe_dump(people))
        secret = self.folder / RELEASE_FOLDER / "site-1" / "secret"
        secret.parent.mkdir(parents=True)
        secret.write_bytes(bytes(32))
        secret.chmod(0o600)
        self.left: list[bytes] = []
        self.codes: list[str] = []

    def describe(self) -> None:
        site = self._open(StatisticsExecutor(10))
        self._keep(site, site.answer(QUESTION, question_to_shareable(build_question(site.executor))))

    def evaluate(self, factor: float, **task: Any) -> None:
        """Introduce the site to a job, and ask for the metrics of a model that the job has made up."""
        site = self._open(SparseExecutor("fedavg", "table", {}), **task)
        self._keep(site, site.answer(HELLO, Shareable()))
        assembly = assemble(self.job)
        server = ServerEndpoint(assembly.layout, assembly.run_id, "float32", Ledger(), None, self.job.seed)
        model = assembly.method.init(torch.full_like(assembly.weights, factor), ["site-1"])
        attempt = server.encode_requests(assembly.method.ask_final(model, ["site-1"]))
        request = DecodeRequest().process(message_to_shareable(attempt.messages["site-1"], {}), site.fl_ctx)
        result = site.answer(TASK, request, lambda reply: EncodeUpdate().process(reply, site.fl_ctx))
        self._keep(site, result)

    def withdraw(self, *names: str) -> None:
        (self.folder / "local" / WITHDRAWN_FILE).write_text("\n".join(names))

    def _open(self, executor: Any, **task: Any) -> DescribedSite:
        settings = {
            "name": "table", "kind": "binary", "target": "sick", "features": ["age", "sex"], "scaling": "none",
            "categories": {"sex": ["F", "M"]}, "id": "id", "model": {"name": "mlp", "hidden": [2]},
        }  # fmt: skip
        method = {"name": "fedavg", "rounds": 1}
        self.job = parse_job({"name": "study", "seed": 1, "method": method, "task": {**settings, **task}})
        site = DescribedSite(
            self.folder, self.job, self.folder.parent / "t.csv", executor, self.policy, SiteSession()
        )  # fmt: skip
        site_file = {"data": str(self.folder.parent / "t.csv"), "id": "id", "checkpoints": False}
        (self.folder / "local" / "flare_sparse.yaml").write_text(yaml.safe_dump(site_file))
        return site

    def _keep(self, site: DescribedSite, result: Shareable) -> None:
        self.left.append(serialize(result, site.fl_ctx))
        self.codes.append(get_refusal_code(result))


def play(folder: Path, world: World, policy: dict[str, Any]) -> Hospital:
    """Return a site after a history that looks for the bit of the first person."""
    site = Hospital(folder, world, policy)
    others = [str(20 + i) for i in range(1, PEOPLE)]
    site.describe()
    site.evaluate(0.1, subgroups=["sex"])
    for rows in ({"sick": ["1"]}, {"sick": ["1"], "age": others}):
        site.evaluate(0.0, rows=rows)
    site.withdraw("p0")
    site.describe()
    site.evaluate(0.2)
    return site


def count_determined(folder: Path, policy: dict[str, Any]) -> int:
    """Return in how many worlds, and for how many people, all that left determines the bit.

    Worlds in which all of the people are sick, or none is, are told by the number of the sick alone.
    """
    worlds: dict[tuple[bytes, ...], list[World]] = defaultdict(list)
    for number, world in enumerate(itertools.product((0, 1), repeat=UNKNOWN)):
        worlds[tuple(play(folder / str(number), world, policy).left)].append(world)
    mixed = [group for group in worlds.values() if {*map(sum, group)} - {0, UNKNOWN}]
    return sum(len(group) * (len({world[i] for world in group}) == 1) for group in mixed for i in range(UNKNOWN))


@pytest.mark.long
def test_bytes_that_leave_under_cells_determine_nobody(tmp_path: Path) -> None:
    """The order of labels in a description once was that of the rows."""
    policy = yaml.safe_load(PRESETS["careful"].read_text())
    assert count_determined(tmp_path / "cells", policy) == 0
    # The judge sees what exact numbers tell of the person that the history looks for.
    assert count_determined(tmp_path / "exact", policy | {"release": "exact"}) >= 2**UNKNOWN - 2
