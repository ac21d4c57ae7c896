"""The link's own state, without a wire: a search for a history in which its ends disagree or something is lost.

Vectors are integers, which a wire rounds to multiples of 16, so that sums and residuals are exact. In every step:

- server and site mean the same vector whenever a request is accepted;
- a request with the same name over the same base has the same values;
- values that count and what a site keeps add up to its deltas that count, unless it lost its memory and says so.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from thoroughness import count_cases
from torch import Tensor

from flare_sparse.core.exchange import Patch
from flare_sparse.core.mask import Mask
from flare_sparse.rounds.link import KEPT_VECTORS, ServerLink, SiteLink, Vector, name_new_start, name_request

SIZE, STEP = 5, 16
FULL, NOTHING = Mask.full(SIZE), torch.zeros(SIZE)
SITES = ("a", "b", "c")


def round_off(values: Tensor) -> Tensor:
    return torch.floor(values / STEP) * STEP


def make_vector(values: Tensor) -> Vector:
    return Vector.of(Patch.from_vector(values, FULL), keeps_values=True)


@dataclass(frozen=True)
class Commit:
    """What a server's checkpoint holds."""

    model: Tensor
    link: ServerLink = field(default_factory=ServerLink)
    t: int = 1


@dataclass(frozen=True)
class Disk:
    """What a site's checkpoint holds."""

    link: SiteLink[Tensor]
    vector: Tensor


class LinkMachine(RuleBasedStateMachine):
    """Attempts of which some messages are lost or rejected, kills, damaged checkpoints, and steps back."""

    @initialize(seed=st.integers(0, 2**32 - 1))
    def begin(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.commits = [Commit(self._draw())]
        self.server = self.commits[0]
        self.disks = {site: [Disk(SiteLink(), NOTHING)] for site in SITES}
        self.sites = {site: disks[0] for site, disks in self.disks.items()}
        self.requests: dict[tuple[str, str | None, str], Tensor] = {}
        self.deltas: dict[tuple[str, str], Tensor] = {}
        # By site and name of an answer: its deltas that count up to it, without the values that count.
        self.books: dict[tuple[str, str | None], Tensor] = dict.fromkeys(((site, None) for site in SITES), NOTHING)

    def _draw(self) -> Tensor:
        return torch.from_numpy(self.random.integers(-40, 40, SIZE).astype(np.float32))

    @rule(
        losses=st.dictionaries(st.sampled_from(SITES), st.sampled_from(["request", "answer", "rejected"])),
        commits=st.booleans(),
    )
    def attempt(self, losses: dict[str, str], commits: bool) -> None:
        sent, answers, arrived = {}, {}, NOTHING
        for site in SITES:
            if losses.get(site) == "request":
                continue
            vector, name, values = self._exchange(site)
            if losses.get(site) == "answer":
                continue
            sent[site] = vector
            if losses.get(site) != "rejected":
                answers[site], arrived = name, arrived + values
        if commits and answers:
            server = self.server
            link = server.link.add_commit(sent, answers, {})
            self.server = Commit(server.model + arrived, link, server.t + 1)
            self.commits = [*self.commits, self.server][-2:]
            assert len(link.vectors) <= KEPT_VECTORS
            assert set(link.held.values()) == link.vectors.keys()

    def _exchange(self, site: str) -> tuple[Vector, str, Tensor]:
        server, disk = self.server, self.sites[site]
        base = server.link.find_base(site)
        if base is not None and (disk.link.held is None or disk.link.held.name != base.name):
            stored = next((old for old in self.disks[site] if old.link.held and old.link.held.name == base.name), None)
            if stored is None:
                # The site asks for everything.
                self.server, base = replace(server, link=server.link.forget([site])), None
            else:
                disk = replace(disk, link=replace(disk.link, held=stored.link.held), vector=stored.vector)
        values = server.model if base is None else round_off(server.model - base.values)
        vector = make_vector(values if base is None else base.values + values)
        name = name_request(server.link.commit, "train", server.t, vector.name)
        first = self.requests.setdefault((name, base.name if base else None, site), values)
        assert torch.equal(first, values), "a retry is another message"
        held = make_vector(values if base is None else disk.vector + values)
        assert held.name == vector.name, "the ends hold different vectors"
        counted = server.link.counted.get(site)
        before, is_lost = disk.link.recall(counted, NOTHING)
        answer = name_new_start(name) if is_lost else name
        delta = self.deltas.setdefault((site, answer), self._draw())
        rounded = round_off(delta + before)
        self.books[site, answer] = (NOTHING if is_lost else self.books[site, counted]) + delta - rounded
        link = disk.link.add_answer(answer, counted, delta + before - rounded)
        assert torch.equal(self.books[site, answer], link.answers[answer].memory), "something is lost or sent twice"
        assert len(link.answers) <= 3
        # Written before the answer is sent.
        self.sites[site] = Disk(replace(link, held=replace(vector, values=None)), held.values)
        self.disks[site] = [*self.disks[site], self.sites[site]][-3:]
        return vector, answer, rounded

    @rule(site=st.sampled_from(SITES), damaged=st.integers(0, 3))
    def kill_site(self, site: str, damaged: int) -> None:
        self.disks[site] = self.disks[site][: -damaged or None] or [Disk(SiteLink(), NOTHING)]
        self.sites[site] = self.disks[site][-1]

    @rule(damaged=st.integers(0, 1))
    def kill_server(self, damaged: int) -> None:
        self.commits = self.commits[: -damaged or None] or self.commits
        self.server = self.commits[-1]

    @rule()
    def step_back(self) -> None:
        self.commits = self.commits[:1]
        self.server = replace(self.commits[0], link=replace(self.commits[0].link, held={}))


def search(machine: type[LinkMachine], examples: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=checks),
    )


@pytest.mark.slow
def test_no_history_lets_the_ends_disagree_or_loses_what_counts() -> None:
    search(LinkMachine, int(os.environ.get("FLARE_SPARSE_LONG_EXAMPLES", count_cases(300))))


def forget_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer starts from the memory after the newest one, whether or not that one counts."""

    def recall(link: SiteLink[Tensor], counted: str | None, empty: Tensor) -> tuple[Tensor, bool]:
        return (next(reversed(link.answers.values())).memory, False) if link.answers else (empty, False)

    monkeypatch.setattr(SiteLink, "recall", recall)


def begin_anew_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that has lost its memory does not say so."""
    recall = SiteLink.recall
    monkeypatch.setattr(SiteLink, "recall", lambda link, counted, empty: (recall(link, counted, empty)[0], False))


@pytest.mark.slow
@pytest.mark.parametrize("mutate", [forget_nothing, begin_anew_in_silence])
def test_search_finds_a_rule_that_is_taken_out(mutate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match="lost or sent twice"):
        search(LinkMachine, 500)
