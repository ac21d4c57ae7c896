"""What a site's policy would refuse of a job, found out before the job comes: from the messages of a dry run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from ..assemble import Assembly
from ..config import JobConfig
from ..local.dry_run import DrySite, dry_run
from ..params import Layout
from ..training import SampleUsage
from ..wire.ledger import LedgerLine
from .policy import Policy


def find_policy_conflicts(policy: Policy, job: JobConfig, assembly: Assembly, examples: Mapping[str, int]) -> list[str]:
    """Why a policy would not let a job's answers out; none where it would.

    Args:
        policy: of a site.
        job: its settings.
        assembly: the parts of that job.
        examples: training examples of the sites that are known; what hangs on them is not judged for a site that has
            none, and would only judge models.

    Raises:
        RoundFailed: the method cannot be carried out by so few sites.
    """
    method, layout = assembly.method, assembly.layout
    known = {name: DrySite(name, layout, examples=count) for name, count in examples.items() if count}
    sites = known or {"site-1": DrySite("site-1", layout)}
    _, ledger = dry_run(method, assembly.weights, sites, job.wire.values, encrypted=job.encrypted)
    used = {name: site.answers for name, site in known.items()}
    return list(iterate_conflicts(policy, method.name, ledger.lines, used, layout))


def iterate_conflicts(
    policy: Policy,
    method: str,
    uploads: Iterable[LedgerLine],
    used: Mapping[str, Sequence[SampleUsage]],
    layout: Layout,
) -> Iterator[str]:
    """What of a job a policy would refuse, as far as that can be known before it runs: not what hangs on the values that
    come out (``max_norm``), nor which tensors an answer of a part of the model touches.

    Args:
        policy: of a site.
        method: of the job.
        uploads: messages of a dry run.
        used: what stood behind each answer, for the sites whose data is known.
        layout: of the model.
    """
    sent = [line for line in uploads if line.direction == "up"]
    if policy.methods is not None and method not in policy.methods:
        yield f"methods: {method} may not run there; allowed: {', '.join(policy.methods)}"
    for content in sorted({line.content for line in sent} - set(policy.contents)):
        yield f"contents: the method sends {content}; choose one that does not, or settings without it"
    values = [line for line in sent if line.content != "metrics"]
    if policy.max_upload_bytes and (most := max((x.payload_bytes for x in sent), default=0)) > policy.max_upload_bytes:
        yield f"max_upload_bytes: a message has {most}, allowed are {policy.max_upload_bytes}; raise the sparsity"
    largest = max((line.scalars_sent / line.scalars_total for line in values), default=0.0)
    if largest > policy.max_upload_share:
        yield f"max_upload_share: a message has {largest:.1%} of the model, allowed are {policy.max_upload_share:.1%}"
    trained = [line for line in values if line.content in ("weights", "delta")]
    if policy.encrypted and any(line.values != "ckks" for line in trained):
        yield "encrypted: weights leave encrypted only; set wire.encryption: ckks"
    kept = [entry.name for entry in layout.tensors if not policy.may_leave(entry)]
    if kept and any(line.scalars_sent == line.scalars_total for line in values):
        yield f"tensors: {kept[0]} may not leave, and a message has the whole model"
    for site, answers in sorted(used.items()):
        contents = [line.content for line in sent if line.site == site]
        few = (policy.too_few(content, behind) for content, behind in zip(contents, answers, strict=True))
        for reason in dict.fromkeys(chain.from_iterable(few)):
            yield f"{reason} ({site}); more data, or settings that read more of it (scores: saliency_batches)"
