"""What all filters of this package share: which messages they take, and one rule for a message that they cannot serve.

A filter of FLARE that raises at the server ends the job for all sites, and FLARE's own filters pass what they do not
know in silence. Here a result that cannot be served is withheld: the site's update becomes empty, the log names site
and reason, and the round goes on without it. FLARE's controllers skip an empty update, and the aggregators of this
package count who is left against their quorum.
"""

from dataclasses import dataclass
from typing import ClassVar

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import Filter, FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ProcessType, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.ccwf.client_ctl import ClientSideController

from ..core.errors import get_failure_code, list_first
from ..flare.egress import install_recorder
from ..flare.payload import get_sender
from .arrays import MODELS, ComponentError, check_plain

_READS = "requires_materialized_task_result"
"""Function by which FLARE asks the executor of a task whether this process reads a script's results."""
WITHHELD = "flare_sparse_withheld"
"""Key of the reason code in the meta of an empty update."""


def open_site(fl_ctx: FLContext) -> None:
    """Log what leaves this site, and tell FLARE that this process reads what a script in its own process sends.

    FLARE knows of filters on the task of a script. In swarm learning they are on the message to the aggregating site,
    which FLARE then names as the one that fetches the tensors: the script would wait for it in ``send`` without end.
    """
    install_recorder(fl_ctx)
    router = getattr(fl_ctx.get_prop(FLContextKey.RUNNER), "task_router", None)
    for executor in {*getattr(router, "task_table", {}).values()}:
        if isinstance(executor, ClientSideController) and not hasattr(executor, _READS):
            setattr(executor, _READS, lambda task_name: True)


def check_last(item: Filter, fl_ctx: FLContext) -> None:
    """Refuse a filter whose message the filters behind it do not know: an encryptor would let it pass in the clear.

    Raises:
        ComponentError: a filter of models (DXOFilter) stands behind it where messages leave.
    """
    runner = fl_ctx.get_prop(FLContextKey.RUNNER)
    tables = [getattr(runner, name, {}) for name in ("task_data_filters", "task_result_filters")]
    for chain in (chain for table in tables for key, chain in table.items() if key.endswith(FilterKey.OUT)):
        behind = chain[chain.index(item) + 1 :] if item in chain else []
        if names := [type(other).__name__ for other in behind if isinstance(other, DXOFilter)]:
            raise ComponentError(
                item,
                f"{list_first(names)} stands behind it and would let its message pass unchanged",
                "put it last in the chain of the job's configuration, or leave one of the two out",
            )


@dataclass(eq=False)
class ModelFilter(DXOFilter):
    """A filter of models and updates; messages without arrays pass.

    Attributes:
        kinds: kinds of the messages that it processes.
        is_strict: whether it raises on other kinds of arrays. A filter that limits what leaves a site must.
    """

    kinds: ClassVar[tuple[DataKind, ...]] = MODELS
    is_strict: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__init__(list(self.kinds), list(self.kinds))

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Log what leaves a site."""
        if event_type == EventType.START_RUN and fl_ctx.get_process_type() == ProcessType.CLIENT_JOB:
            open_site(fl_ctx)

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Process a message in place; a result that cannot be served becomes empty.

        Raises:
            ComponentError: a task cannot be served.
        """
        if shareable.get_return_code(ReturnCode.OK) != ReturnCode.OK:
            return shareable
        try:
            self._check(shareable)
            return super().process(shareable, fl_ctx)
        except Exception as error:
            if self.get_prop(FilterContextKey.CHAIN_TYPE) != FilterChainType.TASK_RESULT_CHAIN:
                raise
            return self._withhold(error, shareable, fl_ctx)

    def _check(self, shareable: Shareable) -> None:
        try:
            dxo = from_shareable(shareable)
        except ValueError:
            return
        if dxo.data_kind in self.kinds:
            if dxo.data and dxo.data_kind in MODELS:
                check_plain(dxo, self)
        elif self.is_strict and dxo.data_kind != DataKind.METRICS:
            kinds = " or ".join(kind.value for kind in self.kinds)
            raise ComponentError(
                self,
                f"the message is of kind {getattr(dxo.data_kind, 'value', dxo.data_kind)}, expected {kinds}",
                "put this filter first among those of config_fed_client.json, on tasks whose result is a model",
            )

    def _withhold(self, error: Exception, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        code, is_leaving = get_failure_code(error), fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.OUT
        site = fl_ctx.get_identity_name() if is_leaving else get_sender(shareable) or "?"
        # At a site the text of a foreign error may name its data, and FLARE streams logs to the server.
        text = str(error) if isinstance(error, ComponentError) or not is_leaving else type(error).__name__
        self.log_error(fl_ctx, f"{code}: the update of site {site} is left out of this round: {text}")
        return DXO(DataKind.WEIGHTS, data={}, meta={WITHHELD: code}).update_shareable(shareable)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO | None:
        raise NotImplementedError
