"""Encrypted runs: the same model within CKKS's precision, nothing to read at the server, every ciphertext counted."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import toy

from flare_sparse.checkpoint.store import Store
from flare_sparse.encryption import PRECISION, KeyContexts, ServerCipher, SiteCipher
from flare_sparse.endpoints.server import ServerEndpoint
from flare_sparse.endpoints.site import SiteEndpoint
from flare_sparse.errors import RejectedMessage, RoundFailed
from flare_sparse.exchange import EncryptedValues, Patch, Update
from flare_sparse.federation import Federation
from flare_sparse.local.run import run_locally
from flare_sparse.methods import METHODS
from flare_sparse.wire.ledger import Ledger

RUN = "0" * 16
SUMMABLE = [name for name in METHODS if not METHODS[name].Config().encryption_blocker]
SGD = {"optimizer": "sgd", "lr": 0.01}


@cache
def contexts() -> KeyContexts:
    return KeyContexts.generate()


def run(name: str, *, encrypted: bool, **more: Any) -> Any:
    bench = toy.Bench()
    settings = {"rounds": 3, "training": SGD, **more.pop("settings", {})}
    method, sites = bench.method(name, **settings), bench.sites()
    keys = contexts() if encrypted else None
    return run_locally(method, bench.weights, sites, bench.task.metric, contexts=keys, **more)


def opened(outcome: Any) -> torch.Tensor:
    cipher = SiteCipher(contexts().client)
    return Patch(cipher.decrypt(outcome.encrypted, outcome.mask.count), outcome.mask).to_vector()


def test_which_methods_sum_only() -> None:
    assert SUMMABLE == ["fedavg", "fedavg_ft", "neurosfl", "fedavg_one_step"]


@pytest.mark.parametrize("name", SUMMABLE)
def test_one_round_ends_with_the_plain_model_within_ckks_precision(name: str) -> None:
    """The sites train from the same bits, so the only difference is that of the sum."""
    once = {"rounds": 1}
    plain, _ = run(name, encrypted=False, settings=once)
    secret, _ = run(name, encrypted=True, settings=once)
    assert secret.mask == plain.mask
    difference = (opened(secret).double() - plain.weights.double()).abs()
    assert bool((difference <= PRECISION + 2**-23 * plain.weights.abs().double()).all())


@pytest.mark.parametrize("name", SUMMABLE)
def test_a_whole_run_ends_where_the_plain_one_does(name: str) -> None:
    """Training carries a difference on; plain SGD on a small net does not make it large."""
    plain, _ = run(name, encrypted=False)
    secret, _ = run(name, encrypted=True)
    assert torch.allclose(opened(secret), plain.weights, rtol=0, atol=1e-5)
    assert secret.evaluation.overall == pytest.approx(plain.evaluation.overall, rel=1e-4)
    assert secret.best.round == plain.best.round


@pytest.mark.parametrize("name", SUMMABLE)
def test_the_server_holds_no_weight_that_it_could_read(name: str) -> None:
    """Everywhere a trained value would stand there is NaN; zeros are the masked entries, which are known to be zero."""
    secret, _ = run(name, encrypted=True)
    for weights, mask in ((secret.weights, secret.mask), (secret.best.weights, secret.best.mask)):
        assert bool(weights[mask.bits].isnan().all())
        assert not bool(weights[~mask.bits].any())
    assert bool(secret.state.weights[secret.mask.bits].isnan().all())


def test_the_ledger_counts_ciphertexts() -> None:
    secret, ledger = run("neurosfl", encrypted=True, settings={"sparsity": 0.5})
    encrypted = [line for line in ledger.lines if line.values == "ckks"]
    answers, questions = {("up", t) for t in (1, 2, 3)}, {("down", t) for t in (2, 3, 4)}
    assert {(line.direction, line.round) for line in encrypted} == answers | questions
    for line in encrypted:
        fresh = line.direction == "up"
        assert line.scalars_sent == secret.mask.count
        assert 230_000 < line.payload_bytes < 240_000 if fresh else 125_000 < line.payload_bytes < 135_000
        assert line.payload_bytes - 200 < line.floor_bytes <= line.payload_bytes
    assert {line.content for line in ledger.lines if line.values != "ckks"} == {"scores", "weights", "metrics"}


class Loop:
    """An encrypted federation in this process, with a hand in every answer."""

    def __init__(self, strangers: tuple[str, ...] = ()):
        self.bench = toy.Bench()
        self.method = self.bench.method("neurosfl", training=SGD)
        self.server = ServerEndpoint(self.bench.layout, RUN, "float32", Ledger(), ServerCipher(contexts().server))
        keys = {True: KeyContexts.generate(), False: contexts()}
        self.endpoints = {
            name: SiteEndpoint(site, self.method, RUN, "float32", cipher=SiteCipher(keys[name in strangers].client))
            for name, site in self.bench.sites().items()
        }
        self.spoil: dict[tuple[int, str], Any] = {}

    def carry(self, question: Any) -> dict[str, Any]:
        replies: dict[str, Any] = {}
        for name, message in question.messages.items():
            endpoint = self.endpoints[name]
            try:
                request = endpoint.receive(message)
                update = endpoint.answer(request)
                update = self.spoil.get((question.round, name), lambda endpoint, update: update)(endpoint, update)
                data = endpoint.encode(request, update).data
                replies[name] = self.server.decode(name, data, update.num_examples, update.metrics)
            except RejectedMessage as error:
                replies[name] = error
        return replies

    def run(self) -> Any:
        federation = Federation(self.method, self.server, self.bench.task.metric)
        return federation.run(self.bench.weights, lambda: sorted(self.endpoints), self.carry)


def in_the_clear(endpoint: SiteEndpoint, update: Update) -> Update:
    endpoint.cipher = None
    return update


def not_a_number(endpoint: SiteEndpoint, update: Update) -> Update:
    values = update.patch.values.clone()
    values[3] = float("nan")
    return Update(Patch(values, update.patch.mask), update.content, update.num_examples, update.metrics)


def too_large(endpoint: SiteEndpoint, update: Update) -> Update:
    return Update(
        Patch(update.patch.values + 1e6, update.patch.mask), update.content, update.num_examples, update.metrics
    )


class Broken(SiteCipher):
    """Spoils what it encrypts."""

    def encrypt(self, values: torch.Tensor) -> EncryptedValues:
        data = super().encrypt(values).data.clone()
        data[-200:-100] = 0
        return EncryptedValues(data)


def garbage(endpoint: SiteEndpoint, update: Update) -> Update:
    endpoint.cipher = Broken(contexts().client)
    return update


@pytest.mark.parametrize(
    ("spoil", "code"),
    [(in_the_clear, "E_SEALED"), (not_a_number, "E_FINITE"), (too_large, "E_RANGE"), (garbage, "E_CIPHERTEXT")],
)
def test_a_bad_answer_is_left_out_of_the_sum(spoil: Any, code: str) -> None:
    loop = Loop()
    loop.spoil = {(2, "site-2"): spoil}
    outcome = loop.run()
    assert outcome.rounds[2].rejected == {"site-2": code}
    assert outcome.rounds[2].sites_contributed == ["site-1", "site-3"]
    assert bool(opened(outcome).isfinite().all())


def test_a_site_with_another_key_is_named_and_the_others_go_on() -> None:
    outcome = Loop(strangers=("site-1",)).run()
    assert outcome.rounds[1].rejected == {"site-1": "E_KEY"}
    assert outcome.rounds[1].sites_contributed == ["site-2", "site-3"]
    assert bool(opened(outcome).isfinite().all())


def test_a_run_goes_on_from_an_encrypted_checkpoint(tmp_path: Path) -> None:
    def halted(store_of: Any, until: int, *, resume: bool) -> Any:
        def seen(record: Any) -> None:
            if record.round == until and record.kind == "train":
                raise KeyboardInterrupt

        return run("neurosfl", encrypted=True, stores=store_of, on_round=seen, resume=resume)

    def stores(end: str) -> Store:
        return Store(tmp_path / end, {"run": RUN})

    with pytest.raises(KeyboardInterrupt):
        halted(stores, 2, resume=False)
    outcome, ledger = halted(stores, 99, resume=True)
    whole, counted = run("neurosfl", encrypted=True)
    assert torch.allclose(opened(outcome), opened(whole), rtol=0, atol=1e-5)
    assert len(ledger.lines) == len(counted.lines)


def test_a_run_does_not_go_on_under_other_keys(tmp_path: Path) -> None:
    def stores(end: str) -> Store:
        return Store(tmp_path / end, {"run": RUN})

    def seen(record: Any) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("neurosfl", encrypted=True, stores=stores, on_round=seen)
    bench = toy.Bench()
    method = bench.method("neurosfl", training=SGD)
    with pytest.raises(RoundFailed, match="E_KEY"):
        run_locally(
            method,
            bench.weights,
            bench.sites(),
            bench.task.metric,
            stores=stores,
            resume=True,
            contexts=KeyContexts.generate(),
        )
