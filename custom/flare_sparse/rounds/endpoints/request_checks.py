"""Checks of a request against the site's own copy of the job, and of how far its model has moved from the last one.

The mean of the sites' deltas is no longer than the longest of them. A model that a server has made up is far from the
last one: a site can see that without the other sites.
"""

from typing import Any

import torch
from torch import Tensor

from ...core.errors import RequestRefused
from ...core.exchange import EVALUATE, RequestId, Update
from ...core.mask import Mask
from ...core.params import Layout
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


def is_standstill(update: Update, weights: Tensor, layout: Layout) -> bool:
    """Return whether an update holds parameters, and all of them have the values that the site received.

    Args:
        update: the site's update.
        weights: ``(P,)`` the received model.
        layout: layout of the model; running statistics, which a pass without a step changes, do not count.
    """
    mask = update.patch.mask
    count = layout.num_parameters if mask.is_full else int((mask.indices < layout.num_parameters).sum())
    if update.content not in ("weights", "delta") or not count:
        return False
    values = update.patch.values[:count]
    if update.content == "delta":
        return not values.any()
    return torch.equal(values, mask.take(weights)[:count].to(values.device))


class ChangeLimit:
    """Refuses models that are farther from the last accepted one than the site's own training explains.

    The parameters that are live in the model count, each from the last value that the site saw at it, or from zero:
    running statistics have other scales, and pruning is no step. A model of few live entries replaces these values
    alone, so that it does not reset the others. The limit starts with the site's first delta; a site that is started
    again begins anew.

    Args:
        factor: largest distance, as a multiple of the L2 norm of the site's last delta, for each round between.
        layout: layout of the model.
    """

    def __init__(self, factor: float, layout: Layout):
        self.factor = factor
        self._parameters = Mask.from_tensors(layout, lambda spec: spec.role != "buffer")
        self._accepted: tuple[int, Tensor] | None = None
        self._norm: float | None = None

    def admit(self, request: RequestId, weights: Tensor, live: Mask) -> None:
        """Check a model and remember it.

        Args:
            request: kind and round of the request.
            weights: ``(P,)`` the model; its live entries are copied.
            live: its live entries.

        Raises:
            RequestRefused: the model is too far from the last accepted one, which stays the one to compare with.
        """
        # A request without a model, such as that for statistics of inputs.
        if not live.count:
            return
        t, last = self._accepted or (0, torch.zeros_like(weights))
        if self._norm is not None:
            compared = live & self._parameters
            distance = float(torch.where(compared.bits, weights - last, 0.0).double().norm())
            # A site that took no part in some rounds sees their steps at once; so does one whose server went back.
            limit = self.factor * self._norm * max(1, abs(request.round - t))
            if not distance <= limit:
                raise RequestRefused(
                    f"request {request.kind!r} of round {request.round}: the model is {distance:.3g} from the last "
                    f"one; this site's policy allows max_model_change {self.factor:g} times the length of its own "
                    f"delta, {limit:.3g} here"
                )
        # The evaluation after the last round is no step: it would make all rounds before it look missed.
        self._accepted = t if request.kind == EVALUATE else request.round, torch.where(live.bits, weights, last)

    def measure(self, update: Update, weights: Tensor) -> None:
        """Remember the length of the site's own delta.

        Args:
            update: the site's update.
            weights: ``(P,)`` the model that it was computed from.
        """
        if update.content not in ("weights", "delta"):
            return
        mask, values = update.patch.mask, update.patch.copy_to_host().values
        values = values - (mask.take(weights) if update.content == "weights" else 0.0)
        delta = mask.put(values, torch.zeros(mask.size))
        self._norm = float(torch.where(self._parameters.bits, delta, 0.0).double().norm())
