"""The aggregator component of every job: stages the sites' replies until the attempt is complete."""

from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.aggregator import Aggregator

from ..core.exchange import Update
from ..rounds.federation import Reply
from .payload import REPLY, get_sender


class StagingAggregator(Aggregator):
    """Keeps the first reply of each site. The method aggregates later, in the order of site names, after validation."""

    def __init__(self) -> None:
        super().__init__()
        self._staged: dict[str, Reply] = {}

    def reset(self, fl_ctx: FLContext) -> None:
        """Drop all staged replies: a new attempt begins."""
        self._staged = {}

    def accept(self, shareable: Shareable, fl_ctx: FLContext) -> bool:
        """Stage a site's reply; return True if it is an update that passed every check."""
        site, reply = get_sender(shareable), shareable.get(REPLY, "E_KIND")
        # A site may submit a result twice: the first one counts, so that an accepted update is never replaced.
        if site is not None:
            self._staged.setdefault(site, reply)
        return isinstance(reply, Update)

    def aggregate(self, fl_ctx: FLContext) -> Shareable:
        """Return the staged replies by site, under the key ``REPLY``."""
        staged = Shareable()
        # Replies arrive in any order, but float sums depend on it: the order of names gives the same bits every time.
        staged[REPLY] = dict(sorted(self._staged.items()))
        return staged
