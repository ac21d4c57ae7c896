"""Check a job against a site's policy before the job comes, on the messages of a dry run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from ...core.params import Layout
from ...privacy.dp.accounting import Charge
from ...privacy.dp.forecast import Forecast, explain_shortage
from ...rounds.local.dry_run import DryTrainer, dry_run
from ...training import SampleUsage, Site
from ...wire.ledger import LedgerLine
from ...wire.stage import PLAIN_STAGE
from ..assemble import Assembly, build_transport, plan_sampling
from ..schema import JobConfig
from .policy import Policy


def find_policy_conflicts(
    policy: Policy,
    job: JobConfig,
    assembly: Assembly,
    examples: Mapping[str, int],
    subjects: Mapping[str, int] | None = None,
    earlier: Sequence[Charge] = (),
) -> list[str]:
    """Return the reasons why a policy would refuse the updates of a job; empty when it would accept them.

    Args:
        policy: policy of a site.
        job: settings of the job.
        assembly: the parts of that job.
        examples: number of training examples by site, as far as known. The minima of examples are not checked for
            sites without training examples, which only evaluate models.
        subjects: number of training subjects by site; None: every example is a subject of its own.
        earlier: what earlier jobs have charged the site's subjects.

    Raises:
        RoundFailed: the method needs more sites than are given.
    """
    method, layout = assembly.method, assembly.layout
    trainers = {name: DryTrainer(name, layout, examples=count) for name, count in examples.items() if count}
    sites = {name: Site(name, trainer) for name, trainer in trainers.items()}
    sites = sites or {"site-1": Site("site-1", DryTrainer("site-1", layout))}
    # In a masked sum, too, a policy bounds what a site would send without one.
    _, ledger = dry_run(method, assembly.weights, sites, replace(build_transport(job), stage=PLAIN_STAGE))
    usages = {name: trainer.usages for name, trainer in trainers.items()}
    conflicts = list(iterate_conflicts(policy, method.name, ledger.lines, usages, layout))
    if any(line.direction == "up" and line.content != "metrics" for line in ledger.lines):
        conflicts += policy.find_value_refusals(is_hidden=job.stage.hides_values)
    limit = policy.privacy_budget
    if limit is not None and assembly.privacy is None:
        conflicts.append("epsilon: the job has no privacy section; add one, such as privacy: {epsilon: 3}")
    elif limit is not None and assembly.privacy is not None:
        for site, count in sorted((site, count) for site, count in (subjects or examples).items() if count):
            plan = plan_sampling(method, count)
            shortage = explain_shortage(Forecast.compute(assembly.privacy, plan, limit, earlier), limit)
            conflicts += [f"{shortage} ({site})"] if shortage else []
    return [*policy.find_job_refusals(job.permit), *conflicts]


def iterate_conflicts(
    policy: Policy,
    method: str,
    messages: Iterable[LedgerLine],
    usages: Mapping[str, Sequence[SampleUsage]],
    layout: Layout,
) -> Iterator[str]:
    """Yield the conflicts between a policy and a job that can be found before the job runs.

    Terms on the trained values (``max_norm``) and the tensors of a partial update are not known by then.

    Args:
        policy: policy of a site.
        method: name of the job's method.
        messages: ledger of a dry run.
        usages: by site, the examples and minibatches of each update; only of sites whose data is known.
        layout: layout of the model.
    """
    uploads = [line for line in messages if line.direction == "up"]
    if policy.methods is not None and method not in policy.methods:
        yield f"methods: {method} may not run at this site; allowed: {', '.join(policy.methods)}"
    for content in sorted({line.content for line in uploads}):
        alike = [line for line in uploads if line.content == content]
        sent, size = max(line.scalars_sent for line in alike), max(line.payload_bytes for line in alike)
        for reason in policy.find_message_refusals(content, sent, alike[0].scalars_total, size):
            yield f"{reason}; {_REMEDIES.get(reason.partition(':')[0], 'choose other settings or another method')}"
    withheld = [spec.name for spec in layout.tensors if not policy.allows_tensor(spec)]
    if withheld and any(line.scalars_sent == line.scalars_total for line in uploads if line.content != "metrics"):
        yield f"tensors: {withheld[0]} may not leave, and a message has all tensors of the model"
    for site, site_usages in sorted(usages.items()):
        # The usages of a site are in the order of its uploads.
        contents = [line.content for line in uploads if line.site == site]
        shortfalls = (
            policy.find_shortfalls(content, usage) for content, usage in zip(contents, site_usages, strict=True)
        )
        for reason in dict.fromkeys(chain.from_iterable(shortfalls)):
            yield f"{reason} ({site}); {_SCORES_REMEDY if reason.startswith('min_score') else 'add data'}"


_REMEDIES = {"max_upload_bytes": "raise sparsity", "noise": "choose task.scaling"}
_SCORES_REMEDY = (
    "add data, or let scores read all of it: --set method.saliency_batches=null; for a smaller site send none: --set "
    "method.scores=random, whose mask does not follow the data and costs accuracy (docs/site-policy.md)"
)
