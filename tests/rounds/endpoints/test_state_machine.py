"""Server and sites under random faults: the same bits, the planned bytes, nothing committed or added twice.

    FLARE_SPARSE_LONG_EXAMPLES=2000 pytest -m long tests/rounds/endpoints/test_state_machine.py    # many more sequences

The state machine must fail where a fix is taken out; otherwise its silence would mean nothing.
"""

from __future__ import annotations

import inspect
import os
import textwrap
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase
from hypothesis.stateful import run_state_machine_as_test
from random_faults import STEPS, RandomAbsences, RandomFaults, build_settings

from flare_sparse.core.checkpoint.store import Store
from flare_sparse.rounds.endpoints import server
from flare_sparse.rounds.endpoints.server import ServerEndpoint
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.rounds.link import SiteLink


def rewrite(owner: Any, name: str, module: Any, old: str, new: str) -> Any:
    """Return a method with one piece of its source replaced."""
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert source.count(old) == 1, f"{name} no longer contains {old!r} once"
    scope: dict[str, Any] = {}
    exec(compile(source.replace(old, new), f"<{name}>", "exec", 1 << 24), vars(module), scope)
    return scope[name]


def leave_damaged_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged folders keep their numbers, and pruning keeps them in place of intact ones."""
    monkeypatch.setattr(Store, "_set_aside", lambda *_: None)


def ignore_names_of_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites with one mask that hold different vectors share an encoded request."""
    name, old = "encode_requests", "requests[*key, request.message.base] = request"
    changed = rewrite(ServerEndpoint, name, server, old, "requests[*key, None] = request")
    monkeypatch.setattr(ServerEndpoint, name, changed)


def forget_nothing_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer starts from the memory after the newest one, which holds no longer what that one sent."""

    def recall(link: SiteLink[Any], counted: str | None, empty: Any) -> Any:
        return (list(link.answers.values())[-1].memory if link.answers else empty), False

    monkeypatch.setattr(SiteLink, "recall", recall)


def count_what_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that was received counts for its site, whether or not the server then uses it."""
    decode = ServerEndpoint.decode

    def count(endpoint: ServerEndpoint, site: str, *message: Any) -> Any:
        contribution = decode(endpoint, site, *message)
        counted = {**endpoint._link.counted, site: endpoint._round.answers[site]}
        endpoint._link = replace(endpoint._link, counted=counted)
        return contribution

    monkeypatch.setattr(ServerEndpoint, "decode", count)


def hold_the_newest_vector_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that starts again does not take the vector of an earlier checkpoint, on which the request builds."""
    monkeypatch.setattr(SiteEndpoint, "_iterate_checkpoints", lambda endpoint: iter(()))


def keep_no_reserve_at_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site cannot follow a server that goes back one commit further than usual."""
    save = Store.save
    monkeypatch.setattr(Store, "save", lambda store, number, content, also_keep=(): save(store, number, content))


class FaultsOverBases(RandomFaults):
    """The same for methods that send patches over a base; the first of them keeps state at the sites, too."""

    methods = ("topk_ef", "scbf")


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.mark.slow
def test_random_faults_change_no_bit_and_lose_nothing() -> None:
    run_state_machine_as_test(RandomFaults, settings=build_settings(8, derandomize=True, database=None))


@pytest.mark.long
def test_random_absences_leave_both_ends_with_the_same_vectors() -> None:
    run_state_machine_as_test(RandomAbsences, settings=build_settings(3, derandomize=True, database=None))


@pytest.mark.long
@pytest.mark.parametrize("machine", [RandomFaults, RandomAbsences])
def test_many_random_faults_change_no_bit_and_lose_nothing(
    machine: type[RandomFaults], capsys: pytest.CaptureFixture[str]
) -> None:
    examples = int(os.environ.get("FLARE_SPARSE_LONG_EXAMPLES", "20"))
    run_state_machine_as_test(machine, settings=build_settings(examples))
    with capsys.disabled():
        print(f"{examples} runs, {STEPS['count']} steps")


def damage_two_server_checkpoints(machine: RandomFaults) -> None:
    machine.begin("topk_ef", "float32")
    for _ in range(3):
        machine.deliver({}, None)
    machine.kill_server()
    machine.damage_server("byte flipped", 2)
    machine.resume()


def lose_one_reply(machine: RandomFaults) -> None:
    machine.begin("topk_ef", "bfloat16")
    machine.deliver({}, None)
    machine.deliver({"site-3": "reply lost"}, None)


def miss_one_round(machine: RandomFaults) -> None:
    machine.begin("fedavg", "int8")
    for losses in ({}, {"site-2": "request lost"}, {}, {}):
        machine.deliver(losses, None)


def damage_one_server_checkpoint(machine: RandomFaults) -> None:
    machine.begin("topk_ef", "float32")
    for dies in (None, None, "before saving"):
        machine.deliver({}, dies)
    machine.damage_server("byte flipped", 1)
    machine.resume()
    for _ in range(2):
        machine.deliver({}, None)
    assert not machine.log.count, "the memory of a site is lost"


def restart_before_a_retry(machine: RandomFaults) -> None:
    machine.begin("fedavg", "int4")
    machine.deliver({}, None)
    machine.deliver({"site-2": "reply lost"}, None)
    assert machine.federation is not None
    machine.federation.restart_site("site-2")


def reject_one_update(machine: RandomFaults) -> None:
    machine.begin("topk_ef", "bfloat16")
    machine.deliver({}, None)
    machine.deliver({"site-3": "update rejected"}, None)
    machine.deliver({}, None)


MUTATIONS = [
    (leave_damaged_checkpoints, RandomFaults, damage_two_server_checkpoints, "CheckpointError"),
    (ignore_names_of_bases, RandomAbsences, miss_one_round, "a request over a base that it never held"),
    (forget_nothing_that_does_not_count, RandomFaults, lose_one_reply, "memory of site-"),
    (count_what_is_rejected, RandomFaults, reject_one_update, "memory of site-"),
    (hold_the_newest_vector_alone, RandomFaults, restart_before_a_retry, "a request over a base that it never held"),
    (keep_no_reserve_at_sites, RandomFaults, damage_one_server_checkpoint, "memory of a site"),
]
"""What is taken out, the machine and its steps that show it, and what the machine says then."""


def run_steps(kind: type[RandomFaults], steps: Any) -> None:
    machine = kind()
    try:
        steps(machine)
    finally:
        # Runs to the end without further faults.
        machine.teardown()


@pytest.mark.slow
@pytest.mark.parametrize(("mutate", "machine", "steps", "message"), MUTATIONS)
def test_steps_fail_only_where_a_fix_is_taken_out(
    mutate: Any, machine: type[RandomFaults], steps: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_steps(machine, steps)
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=message):
        run_steps(machine, steps)


@pytest.mark.long
@pytest.mark.parametrize(
    ("machine", "mutate", "message"),
    [
        (RandomAbsences, leave_damaged_checkpoints, "CheckpointError"),
        (RandomAbsences, ignore_names_of_bases, "a request over a base that it never held"),
        (FaultsOverBases, forget_nothing_that_does_not_count, "memory of (site|round)"),
        (FaultsOverBases, count_what_is_rejected, "memory of (site|round)"),
    ],
)
def test_search_finds_a_fix_that_is_taken_out(
    machine: type[RandomFaults], mutate: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    # Without shrinking: the first failure is enough.
    search = build_settings(200, derandomize=True, database=None, phases=[Phase.generate])
    with pytest.raises(AssertionError, match=message):
        run_state_machine_as_test(machine, settings=search)
