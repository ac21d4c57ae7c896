"""Masked runs: the plain model within the ring's error, no site's values at the server, drop-outs, limits, bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_federation import RUN, LocalFederation, Upload
from secure_sums import refuses
from toy import Plain, ToyBench

from flare_sparse.config.needs import FEATURES, list_compatible_methods
from flare_sparse.core.checkpoint.store import Store
from flare_sparse.core.errors import RejectedMessage, RoundFailed
from flare_sparse.core.exchange import Assignment, Contribution, Patch, Request, UpdateSpec
from flare_sparse.core.mask import Mask
from flare_sparse.privacy.secure_aggregation.keys import get_public_key
from flare_sparse.privacy.secure_aggregation.messages import pack_members, unpack_members
from flare_sparse.privacy.secure_aggregation.rings import Ring, RingFormat
from flare_sparse.privacy.secure_aggregation.stage import RequestSums, ServerSums, SumRules
from flare_sparse.rounds.endpoints.request_log import RequestLog
from flare_sparse.rounds.endpoints.server import Attempt, ServerEndpoint
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.rounds.local.run import Transport, run_locally
from flare_sparse.wire.ledger import Ledger
from flare_sparse.wire.stage import PLAIN_STAGE, SiteStage
from flare_sparse.wire.steps import HEADER_BYTES, Step, pack_message, unpack_message

SUMMABLE = list_compatible_methods(FEATURES["wire.aggregation: masked"])
SGD = {"optimizer": "sgd", "lr": 0.01}
RULES = SumRules(8.0)


def run(name: str, rules: SumRules | None, sites: int = 4, **settings: Any) -> Any:
    """Return outcome and ledger of a run."""
    bench = ToyBench(validation=4)
    method = bench.method(name, **{"rounds": 3, "training": SGD, **settings})
    return run_locally(
        method, bench.weights, bench.sites(sites), bench.task.metric, transport=Transport(stage=rules or PLAIN_STAGE)
    )


def test_methods_whose_server_needs_a_sum_only_can_be_masked() -> None:
    assert sorted(SUMMABLE) == [
        "fedavg",
        "fedavg_ft",
        "fedavg_one_step",
        "fedsparsify",
        "ffa_lora",
        "metagater",
        "metasnip",
        "neurosfl",
        "per_fedavg",
    ]


def list_settings() -> list[tuple[str, dict[str, Any]]]:
    plain = [(name, {}) for name in ("fedavg", "fedsparsify", "neurosfl", "fedavg_ft")]
    return [
        *plain,
        ("neurosfl", {"scores": "weighted_snip"}),
        ("neurosfl", {"scores": "random"}),
        ("fedavg", {"server": {"optimizer": "adam", "lr": 0.01}}),
        ("fedavg", {"server": {"optimizer": "sgd", "lr": 1.5}, "model_average": {"kind": "ema", "start": 0.0}}),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), list_settings())
def test_one_masked_round_ends_with_the_plain_model_within_the_error_of_the_ring(
    name: str, settings: dict[str, Any]
) -> None:
    """The sites train from the same bits, so the sums alone differ."""
    plain, _ = run(name, None, rounds=1, **settings)
    masked, _ = run(name, RULES, rounds=1, **settings)
    assert masked.mask == plain.mask
    # Adam divides by about tau + |delta|: an error of a delta may grow by 1 / tau.
    factor = 10 if settings.get("server", {}).get("optimizer") == "adam" else 1.5
    error = Ring(32, RULES.bound).compute_error(4) * factor
    difference = (masked.weights.double() - plain.weights.double()).abs()
    assert float(difference.max()) <= error + 2**-23 * float(plain.weights.abs().max())
    assert plain.weights.ne(0).equal(masked.weights.ne(0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["neurosfl", "fedsparsify"])
def test_masked_runs_of_one_seed_are_equal_bit_for_bit(name: str) -> None:
    """Keys and pads are new in every run, and cancel exactly."""
    (first, one), (second, two) = run(name, RULES), run(name, RULES)
    assert torch.equal(first.weights, second.weights)
    assert [record.evaluation for record in first.rounds] == [record.evaluation for record in second.rounds]
    assert [line.payload_bytes for line in one.lines] == [line.payload_bytes for line in two.lines]


def build_federation(sites: int = 4, name: str = "fedavg", **options: Any) -> LocalFederation:
    settings = {"rounds": 2, "training": SGD, **options.pop("settings", {})}
    rules = options.pop("rules", RoundRules(min_sites=3))
    return LocalFederation(name, sites=sites, rules=rules, stage=RULES, **settings, **options)


def reconstruct(messages: list[bytes], federation: LocalFederation, values: torch.Tensor) -> bool:
    """Whether the server can read a site's values in what it received, as numbers or as integers of the ring."""
    exact = values.numpy().astype("<f4").tobytes()
    ring = RingFormat(np.zeros(values.numel(), bool), Ring(32, RULES.bound))
    share = 1 / len(federation.sites)
    encoded = ring.encode(values.double().numpy(), share).tobytes()
    delta = ring.encode((values - federation.bench.weights).double().numpy(), share).tobytes()
    return any(part in message for part in (exact, encoded, delta) for message in messages)


def dump_round(federation: LocalFederation) -> tuple[list[bytes], dict[str, torch.Tensor]]:
    """Return all bytes that the server received in round 1, and the values that the sites trained."""
    uploads: list[bytes] = []
    trained: dict[str, torch.Tensor] = {}

    def record(upload: Any) -> Any:
        if upload.attempt.round == 1:
            uploads.append(upload.message.tobytes())
            trained.setdefault(upload.site, upload.update.patch.values.clone())
        return upload

    federation.change_message = record
    federation.run()
    return uploads + [message.tobytes() for _, _, message in federation.sum_messages], trained


def test_server_reads_a_sites_values_in_a_plain_run_and_not_in_a_masked_one() -> None:
    plain = LocalFederation("fedavg", sites=4, rules=RoundRules(min_sites=3), rounds=1, training=SGD)
    received, trained = dump_round(plain)
    assert all(reconstruct(received, plain, trained[site]) for site in plain.sites)
    masked = build_federation(settings={"rounds": 1})
    received, trained = dump_round(masked)
    assert len(received) > 4 * 4
    assert not any(reconstruct(received, masked, trained[site]) for site in masked.sites)


def test_no_object_of_the_server_holds_a_value_of_a_site() -> None:
    """What learning received: one contribution with the sum, and NaN for every site."""
    federation = build_federation(settings={"rounds": 1})
    exchanges = []
    start = type(federation.server.stage).start_sum

    def record(*arguments: Any) -> Any:
        exchanges.append(start(*arguments))
        return exchanges[-1]

    type(federation.server.stage).start_sum = record  # type: ignore[method-assign]
    try:
        federation.run()
    finally:
        type(federation.server.stage).start_sum = start  # type: ignore[method-assign]
    exchange = exchanges[0]
    replies = {site: _contribution(site) for site in federation.sites}
    total, summed = exchange.finish(replies)
    assert bool(torch.isfinite(total.patch.values).all())
    assert all(bool(contribution.patch.values.isnan().all()) for contribution in summed.values())


def _contribution(site: str) -> Any:
    return Contribution(site, Patch.empty(1), "metrics", 1)


def drop(lost: dict[str, Step]) -> Callable[[str, Step], bool]:
    return lambda site, step: site in lost and step >= lost[site]


@pytest.mark.slow
@pytest.mark.parametrize("step", list(Step))
@pytest.mark.parametrize("count", [1, 2])
def test_round_ends_when_one_or_two_of_eight_sites_drop_out(step: Step, count: int) -> None:
    federation = build_federation(8, settings={"rounds": 1})
    lost = [f"site-{number}" for number in range(2, 2 + count)]
    federation.is_sum_lost = drop(dict.fromkeys(lost, step))
    outcome = federation.run()
    contributed = federation.records[0].sites_contributed
    expected = sorted(federation.sites) if step == Step.REVEAL else sorted(set(federation.sites) - set(lost))
    assert contributed == expected
    assert federation.records[0].attempts == (2 if step == Step.SHARES else 1)
    # The same sites in a plain round.
    plain = LocalFederation("fedavg", sites=8, rules=RoundRules(min_sites=3), rounds=1, training=SGD)
    plain.is_silent = lambda site, attempt: attempt.round == 1 and site not in expected
    difference = (outcome.weights - plain.run().weights).abs().max()
    assert float(difference) <= Ring(32, RULES.bound).compute_error(8) * 8 / len(expected) + 2**-23


@pytest.mark.slow
@pytest.mark.parametrize("step", [Step.SHARES, Step.VALUES, Step.REVEAL])
def test_attempt_without_three_of_eight_sites_fails_and_the_next_one_starts_with_new_keys(step: Step) -> None:
    federation = build_federation(8, settings={"rounds": 1})
    lost = ["site-2", "site-3", "site-4"]
    sums = []

    def is_lost(site: str, current: Step) -> bool:
        sums.append(federation.server._sequence)
        return federation.server._sequence == 1 and site in lost and current >= step

    federation.is_sum_lost = is_lost
    federation.run()
    assert federation.records[0].attempts == 2
    # All members share their secrets, or the next attempt goes on without those that did not.
    members = set(federation.sites) - set(lost if step == Step.SHARES else ())
    assert federation.records[0].sites_contributed == sorted(members)
    keys = [message.tobytes() for site, current, message in federation.sum_messages if current == Step.KEYS]
    assert len(set(keys)) == len(keys) == 8 + len(members)


def test_run_stops_when_too_many_sites_drop_out_of_every_attempt() -> None:
    federation = build_federation(8, rules=RoundRules(min_sites=3, retries=1))
    federation.is_sum_lost = drop(dict.fromkeys(["site-2", "site-3", "site-4"], Step.VALUES))
    with pytest.raises(RoundFailed, match="0 of 8 sites contributed"):
        federation.run()


def test_sites_refuse_a_second_sum_over_other_sites() -> None:
    """Three of eight sites reveal nothing in the first attempt, and one is left out of the second: the difference of
    both sums would be its values.
    """
    federation = build_federation(8, rules=RoundRules(min_sites=3, retries=1))
    silent = ["site-2", "site-3", "site-4"]

    def is_lost(site: str, step: Step) -> bool:
        if federation.server._sequence == 1:
            return site in silent and step == Step.REVEAL
        return site == "site-8"

    federation.is_sum_lost = is_lost
    with pytest.raises(RoundFailed, match=r"site-1 E_REQUEST.*The sum failed: site-1, .* did not share the secrets"):
        federation.run()
    revealed = [site for site, step, _ in federation.sum_messages if step == Step.REVEAL]
    assert sorted(revealed) == sorted(set(federation.sites) - set(silent))


@pytest.mark.slow
@pytest.mark.parametrize("lost_values", [[], ["site-2"]])
def test_retry_after_shares_were_revealed_is_over_the_same_sites(lost_values: list[str]) -> None:
    """A site that has missed the first attempt, or its values in it, does not stop the second one by its return."""
    federation = build_federation(6, rules=RoundRules(min_sites=3, retries=1), settings={"rounds": 1})
    federation.is_silent = lambda site, attempt: site == "site-6" and attempt.sequence == 1

    def is_lost(site: str, step: Step) -> bool:
        if federation.server._sequence > 1:
            return False
        return (site in lost_values and step >= Step.VALUES) or (site in ("site-3", "site-4") and step == Step.REVEAL)

    federation.is_sum_lost = is_lost
    federation.run()
    assert federation.records[0].attempts == 2
    expected = {f"site-{number}" for number in range(1, 6)} - set(lost_values)
    assert federation.records[0].sites_contributed == sorted(expected)


def test_server_that_asks_for_three_sums_of_one_request_reads_the_first() -> None:
    """Over {0, 1, 2, 3}, {0, 3, 4} and {1, 2, 4}: the last two less the first are twice the values of site 4."""
    federation = build_federation(5, settings={"rounds": 1}, rules=RoundRules(min_sites=3, retries=0))
    model, full = federation.bench.weights, Mask.full(federation.bench.layout.size)
    request = Request("train", 1, Patch.from_vector(model, full), full)
    names, read = sorted(federation.sites), []
    for members in ((0, 1, 2, 3), (0, 3, 4), (1, 2, 4)):
        assignments = dict.fromkeys([names[i] for i in members], Assignment(request, UpdateSpec("weights", full)))
        attempt = federation.server.encode_requests(assignments)
        assert isinstance(federation.server.stage, ServerSums)
        federation.server.stage.current = RequestSums()
        exchange = federation.server.stage.start_sum(assignments, attempt.sequence)
        assert exchange is not None
        opened = exchange.run(federation.deliver(attempt), federation.yield_sum_replies, None)
        read.append(opened.total is not None)
    assert read == [True, False, False]


def test_second_job_of_one_model_has_the_same_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round of two jobs of one seed is the same: over one site less, the difference would be its values."""

    def run_job(run: str, sites: int) -> LocalFederation:
        monkeypatch.setattr("local_federation.RUN", run)
        bench = ToyBench(Plain())
        federation = build_federation(
            sites, bench=bench, settings={"rounds": 1}, rules=RoundRules(min_sites=3, retries=0)
        )
        for site, sums in federation.stages.items():
            file = tmp_path / site / f"{run}.json"
            sums.admit = RequestLog(run, lambda kind, t: 1, attempts=1, file=file).admit_sum
        federation.run()
        return federation

    run_job("1" * 16, 5)
    with pytest.raises(RoundFailed, match="site-1 E_REQUEST, site-2 E_REQUEST"):
        run_job("2" * 16, 4)
    assert run_job("3" * 16, 5).records[0].sites_contributed == [f"site-{number}" for number in range(1, 6)]


def test_site_that_signs_another_number_than_it_reports_has_no_part_in_the_sum() -> None:
    federation = build_federation(4, settings={"rounds": 1}, rules=RoundRules(min_sites=3, retries=0))
    full = Mask.full(federation.bench.layout.size)
    request = Request("train", 1, Patch.from_vector(federation.bench.weights, full), full)
    assignments = dict.fromkeys(sorted(federation.sites), Assignment(request, UpdateSpec("weights", full)))
    attempt = federation.server.encode_requests(assignments)
    assert isinstance(federation.server.stage, ServerSums)
    exchange = federation.server.stage.start_sum(assignments, attempt.sequence)
    assert exchange is not None
    replies = dict(federation.deliver(attempt))
    replies["site-2"] = replace(replies["site-2"], num_examples=replies["site-2"].num_examples + 1)
    found = exchange.run(replies, federation.yield_sum_replies, None).replies
    assert found["site-2"] == "E_WEIGHT"
    # The values of an attempt leave once; the next one remembers whom it was over.
    again = pack_message(Step.VALUES, exchange.sum_id, b"")
    assert refuses(lambda: federation.stages["site-1"].answer(again)) == "E_REQUEST"
    known = federation.server.stage.current
    assert (known.kind, known.round, known.survivors) == ("train", 1, {"site-1", "site-3", "site-4"})
    federation.server.stage.start_sum(assignments, attempt.sequence + 1)
    assert federation.server.stage.current is known
    other = Assignment(request, UpdateSpec("weights", full))
    with pytest.raises(ValueError, match="all sites have the same assignment"):
        federation.server.stage.start_sum({**assignments, "site-2": other}, attempt.sequence)


def test_swapped_key_is_refused_by_every_site() -> None:
    federation = build_federation(4, rules=RoundRules(min_sites=3, retries=0))

    def swap(site: str, question: np.ndarray) -> np.ndarray:
        step, sum_id, payload = unpack_message(question, "server")
        if step != Step.SHARES:
            return question
        forged = get_public_key(bytes(range(32)))
        members = [replace(keys, pad_key=forged) if keys.name == "site-2" else keys for keys in unpack_members(payload)]
        return pack_message(step, sum_id, pack_members(members))

    federation.change_question = swap
    with pytest.raises(RoundFailed, match="site-1 E_SIGNATURE, site-2 E_REQUEST, site-3 E_SIGNATURE"):
        federation.run()


def send_zeros_to(federation: LocalFederation, sites: list[str]) -> None:
    """Let the server send some sites a model of zeros in each round, whose answers it knows: nothing is learned."""
    layout, deliver = federation.bench.layout, federation.deliver
    forger, full = ServerEndpoint(layout, RUN, "float32", Ledger()), Mask.full(layout.size)

    def collect_answers(attempt: Attempt) -> Any:
        request = Request(attempt.kind, attempt.round, Patch.from_vector(torch.zeros(layout.size), full), full)
        forged = forger.encode_requests(dict.fromkeys(sites, Assignment(request, UpdateSpec("weights")))).messages
        is_training = attempt.kind == "train"
        if is_training:
            # The server takes the answers to the requests that it has sent in fact.
            federation.server._round.sent |= forger._round.sent
        return deliver(replace(attempt, messages=attempt.messages | forged) if is_training else attempt)

    federation.deliver = collect_answers  # type: ignore[method-assign]


def test_server_that_sends_different_models_reads_a_site_in_their_sum_unless_the_model_is_part_of_the_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained: dict[str, torch.Tensor] = {}

    def record_update(upload: Upload) -> Upload:
        trained.setdefault(upload.site, upload.update.patch.values.clone())
        return upload

    def build() -> LocalFederation:
        rules = RoundRules(min_sites=3, retries=0)
        federation = build_federation(4, bench=ToyBench(Plain()), rules=rules, settings={"rounds": 1})
        federation.change_update = record_update
        send_zeros_to(federation, ["site-2", "site-3", "site-4"])
        return federation

    federation = build()
    with pytest.raises(RoundFailed, match="site-1 E_SHARE, site-2 E_SHARE"):
        federation.run()
    assert not [step for _, step, _ in federation.sum_messages if step == Step.VALUES]

    monkeypatch.setattr(SiteEndpoint, "compute_model_digest", lambda endpoint: "")
    federation = build()
    model, weights = federation.bench.weights, federation.run().weights
    # Of 144 examples, 24 are those of site-1. The bias of the last layer is all that learns from a model of zeros.
    read, delta = ((weights - model) * 144 / 24)[:-1], (trained["site-1"] - model)[:-1]
    assert float((read - delta).abs().max()) < 1e-3 * float(delta.abs().max())


def test_value_above_the_bound_costs_its_site_the_round_and_no_other() -> None:
    federation = build_federation(4, settings={"rounds": 1})
    federation.change_update = lambda upload: (
        upload.with_values(upload.update.patch.values + 9) if upload.site == "site-1" else upload
    )
    federation.run()
    assert federation.records[0].rejected == {"site-1": "E_RANGE"}
    assert federation.records[0].sites_contributed == ["site-2", "site-3", "site-4"]


def test_values_in_the_clear_are_rejected() -> None:
    federation = build_federation(4, settings={"rounds": 1})
    decode, errors = federation.server.decode, []

    def record(*arguments: Any) -> Any:
        try:
            return decode(*arguments)
        except RejectedMessage as error:
            errors.append(str(error))
            raise

    federation.server.decode = record  # type: ignore[method-assign]
    federation.endpoints["site-1"].stage = SiteStage()
    federation.run()
    assert federation.records[0].rejected == {"site-1": "E_SEALED"}
    assert len(errors) == 1
    assert "masked" in errors[0]


def test_masked_message_has_4_bytes_a_value_and_a_header() -> None:
    _, ledger = run("fedavg", RULES)
    values = [line for line in ledger.lines if line.values == "masked" and line.scalars_sent]
    layout = ToyBench().layout
    buffers = layout.size - layout.num_parameters
    assert {line.payload_bytes for line in values} == {4 * layout.size + 4 * buffers + HEADER_BYTES + 16}
    assert {line.content for line in values} == {"weights"}
    sizes = {(line.encoding, line.scalars_total, line.scalars_sent, line.dense_bytes) for line in values}
    assert sizes == {("shared", layout.size, layout.size, 4 * layout.size)}
    assert {line.floor_bytes for line in values} == {4 * layout.size + 4 * buffers}
    assert len(values) == 3 * 4
    keys = [line for line in ledger.lines if line.values == "masked" and not line.scalars_sent]
    assert {line.encoding for line in keys} == {"keys", "shares", "values", "reveal"}
    assert all(line.payload_bytes > 0 and line.dense_bytes == line.floor_bytes == 0 for line in keys)


@pytest.mark.slow
def test_run_resumes_after_a_kill_and_ends_as_without_one(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    expected = build_federation(4, name="neurosfl", settings={"rounds": 3}).run()
    for step in list(Step):
        folder = tmp_path / step.name

        def open_store(end: str, folder: Path = folder) -> Store:
            return Store(folder / end, {})

        def build(open_store: Any = open_store, folder: Path = folder) -> LocalFederation:
            federation = build_federation(4, name="neurosfl", stores=open_store, settings={"rounds": 3})
            for site, sums in federation.stages.items():
                sums.requests = RequestLog(RUN, lambda kind, t: 1, attempts=3, file=folder / site / "requests.json")
            return federation

        federation = build()

        def kill(site: str, question: Any, step: Step = step, federation: LocalFederation = federation) -> Any:
            current = question[6]
            if federation.server._sequence == 3 and current == step and site == "site-2":
                raise Killed
            return question

        federation.change_question = kill
        with pytest.raises(Killed):
            federation.run()
        assert torch.equal(build().run(resume=True).weights, expected.weights)
