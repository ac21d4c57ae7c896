"""A run of a configuration in this process."""

from collections.abc import Mapping
from dataclasses import replace

from ...compute.kernels.threads import limit_kernel_threads
from ...config.assemble import Assembly, build_transport
from ...config.schema import RunConfig
from ...core.seeds import limit_threads
from ...rounds.federation.records import Outcome
from ...rounds.local.run import FROM_START, Course, run_locally
from ...training import Site
from ...wire.ledger import Ledger


def run_assembly(
    config: RunConfig,
    assembly: Assembly,
    sites: Mapping[str, Site | Exception],
    *,
    course: Course = FROM_START,
    ledger: Ledger | None = None,
) -> tuple[Outcome, Ledger]:
    """Run the rounds of a configuration in this process, over the real messages and with its numbers of threads.

    Arguments and returned values are those of :func:`flare_sparse.rounds.local.run.run_locally`; run id, rules and
    threads of ``course`` are those of the configuration.
    """
    transport = build_transport(config)
    course = replace(course, run=assembly.run_id, rules=config.federation, threads=config.torch_threads)
    # First what other threads of the process wait for.
    with limit_threads(config.torch_threads), limit_kernel_threads(config.federation.threads):
        return run_locally(
            assembly.method,
            assembly.weights,
            sites,
            assembly.task.metric,
            transport=transport,
            course=course,
            ledger=ledger,
        )
