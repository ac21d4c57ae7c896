"""What really leaves a site, judged twice: serialized results, refusals and codes of a history of jobs.

The asker knows the table but for one bit of a few people. The history is replayed in every table that remains, from the
same secret of the site. By worlds, a bit is determined if all tables with the same bytes agree on it. By algebra, it is
determined if it is a linear combination of numbers in the bytes: those that are sums of bits, whatever they are called.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from described_site import DescribedSite
from nvflare.apis.shareable import Shareable
from nvflare.fuel.utils import fobs

from flare_sparse.config.assemble import assemble
from flare_sparse.config.loading import parse_job
from flare_sparse.config.people import PEOPLE_FILE
from flare_sparse.config.policy.policy import PRESETS
from flare_sparse.flare.egress import serialize
from flare_sparse.flare.executor import EncodeUpdate, SparseExecutor
from flare_sparse.flare.payload import HELLO, QUESTION, TASK, get_refusal_code, message_to_shareable, wrap
from flare_sparse.flare.questions import StatisticsExecutor, build_question
from flare_sparse.flare.session import SiteSession
from flare_sparse.privacy.release import RELEASE_FOLDER
from flare_sparse.rounds.endpoints.server import ServerEndpoint
from flare_sparse.tasks.data.source import WITHDRAWN_FILE
from flare_sparse.wire.ledger import Ledger

PEOPLE, UNKNOWN = 120, 3
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
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
        self._keep(site, site.answer(QUESTION, wrap(QUESTION, build_question(site.executor))))

    def evaluate(self, factor: float, **task: Any) -> None:
        """Introduce the site to a job, and ask for the metrics of a model that the job has made up."""
        site = self._open(SparseExecutor("fedavg", "table", {}), **task)
        self._keep(site, site.answer(HELLO, Shareable()))
        assembly = assemble(self.job)
        server = ServerEndpoint(assembly.layout, assembly.run_id, "float32", Ledger(), None, self.job.seed)
        model = assembly.method.init(torch.full_like(assembly.weights, factor), ["site-1"])
        attempt = server.encode_requests(assembly.method.ask_final(model, ["site-1"]))
        request = message_to_shareable(attempt.messages["site-1"], {})
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


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[World, list[bytes]]]:
    """What left in each world, by how numbers about people leave."""
    careful = yaml.safe_load(PRESETS["careful"].read_text())
    policies = {"cells": careful, "exact": careful | {"release": "exact", "metrics": "exact"}}
    worlds = list(itertools.product((0, 1), repeat=UNKNOWN))
    return {
        name: {world: play(tmp_path_factory.mktemp(name), world, policy).left for world in worlds}
        for name, policy in policies.items()
    }


def determined_by_worlds(left: dict[World, list[bytes]]) -> int:
    """Return in how many worlds, and for how many people, all that left determines the bit.

    Worlds in which all of the people are sick, or none is, are told by the number of the sick alone.
    """
    alike: dict[tuple[bytes, ...], list[World]] = defaultdict(list)
    for world, messages in left.items():
        alike[tuple(messages)].append(world)
    mixed = [group for group in alike.values() if {*map(sum, group)} - {0, UNKNOWN}]
    return sum(len(group) * (len({world[i] for world in group}) == 1) for group in mixed for i in range(UNKNOWN))


def list_numbers(value: Any) -> list[float]:
    """Return the numbers in a deserialized message, those of JSON texts in it, too, in order."""
    if isinstance(value, bytes | str):
        text = value.decode(errors="replace") if isinstance(value, bytes) else value
        return [float(number) for number in NUMBER.findall(text)]
    if isinstance(value, dict):
        return [number for key in value for number in list_numbers(value[key])]
    if isinstance(value, list | tuple):
        return [number for item in value for number in list_numbers(item)]
    return [float(value)] if isinstance(value, int | float) else []


def determined_by_algebra(left: dict[World, list[bytes]]) -> int:
    """Return how many people's bits are a linear combination of numbers of the messages, which are sums over bits.

    A number that is a sum is found by its values: they are equal to those of a linear function of the world.
    """
    bits = np.array([[1.0, *world] for world in left])
    read = [[list_numbers(fobs.loads(message)) for message in messages] for messages in left.values()]
    sums = []
    for messages in zip(*read, strict=True):
        # A message that has other numbers in another world has no place for one of them.
        if len({*map(len, messages)}) == 1:
            values = np.array(messages)
            slopes, *_ = np.linalg.lstsq(bits, values, rcond=None)
            sums += list(slopes[1:, np.abs(bits @ slopes - values).max(0) < 1e-6].T)
    rows = np.array(sums).reshape(-1, UNKNOWN)
    rank = np.linalg.matrix_rank(rows) if len(rows) else 0
    return sum(bool(rank) and np.linalg.matrix_rank(np.vstack([rows, unit])) == rank for unit in np.eye(UNKNOWN))


@pytest.mark.long
@pytest.mark.parametrize("judge", [determined_by_worlds, determined_by_algebra])
def test_bytes_that_leave_under_cells_determine_nobody(judge: Any, histories: Any) -> None:
    """The order of labels in a description once was that of the rows."""
    assert judge(histories["cells"]) == 0
    # The judges see what exact numbers tell of the person that the history looks for.
    assert judge(histories["exact"]) >= 1
