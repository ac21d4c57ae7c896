"""A run of a configuration in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...compute.kernels.threads import limit_kernel_threads
from ...config.assemble import Assembly, build_rules
from ...config.schema import RunConfig
from ...core.checkpoint.store import Store
from ...privacy.encryption import KeyContexts
from ...rounds.endpoints.egress import EgressLog
from ...rounds.federation import Outcome
from ...rounds.local.run import UNWATCHED, Course, Transport, Watcher, run_locally
from ...training import Site
from ...wire.ledger import Ledger


def run_assembly(
    config: RunConfig,
    assembly: Assembly,
    sites: Mapping[str, Site | Exception],
    *,
    watcher: Watcher = UNWATCHED,
    stores: Callable[[str], Store | None] = lambda end: None,
    resume: bool = False,
    egress: Callable[[str], EgressLog | None] = lambda site: None,
    contexts: KeyContexts | None = None,
    ledger: Ledger | None = None,
) -> tuple[Outcome, Ledger]:
    """Run the rounds of a configuration in this process, over the real messages and with its numbers of threads.

    Args and returned values are those of :func:`flare_sparse.rounds.local.run.run_locally`.
    """
    transport = Transport(config.wire.values, contexts, config.sum_rules, config.hubs, config.builds_initial)
    course = Course(assembly.run_id, build_rules(config), config.torch_threads, stores, resume, egress)
    with limit_kernel_threads(config.federation.threads):
        return run_locally(
            assembly.method,
            assembly.weights,
            sites,
            assembly.task.metric,
            transport=transport,
            course=course,
            watcher=watcher,
            ledger=ledger,
        )
