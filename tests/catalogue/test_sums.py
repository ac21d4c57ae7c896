"""Bad input in a sum of padded values: what the second of eight sites sends. See docs/bad-input.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from local_federation import LocalFederation

from flare_sparse.core.errors import RoundFailed
from flare_sparse.privacy.secure_aggregation.keys import SignedKeys
from flare_sparse.privacy.secure_aggregation.stage import SumRules
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.wire.steps import Step, pack_message, unpack_message

HOSTILE = "site-2"
Change = Callable[[bytes], bytes]


def repack(message: np.ndarray, change: Change) -> np.ndarray:
    """Return a message with another payload and valid lengths and checksum."""
    step, sum_id, payload = unpack_message(message, HOSTILE)
    return pack_message(step, sum_id, change(payload))


def run(step: Step, attack: Callable[[np.ndarray], Any]) -> LocalFederation:
    """Run one round of four sites, of which one answers a step with what ``attack`` makes of its honest reply."""
    # A site that spoils the shares of an attempt has no part in the next one.
    rules = RoundRules(min_sites=3, retries=1 if step == Step.SHARES else 0)
    training = {"optimizer": "sgd", "lr": 0.01}
    federation = LocalFederation("fedavg", sites=4, rules=rules, stage=SumRules(8.0), rounds=1, training=training)
    deliver = federation.deliver_sum

    def change(questions: Any) -> dict[str, Any]:
        replies = deliver(questions)
        if HOSTILE in replies and unpack_message(questions.messages[HOSTILE], "server")[0] == step:
            replies[HOSTILE] = attack(replies[HOSTILE])
        return replies

    federation.deliver_sum = change  # type: ignore[method-assign]
    federation.run()
    return federation


def assert_rejects(code: str, step: Step, attack: Callable[[np.ndarray], Any]) -> None:
    """Check that the site is rejected and the round committed without it."""
    record = run(step, attack).records[0]
    assert record.rejected == {HOSTILE: code}
    assert record.sites_contributed == ["site-1", "site-3", "site-4"]


def change_keys(**fields: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda message: repack(
        message, lambda payload: replace(SignedKeys.from_bytes(HOSTILE, payload), **fields).to_bytes()
    )


@pytest.mark.slow
@pytest.mark.row(48)
def test_keys_that_the_site_has_not_signed_are_rejected() -> None:
    assert_rejects("E_SIGNATURE", Step.KEYS, change_keys(pad_key=bytes(range(32))))
    assert_rejects("E_SIGNATURE", Step.KEYS, change_keys(signature=b""))
    assert_rejects("E_SIGNATURE", Step.KEYS, change_keys(certificate=b"no certificate"))
    assert_rejects("E_WEIGHT", Step.KEYS, change_keys(num_examples=2**40))
    assert_rejects("E_LEN", Step.KEYS, lambda message: repack(message, lambda payload: payload[:-1]))


def flip(message: np.ndarray, offset: int) -> np.ndarray:
    changed = message.copy()
    changed[offset] ^= 1
    return changed


@pytest.mark.slow
@pytest.mark.row(49)
@pytest.mark.parametrize("step", [Step.SHARES, Step.VALUES])
def test_reply_that_is_damaged_or_of_another_sum_is_rejected(step: Step) -> None:
    assert_rejects("E_LEN", step, lambda message: message[:-1])
    assert_rejects("E_LEN", step, lambda message: message[:20])
    assert_rejects("E_CRC", step, lambda message: flip(message, message.size - 1))
    assert_rejects("E_VERSION", step, lambda message: flip(message, 0))

    def rename_sum(message: np.ndarray, **fields: Any) -> np.ndarray:
        _, sum_id, payload = unpack_message(message, HOSTILE)
        return pack_message(step, replace(sum_id, **fields), payload)

    assert_rejects("E_REPLAY", step, lambda message: rename_sum(message, sequence=99))
    # A newline in a kind would forge a line of the server's log.
    assert_rejects("E_KIND", step, lambda message: rename_sum(message, kind="up\ndate"))


@pytest.mark.row(50)
def test_padded_values_of_another_mask_or_length_are_rejected() -> None:
    assert_rejects("E_MASK", Step.VALUES, lambda m: repack(m, lambda payload: bytes(16) + payload[16:]))
    assert_rejects("E_LEN", Step.VALUES, lambda m: repack(m, lambda payload: payload[:-4]))
    assert_rejects("E_LEN", Step.VALUES, lambda m: repack(m, lambda payload: payload + bytes(4)))


@pytest.mark.row(51)
def test_wrong_shares_end_the_attempt_without_a_sum() -> None:
    with pytest.raises(RoundFailed) as caught:
        run(Step.REVEAL, lambda message: repack(message, lambda payload: bytes(33) + payload[33:]))
    assert caught.value.code == "E_QUORUM"
