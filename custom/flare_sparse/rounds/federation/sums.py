"""The steps of a sum of padded values, after the sites have answered a request."""

import logging
import time
from collections.abc import Mapping

import numpy as np

from ...core.errors import WireError
from ...core.exchange import Contribution
from ...privacy.secure_aggregation.messages import Step
from ..endpoints.server_sums import SumExchange
from .roster import Reply, SumQuestions, SumTransport

_LOG = logging.getLogger(__name__)


def sum_replies(
    exchange: SumExchange, replies: Mapping[str, Reply], transport: SumTransport, deadline: float | None
) -> tuple[dict[str, Reply], Contribution | None]:
    """Return the replies after the sum, and the contribution that stands for the summed ones; None if it failed.

    A site that drops out before its values are in the sum has not replied, or with the code of its refusal. One that
    drops out later contributes.

    Args:
        exchange: the sum.
        replies: replies to the request, without values.
        transport: carries the steps.
        deadline: time on the monotonic clock at which the attempt ends; None: the transport decides.
    """
    contributions = {site: reply for site, reply in replies.items() if isinstance(reply, Contribution)}
    # A weight of 0 adds nothing to a sum, and a sum of such weights cannot be divided by them.
    examples = {site: reply.num_examples for site, reply in contributions.items() if reply.num_examples}
    after: dict[str, Reply] = dict(replies)
    refused: dict[str, str] = {}
    for site in exchange.attempts.silent.keys() & examples.keys():
        _apply_code(after, site, exchange.attempts.silent[site])
    for step in Step:
        questions = exchange.ask(step, examples)
        answers = _send(step, questions, transport, deadline, exchange, examples) if questions else {}
        if step == Step.REVEAL:
            # Their values are in the sum: what they answer matters only if it fails.
            refused = {site: code for site, code in answers.items() if code}
            break
        if step == Step.SHARES:
            # All members must share: the next attempt at this request begins without those that did not.
            exchange.attempts.silent |= {site: answers.get(site) for site in questions if answers.get(site) != ""}
        for site in questions:
            _apply_code(after, site, answers.get(site))
    total, summed = exchange.finish(contributions)
    if exchange.failure:
        after.update(refused)
        _LOG.warning("round %d (%s): %s", exchange.sum_id.round, exchange.sum_id.kind, exchange.failure)
    return {**after, **summed}, total


def _apply_code(replies: dict[str, Reply], site: str, code: str | None) -> None:
    """Remove the reply of a site that was silent (None) in a step of the sum, or replace it by its code, if any."""
    if code is None:
        replies.pop(site, None)
    elif code:
        replies[site] = code


def _send(
    step: Step,
    questions: Mapping[str, np.ndarray],
    transport: SumTransport,
    deadline: float | None,
    exchange: SumExchange,
    examples: Mapping[str, int],
) -> dict[str, str]:
    """Return the reason code of each site that replied to a step; empty if its reply is accepted."""
    seconds = None if deadline is None else max(deadline - time.monotonic(), 0.0)
    codes: dict[str, str] = {}
    lines = exchange.sums.ledger.lines
    first_line = len(lines)
    # In the order of arrival: integers of a ring have one sum in every order, so each reply is added and forgotten.
    for site, answer in transport(SumQuestions(questions, seconds)):
        # A site may answer twice: the first answer counts.
        if site not in questions or site in codes:
            continue
        codes[site] = answer if isinstance(answer, str) else ""
        if isinstance(answer, np.ndarray):
            try:
                exchange.accept(step, site, answer, examples)
            except WireError as error:
                codes[site] = error.code
    # In the order of names, so that a ledger of equal runs is equal.
    lines[first_line:] = sorted(lines[first_line:], key=lambda line: line.site)
    return codes
