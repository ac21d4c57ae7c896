"""A run of a configuration in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...config.assemble import Assembly, build_rules
from ...config.schema import RunConfig
from ...rounds.federation import Outcome
from ...compute.kernels.threads import limit_kernel_threads
from ...rounds.local.run import run_locally
from ...training import Site
from ...wire.ledger import Ledger


def run_assembly(
    config: RunConfig, assembly: Assembly, sites: Mapping[str, Site | Exception], **options: Any
) -> tuple[Outcome, Ledger]:
    """Run the rounds of a configuration in this process, over the real messages and with its numbers of threads.

    Args:
        config: the configuration.
        assembly: what :func:`flare_sparse.config.assemble.assemble` built from it.
        sites: sites by name.
        **options: further arguments of :func:`flare_sparse.rounds.local.run.run_locally`.
    """
    with limit_kernel_threads(config.federation.threads):
        return run_locally(
            assembly.method,
            assembly.weights,
            sites,
            assembly.task.metric,
            values=config.wire.values,
            run=assembly.run_id,
            rules=build_rules(config),
            thread_count=config.torch_threads,
            **options,
        )
