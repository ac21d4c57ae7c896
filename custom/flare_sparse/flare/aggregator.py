"""The aggregator of every method: stages what came in and sums nothing until the whole round has been looked at."""

from __future__ import annotations

from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.aggregator import Aggregator

from ..exchange import Update
from ..federation import Reply
from .payload import REPLY, get_sender


class StagingAggregator(Aggregator):
    """Keeps one reply per site, the first. The sum itself is the method's, in site-name order, after validation."""

    def __init__(self) -> None:
        super().__init__()
        self._staged: dict[str, Reply] = {}

    def reset(self, fl_ctx: FLContext) -> None:
        """A new question: nothing is staged."""
        self._staged = {}

    def accept(self, shareable: Shareable, fl_ctx: FLContext) -> bool:
        """Stage a site's reply; True if it is an update that passed every check."""
        site, reply = get_sender(shareable), shareable.get(REPLY, "E_KIND")
        if site is not None:
            self._staged.setdefault(site, reply)
        return isinstance(reply, Update)

    def aggregate(self, fl_ctx: FLContext) -> Shareable:
        """The staged replies by site, under the key ``REPLY``."""
        staged = Shareable()
        staged[REPLY] = dict(sorted(self._staged.items()))
        return staged
