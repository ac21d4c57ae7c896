"""Checks of a request against the site's own copy of the job, whatever its policy says."""

from typing import Any

from ...core.errors import RequestRefused
from ...core.exchange import RequestId
from ...core.mask import Mask
from ...methods.method import Method


def check_kind(method: Method[Any, Any], request: RequestId) -> None:
    """Raises:
    RequestRefused: the method sends no such request in this round.
    """
    if not method.count_requests(*request):
        raise RequestRefused(f"{_name_request(request)}: this site's copy of the job has no such request")


def check_trainable(method: Method[Any, Any], request: RequestId, trainable: Mask, live: Mask) -> None:
    """Check that a request asks for entries that the method could ask for.

    A mask of the server's own choice isolates weights, and so does the difference of two masks.

    Args:
        method: the method of this site's copy of the job.
        request: kind and round of the request.
        trainable: entries that the request asks to train or to score.
        live: live entries of the model.

    Raises:
        RequestRefused: the entries are zero in the model, or the method's masks have more or fewer.
    """
    if request.kind in method.idle_kinds:
        return
    fewest, most = method.bound_trainable(*request)
    if not trainable <= live:
        raise RequestRefused(f"{_name_request(request)} asks for entries that are zero in the model")
    if not fewest <= trainable.count <= most:
        count = str(fewest) if fewest == most else f"{fewest} to {most}"
        raise RequestRefused(
            f"{_name_request(request)} asks for {trainable.count} entries; by this site's copy of the job there are "
            f"{count}"
        )


def _name_request(request: RequestId) -> str:
    return f"request {request.kind!r} of round {request.round}"
