"""A state machine of random faults: server and sites under losses, restarts and damages of checkpoints.

Hypothesis draws a method, a number format and a sequence of steps: an attempt is delivered with some of its messages
lost or damaged, a site's process is killed and starts again, the server is killed between two attempts or around the
writing of a checkpoint, checkpoints are damaged, a site's folder is lost, the run is resumed. All rounds need all three
sites, so no site is left out of any, and the run must end as the undisturbed one.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from damage import DAMAGES
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from stepped_federation import SITES, LossLog, SteppedFederation

from flare_sparse.core.checkpoint.store import Store
from flare_sparse.core.exchange import EVALUATE
from flare_sparse.rounds.endpoints.events import SERVER
from flare_sparse.rounds.endpoints.server import Attempt
from flare_sparse.rounds.federation.records import Outcome
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.wire.formats import FORMATS

METHODS: dict[str, dict[str, Any]] = {
    "neurosfl": {"sparsity": 0.5},
    "topk_ef": {"fraction": 0.1, "down": 0.2, "decay": 0.8},
    "scbf": {"rate": 0.1},
    "metagater": {},
    "fedavg": {},
    "dssgd": {"rate": 0.1},
    "fedsparsify": {},
    "personal": {"method": "fedavg", "personal": "norms"},
}
"""Settings by name; ``method`` is the name of the method where that differs."""
PROTECTED = ("fedavg", "personal")
"""Methods whose values can be summed."""
MAX_DAMAGES = 3
LOSSES = st.sampled_from(["request lost", "reply lost", "reply damaged", "update rejected"])
STEPS = {"count": 0}
"""Number of steps taken so far in this process."""


class Plan:
    """What an undisturbed run does.

    Attributes:
        digest: digest of the final model.
        rounds: kind and round of each record.
        memories: digest of the memory from which each update starts, by site, kind and round.
        full_models: number of requests with the whole model, by site.
    """

    def __init__(self, name: str, values: str):
        federation = open_federation(name, values, None, rounds=4)
        event, content = federation.start(resume=False)
        self.attempts: list[Attempt] = []
        while event == "attempt":
            self.attempts.append(content)
            event, content = federation.proceed({})
        assert event == "finished", content
        self.weights = content.weights
        self.rounds = [(record.kind, record.round) for record in content.rounds]
        self.memories = federation.memories
        self.full_rounds = {
            (site, attempt.kind, attempt.round)
            for attempt in self.attempts
            for site, sequence in federation.full_models
            if sequence == attempt.sequence
        }


def open_federation(
    name: str, values: str, folder: Path | None, rules: RoundRules | None = None, **more: Any
) -> SteppedFederation:
    """Return a federation of a method of ``METHODS``."""
    settings = {**METHODS[name], **more}
    return SteppedFederation(settings.pop("method", name), values, folder, rules, **settings)


@cache
def get_plan(name: str, values: str) -> Plan:
    return Plan(name, values)


class RandomFaults(RuleBasedStateMachine):
    """A run, what happened to it, and what must hold."""

    methods: ClassVar = tuple(sorted(METHODS))

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="machine-"))
        self.federation: SteppedFederation | None = None
        self.attempt: Attempt | None = None
        self.stopped: set[str] = set()
        # Sites whose checkpoints were damaged or lost since their process last started.
        self.damaged_sites: set[str] = set()
        self.may_differ = self.is_finished = self.has_failed = False
        # Damages since a process last started: more of them would only use up the steps.
        self.damage_count = 0
        # How often each site may reply that it lacks a base: once per loss of what it held.
        self.base_losses = dict.fromkeys(SITES, 0)
        # Such replies since the last commit: a server that is killed before the next one forgets them.
        self.uncommitted_losses = dict.fromkeys(SITES, 0)
        self.used: dict[tuple[str, str, int], str] = {}
        self.committed: list[tuple[str, int]] = []
        self.log = LossLog()
        logging.getLogger("flare_sparse").addHandler(self.log)

    @initialize(data=st.data(), values=st.sampled_from(["float32", "bfloat16", "int4", "masked"]))
    def start(self, data: st.DataObject, values: str) -> None:
        names = [name for name in self.methods if values != "masked" or name in PROTECTED]
        self.begin(data.draw(st.sampled_from(names or list(PROTECTED))), values)

    def begin(self, name: str, values: str) -> None:
        """Start a run of a method."""
        self.name, self.values, self.plan = name, values, get_plan(name, values)
        self._start_server(resume=False)

    @precondition(lambda self: self.attempt is not None)
    @rule(
        losses=st.dictionaries(st.sampled_from(SITES), LOSSES, max_size=2) | st.just({}),
        dies=st.sampled_from([None, None, None, None, "before saving", "after saving"]),
    )
    def deliver(self, losses: Mapping[str, str], dies: str | None) -> None:
        """Deliver the waiting attempt; a stopped site is silent."""
        STEPS["count"] += 1
        assert self.federation is not None
        assert self.attempt is not None
        # Of two updates that are too long, neither is an outlier; nor is one beside fewer than two others.
        rejected = [site for site in sorted(losses) if losses[site] == "update rejected"]
        others = set(self.attempt.messages) - set(losses) - self.stopped
        accepted = rejected[len(others) >= 2 :]
        losses = {**losses, **dict.fromkeys(accepted, "reply lost"), **dict.fromkeys(self.stopped, "request lost")}
        self._handle(self.federation.proceed(losses, dies))

    @precondition(lambda self: self.attempt is not None)
    @rule()
    def kill_server(self) -> None:
        STEPS["count"] += 1
        assert self.federation is not None
        self.federation.kill()
        self._end_life()

    @precondition(lambda self: self.attempt is not None)
    @rule(site=st.sampled_from(SITES))
    def stop_site(self, site: str) -> None:
        STEPS["count"] += 1
        self.stopped.add(site)

    @precondition(lambda self: self.attempt is not None and self.stopped)
    @rule(data=st.data())
    def restart_site(self, data: st.DataObject) -> None:
        """Start a site's process again, with what its checkpoints hold."""
        STEPS["count"] += 1
        assert self.federation is not None
        site = data.draw(st.sampled_from(sorted(self.stopped)))
        self.federation.restart_site(site)
        self.stopped.discard(site)
        self._count_lost_memory([site])

    @precondition(lambda self: self.attempt is None and self.damage_count < MAX_DAMAGES)
    @rule(damage=st.sampled_from(sorted(DAMAGES)), count=st.integers(1, 3))
    def damage_server(self, damage: str, count: int) -> None:
        """Damage the newest checkpoints of the server, which has ended."""
        STEPS["count"] += 1
        if self._damage(SERVER, damage, count):
            # The server goes back; a site that has answered later rounds may lack the checkpoint from before them.
            for site in SITES:
                self.base_losses[site] += 1
            self.committed, self.used = [], {}

    @precondition(lambda self: (self.attempt is None or self.stopped) and self.damage_count < MAX_DAMAGES)
    @rule(data=st.data(), damage=st.sampled_from([*sorted(DAMAGES), "lost"]), count=st.integers(1, 4))
    def damage_site(self, data: st.DataObject, damage: str, count: int) -> None:
        """Damage or lose the newest checkpoints of a site whose process has ended."""
        STEPS["count"] += 1
        site = data.draw(st.sampled_from(sorted(self.stopped) if self.attempt is not None else SITES))
        if damage == "lost":
            is_damaged = (self.folder / site).is_dir()
            shutil.rmtree(self.folder / site, ignore_errors=True)
            self.damage_count += 1
        else:
            is_damaged = bool(self._damage(site, damage, count))
        if is_damaged:
            self.damaged_sites.add(site)
            self.base_losses[site] += 1

    @precondition(lambda self: self.attempt is None)
    @rule()
    def resume(self) -> None:
        """Resume a run that was killed or failed; one that has finished evaluates its last model again."""
        STEPS["count"] += 1
        self._start_server(resume=True)

    def teardown(self) -> None:
        """Let a run that is still going end without further faults, and compare it with the plan."""
        try:
            for _ in range(60):
                if self.is_finished or self.has_failed or not hasattr(self, "plan"):
                    break
                if self.attempt is None:
                    self.resume()
                    continue
                for site in sorted(self.stopped):
                    assert self.federation is not None
                    self.federation.restart_site(site)
                    self._count_lost_memory([site])
                self.stopped.clear()
                self.deliver({}, None)
            assert self.is_finished or self.has_failed or not hasattr(self, "plan"), "the run ends once the faults end"
        finally:
            if self.attempt is not None and self.federation is not None:
                self.federation.kill()
            logging.getLogger("flare_sparse").removeHandler(self.log)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start_server(self, *, resume: bool) -> None:
        """Start server and sites, as FLARE does: the death of one job process ends the others."""
        self.federation = self._open_federation()
        self.stopped.clear()
        self.is_finished = False
        self._count_lost_memory(SITES)
        self._handle(self.federation.start(resume=resume))

    def _open_federation(self) -> SteppedFederation:
        return open_federation(self.name, self.values, self.folder, rounds=4)

    def _count_lost_memory(self, sites: Any) -> None:
        """Expect another model if a site that starts has lost what it adds to its next update."""
        self.damage_count = 0
        if self.damaged_sites.intersection(sites):
            self.may_differ = True
        self.damaged_sites.difference_update(sites)

    def _damage(self, end: str, damage: str, count: int) -> list[int]:
        store = Store(self.folder / end, {})
        numbers = store.list_numbers()[-count:]
        for number in numbers:
            # A second damage could undo the first.
            if store._read_manifest(number) is not None:
                DAMAGES[damage](store.folder / f"{number:08d}")
                self.damage_count += 1
        return numbers

    def _handle(self, event: tuple[str, Any]) -> None:
        """Take the server's next event and check everything that it shows."""
        kind, content = event
        self.attempt = content if kind == "attempt" else None
        self.has_failed = True
        self._check_memories()
        self._check_bases()
        if kind == "attempt":
            self._check_attempt(content)
        elif kind == "finished":
            self._check_outcome(content)
        else:
            assert kind in ("killed", "failed"), f"{type(content).__name__}: {content}"
            self._end_life()
        self.has_failed = False

    def _end_life(self) -> None:
        self.attempt = None
        for site, count in self.uncommitted_losses.items():
            self.base_losses[site] += count
        self.uncommitted_losses = dict.fromkeys(SITES, 0)

    def _check_attempt(self, attempt: Attempt) -> None:
        """No committed round is asked again; the whole model goes only to sites that lack a base."""
        assert self.federation is not None
        committed = [(record.kind, record.round) for record in self.federation.records]
        assert len(set(committed)) == len(committed), "a round is committed once"
        assert (attempt.kind, attempt.round) not in committed, "a committed round is not asked again"
        assert committed == self.plan.rounds[: len(committed)]
        assert set(self.committed) <= set(committed), "a committed round is never lost"
        if committed != self.committed:
            self.uncommitted_losses = dict.fromkeys(SITES, 0)
        self.committed = committed
        for site, sequence in self.federation.full_models:
            is_planned = (site, attempt.kind, attempt.round) in self.plan.full_rounds
            # The last request leads every site to the copy of most sites.
            is_planned |= attempt.kind == EVALUATE and (self.values in FORMATS and FORMATS[self.values].rounding > 0)
            if sequence == attempt.sequence and not is_planned:
                assert self.uncommitted_losses[site], f"{site} holds the base and is sent the whole model"

    def _check_bases(self) -> None:
        """A site lacks the base of a request once for each time that it lost what it held."""
        assert self.federation is not None
        for site in self.federation.without_base:
            self.base_losses[site] -= 1
            self.uncommitted_losses[site] += 1
            assert self.base_losses[site] >= 0, f"{site} was sent a request over a base that it never held"

    def _check_memories(self) -> None:
        """No memory is used in two committed rounds, and without a loss each is that of the undisturbed run."""
        assert self.federation is not None
        for (site, kind, number), digest in self.federation.memories.items():
            if kind == EVALUATE:
                continue
            if not self.may_differ and not self.log.count:
                assert digest == self.plan.memories[site, kind, number], f"memory of {site} in round {number}"
            for (other, other_kind, other_number), used in self.used.items():
                is_earlier = (other_kind, other_number) in self.committed and (other_kind, other_number) != (
                    kind,
                    number,
                )
                if other == site and is_earlier and digest:
                    assert digest != used, f"{site} uses the memory of round {other_number} again in round {number}"
            self.used[site, kind, number] = digest

    def _check_outcome(self, outcome: Outcome) -> None:
        self.is_finished = True
        # The last evaluation is not in a checkpoint: a run that is resumed after it asks for it again.
        self._end_life()
        records = outcome.rounds
        assert [(record.kind, record.round) for record in records] == self.plan.rounds
        sequences = [record.sequence for record in records]
        assert sequences == sorted(set(sequences)), "every commit has a number of its own"
        assert all(record.sites_contributed == list(SITES) for record in records if record.kind != EVALUATE)
        if not self.may_differ and not self.log.count:
            assert torch.equal(outcome.weights, self.plan.weights), "the same bits as the undisturbed run"


class RandomAbsences(RandomFaults):
    """Runs whose rounds need one site: sites miss rounds, sit out, diverge, go back, in every number format.

    There is no undisturbed run to compare with. After each message both ends must hold the same vector
    (``LocalFederation``), and a site must lack no base that it did not lose.
    """

    methods: ClassVar = ("dssgd", "fedavg", "fedsparsify", "neurosfl", "personal", "scbf", "topk_ef")
    participation = 1.0
    round_rules: ClassVar = RoundRules(min_sites=1, retries=1, quarantine_after=0)

    @initialize(data=st.data(), values=st.sampled_from(["float32", "bfloat16", "int8", "int4", "int2", "int1"]))
    def start(self, data: st.DataObject, values: str) -> None:
        self.participation = data.draw(st.sampled_from([1.0, 0.67]))
        self.begin(data.draw(st.sampled_from(self.methods)), values)

    def begin(self, name: str, values: str) -> None:
        self.name, self.values, self.plan = name, values, None
        self._start_server(resume=False)

    @precondition(lambda self: self.attempt is not None)
    @rule()
    def diverge(self) -> None:
        """Let all sites diverge from the model, until the server steps back by a commit or the run fails."""
        assert self.federation is not None
        for site in SITES:
            self.base_losses[site] += 1
        for _ in range(self.round_rules.retries + 1):
            if self.attempt is not None:
                self.deliver(dict.fromkeys(SITES, "diverged"), None)

    def _open_federation(self) -> SteppedFederation:
        return open_federation(
            self.name, self.values, self.folder, self.round_rules, rounds=6, participation=self.participation
        )

    def _check_attempt(self, attempt: Attempt) -> None:
        pass

    def _check_memories(self) -> None:
        pass

    def _check_outcome(self, outcome: Outcome) -> None:
        self.is_finished = True
        self._end_life()


def build_settings(examples: int, **more: Any) -> settings:
    """Return the settings of a search of ``examples`` sequences of steps."""
    unhurried = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(
        max_examples=examples, stateful_step_count=30, deadline=None, suppress_health_check=unhurried, **more
    )
