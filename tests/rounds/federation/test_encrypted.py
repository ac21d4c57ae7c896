"""Encrypted runs: the plain model within CKKS's precision, nothing readable at the server, every ciphertext counted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from local_federation import RUN, LocalFederation, Upload

from flare_sparse.config.needs import FEATURES, list_compatible_methods
from flare_sparse.core.checkpoint.store import Store
from flare_sparse.core.errors import RoundFailed
from flare_sparse.core.exchange import Patch, SealedValues
from flare_sparse.privacy.encryption import PRECISION, KeyContexts, SiteCipher
from flare_sparse.rounds.endpoints.encrypted import SiteEncryption
from flare_sparse.rounds.endpoints.stages import SiteStage
from flare_sparse.rounds.local.run import FROM_START, Course, Transport, Watcher, run_locally

SUMMABLE = list_compatible_methods(FEATURES["wire.encryption: ckks"])
SGD = {"optimizer": "sgd", "lr": 0.01}


@cache
def contexts() -> KeyContexts:
    return KeyContexts.generate()


def run(name: str, *, encrypted: bool, settings: Any = None, course: Any = FROM_START, **watched: Any) -> Any:
    """Return outcome and ledger of a run over three sites."""
    bench = toy.ToyBench(validation=4)
    settings = {"rounds": 3, "training": SGD, **(settings or {})}
    method, sites = bench.method(name, **settings), bench.sites()
    keys = contexts() if encrypted else None
    return run_locally(
        method,
        bench.weights,
        sites,
        bench.task.metric,
        transport=Transport(contexts=keys),
        course=course,
        watcher=Watcher(**watched),
    )


def decrypt(outcome: Any) -> torch.Tensor:
    """Return the final model, decrypted."""
    cipher = SiteCipher(contexts().client)
    return Patch(cipher.decrypt(outcome.sealed, outcome.mask.count), outcome.mask).to_vector()


def test_methods_whose_server_only_sums_can_be_encrypted() -> None:
    assert SUMMABLE == ["fedavg", "fedavg_ft", "neurosfl", "fedavg_one_step"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMMABLE)
def test_one_encrypted_round_ends_with_the_plain_model_within_ckks_precision(name: str) -> None:
    """The sites train from the same bits, so the sums alone differ."""
    settings = {"rounds": 1}
    plain, _ = run(name, encrypted=False, settings=settings)
    encrypted, _ = run(name, encrypted=True, settings=settings)
    assert encrypted.mask == plain.mask
    error = (decrypt(encrypted).double() - plain.weights.double()).abs()
    assert bool((error <= PRECISION + 2**-23 * plain.weights.abs().double()).all())


def record_exchanges(federation: LocalFederation) -> dict[int, list[Upload]]:
    """Return the weights that sites send, with the requests that they answer, by round; it is filled as they do."""
    uploads: dict[int, list[Upload]] = {}

    def record(upload: Upload) -> Upload:
        if upload.update.content == "weights":
            uploads.setdefault(upload.attempt.round, []).append(upload)
        return upload

    federation.change_update = record
    return uploads


def is_mean(values: torch.Tensor, uploads: list[Upload]) -> bool:
    """Whether decrypted values are the mean of updates by examples, within the precision of one sum."""
    total = sum(upload.update.num_examples for upload in uploads)
    parts = (upload.update.patch.values.double() * (upload.update.num_examples / total) for upload in uploads)
    mean = torch.stack(list(parts)).sum(0)
    return bool(((values.double() - mean).abs() <= PRECISION + 2**-23 * mean.abs()).all())


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMMABLE)
def test_every_encrypted_round_ends_with_the_mean_of_its_updates(name: str) -> None:
    """Not compared with a plain run: training from a sum's error may leave a kink of ReLU on the other side."""
    federation = LocalFederation(name, contexts=contexts(), training=SGD)
    uploads = record_exchanges(federation)
    outcome = federation.run()
    trained = [uploads[t] for t in (1, 2, 3)]
    assert [len(sent) for sent in trained] == [3, 3, 3]
    for before, after in pairwise(trained):
        assert all(is_mean(upload.request.model.values, before) for upload in after)
    assert is_mean(outcome.mask.take(decrypt(outcome)), trained[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMMABLE)
def test_server_holds_no_readable_weight(name: str) -> None:
    """Every trained entry is NaN at the server; masked entries are zero, which is public."""
    encrypted, _ = run(name, encrypted=True)
    best = encrypted.best.model
    assert best is not None
    for weights, mask in ((encrypted.weights, encrypted.mask), (best.to_vector(), best.mask)):
        assert bool(weights[mask.bits].isnan().all())
        assert not bool(weights[~mask.bits].any())
    assert bool(encrypted.state.weights[encrypted.mask.bits].isnan().all())


def test_ledger_counts_the_bytes_of_ciphertexts() -> None:
    outcome, ledger = run("neurosfl", encrypted=True, settings={"sparsity": 0.5})
    encrypted = [line for line in ledger.lines if line.values == "ckks"]
    uploads, downloads = {("up", t) for t in (1, 2, 3)}, {("down", t) for t in (2, 3, 4)}
    assert {(line.direction, line.round) for line in encrypted} == uploads | downloads
    for line in encrypted:
        # Sums are at a lower level of the modulus chain than fresh ciphertexts and take fewer bytes.
        is_fresh = line.direction == "up"
        assert line.scalars_sent == outcome.mask.count
        assert 230_000 < line.payload_bytes < 240_000 if is_fresh else 125_000 < line.payload_bytes < 135_000
        assert line.payload_bytes - 200 < line.floor_bytes <= line.payload_bytes
    assert {line.content for line in ledger.lines if line.values != "ckks"} == {"scores", "weights", "metrics"}


def send_in_the_clear(upload: Upload) -> Upload:
    upload.endpoint.protection = SiteStage()
    return upload


def send_nan(upload: Upload) -> Upload:
    values = upload.update.patch.values.clone()
    values[3] = float("nan")
    return upload.with_values(values)


def send_too_large_values(upload: Upload) -> Upload:
    return upload.with_values(upload.update.patch.values + 1e6)


class DamagingCipher(SiteCipher):
    """Cipher that damages every ciphertext."""

    def encrypt(self, values: torch.Tensor) -> SealedValues:
        data = super().encrypt(values).data.clone()
        data[-200:-100] = 0
        return SealedValues(data)


def send_damaged_ciphertext(upload: Upload) -> Upload:
    upload.endpoint.protection = SiteEncryption(DamagingCipher(contexts().client))
    return upload


def build_federation(**options: Any) -> LocalFederation:
    return LocalFederation("neurosfl", contexts=contexts(), training=SGD, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (send_in_the_clear, "E_SEALED"),
        (send_nan, "E_FINITE"),
        (send_too_large_values, "E_RANGE"),
        (send_damaged_ciphertext, "E_CIPHERTEXT"),
    ],
)
def test_bad_update_is_left_out_of_the_sum(damage: Callable[[Upload], Upload], code: str) -> None:
    federation = build_federation()
    federation.change_update = lambda u: damage(u) if (u.attempt.round, u.site) == (2, "site-2") else u
    outcome = federation.run()
    assert outcome.rounds[2].rejected == {"site-2": code}
    assert outcome.rounds[2].sites_contributed == ["site-1", "site-3"]
    assert bool(decrypt(outcome).isfinite().all())


def test_site_with_a_wrong_key_is_rejected_and_the_others_continue() -> None:
    outcome = build_federation(site_contexts={"site-1": KeyContexts.generate()}).run()
    assert outcome.rounds[1].rejected == {"site-1": "E_KEY"}
    assert outcome.rounds[1].sites_contributed == ["site-2", "site-3"]
    assert bool(decrypt(outcome).isfinite().all())


@pytest.mark.slow
def test_run_resumes_from_an_encrypted_checkpoint(tmp_path: Path) -> None:
    """The resumed run sends the ciphertext of the killed one, bit for bit. Its own sums get fresh noise."""

    def build() -> LocalFederation:
        return build_federation(stores=lambda end: Store(tmp_path / end, {"run": RUN}))

    def stop_after_round_2(record: Any) -> None:
        if record.round == 2 and record.kind == "train":
            raise KeyboardInterrupt

    killed, resumed = build(), build()
    killed.on_round = stop_after_round_2
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    assert killed.server.protection.model is not None
    uploads = record_exchanges(resumed)
    outcome = resumed.run(resume=True)
    saved = SiteCipher(contexts().client).decrypt(killed.server.protection.model.values, outcome.mask.count)
    assert sorted(uploads) == [3]
    assert [upload.site for upload in uploads[3]] == ["site-1", "site-2", "site-3"]
    assert all(torch.equal(upload.request.model.values, saved) for upload in uploads[3])
    assert is_mean(outcome.mask.take(decrypt(outcome)), uploads[3])
    # Scores, three rounds and the evaluation, each with a message to and from three sites.
    assert len(resumed.ledger.lines) == 5 * 3 * 2


def test_run_cannot_be_resumed_with_other_keys(tmp_path: Path) -> None:
    def build_store(end: str) -> Store:
        return Store(tmp_path / end, {"run": RUN})

    def stop_after_round_2(record: Any) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("neurosfl", encrypted=True, course=Course(stores=build_store), on_round=stop_after_round_2)
    bench = toy.ToyBench()
    method = bench.method("neurosfl", training=SGD)
    with pytest.raises(RoundFailed, match="E_KEY"):
        run_locally(
            method,
            bench.weights,
            bench.sites(),
            bench.task.metric,
            course=Course(stores=build_store, resume=True),
            transport=Transport(contexts=KeyContexts.generate()),
        )
