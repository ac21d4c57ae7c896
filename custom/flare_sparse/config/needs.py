"""The one table of needs: what the features of a job take away, and whether its method, task and settings need it.

A feature names no method, and a method no feature: both name needs (``core/needs.py``), which are compared here. The
same table is ``docs/compatibility.md``.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.needs import Need, Requirement
from ..methods.registry import METHODS
from ..privacy.secure_aggregation.limits import FEWEST_SITES
from ..wire.formats import FORMATS


@dataclass(frozen=True)
class Feature:
    """What a setting takes away from the other parts of a job, and what it needs of them.

    Attributes:
        name: the setting, as in a configuration.
        is_used: whether a job has it; the argument is the job.
        instead: how to do without it.
        effect: what it changes, as the start of an error; empty: it takes nothing.
        takes: the needs that a job with this feature cannot meet.
        needs: what the feature itself needs; the argument is the job.
    """

    name: str
    is_used: Callable[[Any], bool]
    instead: str
    effect: str = ""
    takes: Sequence[Need] = ()
    needs: Callable[[Any], Iterable[Requirement]] = lambda job: ()


def _iterate_privacy_needs(privacy: Any) -> Iterator[Requirement]:
    """Yield what a privacy section needs: where steps are taken, and where metrics are computed."""
    if privacy.unit == "record":
        remedy = "set privacy.unit to subject"
        yield Need.SCRIPT_STEPS.because("unit: record is that of a training script", remedy)
    else:
        remedy = "set privacy.unit to record and call make_private in the script"
        yield Need.PACKAGE_STEPS.because("unit: subject: each step clips the gradients of subjects, with noise", remedy)


def _build_format_feature(need: Need, effect: str) -> Feature:
    """Return the feature of the number formats that take a need away."""
    names = [name for name, row in FORMATS.items() if row.takes is need]
    others = [name for name in FORMATS if name not in names]
    return Feature(
        f"wire.values: {', '.join(names)}",
        lambda job: FORMATS[job.wire.values].takes is need,
        f"set wire.values to {', '.join(others[:-1])} or {others[-1]}",
        effect,
        takes=[need],
    )


_FEATURES = (
    Feature(
        "wire.aggregation: masked",
        lambda job: job.wire.aggregation == "masked",
        "set wire.aggregation to plain",
        "the server reads sums only",
        takes=(
            Need.SINGLE_UPDATES,
            Need.SINGLE_SCORES,
            Need.OWN_ENTRIES,
            Need.LATE_WEIGHTS,
            Need.OWN_FORMAT,
            Need.EXACT_STATISTICS,
        ),
        needs=lambda job: [Need.QUORUM.because("each of two sites can subtract its own values from their sum")],
    ),
    _build_format_feature(Need.EXACT_MODEL, "sites train from a rounded model"),
    _build_format_feature(Need.EXACT_STATISTICS, "values are rounded"),
    Feature(
        "wire.values",
        lambda job: job.wire.values != "float32",
        "leave wire.values at float32",
        needs=lambda job: [need.because(f"values are {job.wire.values}") for need in FORMATS[job.wire.values].needs],
    ),
    Feature(
        "privacy",
        lambda job: job.privacy is not None,
        "leave privacy out",
        "the budget covers one training a round, of float32 steps with noise",
        takes=(Need.MORE_READS, Need.JOINT_SUBJECTS, Need.PLAIN_STEPS, Need.EXACT_STATISTICS),
        needs=lambda job: _iterate_privacy_needs(job.privacy),
    ),
    Feature(
        "a task",
        lambda job: job.task.key != "script",
        "use task.script",
        "the package takes the steps",
        takes=[Need.SCRIPT_STEPS],
    ),
    Feature(
        "task.script",
        lambda job: job.task.key == "script",
        "write a task (docs/own-task.md)",
        "a training script trains and evaluates by itself",
        takes=[Need.PACKAGE_STEPS],
        needs=lambda job: [Need.HIDDEN_EXAMPLES.because()],
    ),
    Feature(
        "federation.early_stopping",
        lambda job: job.federation.early_stopping is not None,
        "leave early_stopping out",
        "the run may end before its last round, by the validation examples of all sites",
        takes=(Need.LAST_ROUND, Need.SAMPLED_SITES),
        needs=lambda job: [Need.VALIDATION.because("models are compared on validation examples")],
    ),
    Feature(
        "task.split.validation: 0",
        lambda job: not job.task.config.split.validation,
        "set task.split.validation, such as to 0.1",
        "no site has validation examples",
        takes=[Need.VALIDATION],
    ),
    Feature(
        f"federation.min_sites below {FEWEST_SITES}",
        lambda job: job.federation.min_sites < FEWEST_SITES,
        f"set federation.min_sites to {FEWEST_SITES} or more",
        f"fewer than {FEWEST_SITES} of the sites commit a round",
        takes=[Need.QUORUM],
    ),
    Feature(
        "federation.clip_norm",
        lambda job: job.federation.clip_norm is not None,
        "use clip_norm and max_norm of the site's own policy",
        needs=lambda job: [Need.SINGLE_UPDATES.because("needs to read single updates")],
    ),
    Feature(
        "federation.max_share",
        lambda job: job.federation.max_share < 1,
        "leave max_share at 1, and agree on federation.examples",
        needs=lambda job: [
            Need.LATE_WEIGHTS.because(
                "depends on the sites that contribute, which are known only after the sites have weighted their values"
            )
        ],
    ),
    Feature(
        "method.personal",
        lambda job: bool(job.method.config.personal),
        "leave personal out",
        "some tensors stay at the sites",
        takes=[Need.WHOLE_MODEL],
        needs=lambda job: [Need.PLAIN_STEPS.because("these tensors train without noise")],
    ),
    Feature(
        "method.participation",
        lambda job: job.method.config.participation < 1,
        "set participation to 1",
        needs=lambda job: [
            Need.SAMPLED_SITES.because(f"{job.method.config.participation:g} samples some of the sites for each round")
        ],
    ),
    Feature(
        "method.training",
        lambda job: job.task.key == "script" and job.method.config.training != _get_default_training(job),
        'leave method.training out, and give the script its settings in task.args: "--lr 0.1"',
        needs=lambda job: [Need.PACKAGE_STEPS.because("has no effect: the script decides how it trains")],
    ),
    Feature(
        "method.training.schedule",
        lambda job: not job.method.config.training.schedule.is_constant,
        "leave schedule out",
        needs=lambda job: [
            Need.NUMBER_OF_ROUNDS.because(
                "is over method.rounds, so the learning rate of every round depends on their number"
            )
        ],
    ),
    Feature(
        "method.training.precision: bfloat16",
        lambda job: job.method.config.training.precision != "float32",
        "leave precision out",
        "a training pass computes in bfloat16",
        takes=[Need.FLOAT32_STEPS],
        needs=lambda job: [Need.PLAIN_STEPS.because("gradients are clipped in float32")],
    ),
    Feature(
        "method.training.compute: sparse",
        lambda job: job.method.config.training.compute == "sparse",
        "set compute to auto",
        needs=lambda job: [Need.PLAIN_STEPS.because("the kernels compute whole minibatches")],
    ),
)
FEATURES = {feature.name: feature for feature in _FEATURES}
"""The features of a job by name; a new one adds its entry above."""
CONTINUATION = Feature(
    "--start RUN",
    lambda job: False,
    "start a run of all rounds without it",
    "the rounds of the finished run must be those of the longer one",
    takes=[Need.NUMBER_OF_ROUNDS],
)
AUDIT = Feature(
    "flare-sparse audit",
    lambda job: False,
    "audit another run",
    "attackers see one model, and the examples of the sites are known here",
    takes=(Need.NO_COMMON_MODEL, Need.HIDDEN_EXAMPLES),
)
WITHDRAWAL = Feature(
    "flare-sparse withdraw",
    lambda job: False,
    "remove the subjects from the data and run again",
    "the package leaves the subjects out of what a site reads",
    takes=[Need.HIDDEN_EXAMPLES],
)


@dataclass(frozen=True)
class JobPart:
    """A part of a job with its needs.

    Attributes:
        name: its name in an error.
        instead: how to do without it; empty: without a change of the part itself, it cannot be.
    """

    name: str
    needs: Iterable[Requirement]
    instead: str = ""


def iterate_parts(job: Any) -> Iterator[JobPart]:
    """Yield the method, the task and the features of a job, with their needs."""
    yield JobPart(f"method {job.method.name}", job.method.config.needs())
    yield JobPart("task", job.task.config.needs())
    for feature in FEATURES.values():
        if feature.is_used(job):
            yield JobPart(feature.name, tuple(feature.needs(job)), feature.instead)


def find_conflicts(
    job: Any, parts: Iterable[JobPart] | None = None, features: Iterable[Feature] | None = None
) -> list[str]:
    """Return one text for each pair of a feature and a part that needs what the feature takes away.

    Args:
        job: the settings of a job.
        parts: the parts to compare; None: all that the settings have.
        features: the features to compare; None: those that the job uses.
    """
    parts = list(iterate_parts(job) if parts is None else parts)
    features = [feature for feature in FEATURES.values() if feature.is_used(job)] if features is None else features
    found = ((part, feature, match_needs(part.needs, feature)) for feature in features for part in parts)
    return [_describe_conflict(part, feature, missing) for part, feature, missing in found if missing]


def match_needs(needs: Iterable[Requirement], feature: Feature) -> list[Requirement]:
    """Return the needs that a feature takes away, in a fixed order."""
    missing = [requirement for requirement in needs if requirement.need in feature.takes]
    return sorted(missing, key=lambda r: (list(Need).index(r.need), r.reason))


def _describe_conflict(part: JobPart, feature: Feature, missing: list[Requirement]) -> str:
    reasons = " and ".join(dict.fromkeys(requirement.reason for requirement in missing))
    remedies = list(dict.fromkeys(requirement.remedy for requirement in missing if requirement.remedy))
    if part.instead:
        remedies.append(part.instead)
    elif not remedies and part.name.startswith("method "):
        remedies = [f"choose {', '.join(list_compatible_methods(feature))}"]
    remedies.append(f"or {feature.instead}")
    return f"{feature.name}: {feature.effect}, but {part.name}: {reasons}; {', '.join(remedies)}"


def list_compatible_methods(feature: Feature) -> list[str]:
    """Return the methods that work with a feature by their default settings."""
    return [name for name, method in METHODS.items() if not match_needs(method.Config().needs(), feature)]


def _get_default_training(job: Any) -> Any:
    return type(job.method.config).model_fields["training"].get_default(call_default_factory=True)
