"""A site's policy: the terms under which values may leave the site, read from a file of the site's own."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from torch import Tensor

from ...cohorts.subgroups import SUBJECTS, split_metric, suppress_small
from ...core.errors import ConfigError, PolicyRefusal
from ...core.exchange import EVALUATE, Content, Patch
from ...core.mask import Mask
from ...core.params import Layout, TensorSpec
from ...core.settings import Settings
from ...inputs.scaling import STATISTICS, select_statistics
from ...privacy.dp.account import Budget
from ...privacy.dp.accounting import MAX_DELTA, MAX_EPSILON, MIN_DELTA
from ...tasks.task import COUNTS, EPSILON, get_count_name
from ...training import SampleUsage
from ..problems import describe_problems
from ..yaml_files import read_content

POLICY_FILE = "flare_sparse_policy.yaml"
"""Name of the policy's file in the ``local`` folder of the site's startup kit."""
PRESETS = {file.stem: file for file in sorted((Path(__file__).parent / "presets").glob("*.yaml"))}
"""Policies that come with the package, by name: open, careful, strict."""


class Policy(Settings):
    """What may leave a site. The default policy allows everything that the package sends."""

    methods: tuple[str, ...] | None = None
    """methods that may run here; default: all"""
    contents: tuple[Content, ...] = ("weights", "delta", "scores", "metrics", "statistics")
    """contents that an update may have; without 'scores' no saliency leaves; 'metrics': metrics alone; 'statistics':
    count, mean and standard deviation of each input"""
    min_examples: int = Field(0, ge=0)
    """minimum number of distinct training examples from which an update was computed"""
    min_score_examples: int = Field(0, ge=0)
    """the same minimum for scores, such as 64"""
    min_score_batches: int = Field(0, ge=0)
    """minimum number of minibatches for scores, such as 4"""
    min_test_examples: int = Field(0, ge=0)
    """metrics of fewer test or validation examples stay at the site"""
    metrics: Literal["exact", "rounded", "none"] = "exact"
    """rounded: to two decimals, or three digits of a number above 1; none: no metrics leave"""
    release: Literal["exact", "cells"] = "exact"
    """cells: numbers about people are rounded sums over the cells that the site declared; exact: counts and metrics of
    whichever rows a job chooses"""
    min_cell: int = Field(10, ge=2)
    """fewest people of a declared cell; metrics lie on a grid of it over n"""
    approved_rows: tuple[str, ...] = ()
    """choices of rows by jobs that a person at the site has approved, as site_error.txt names them"""
    max_evaluations: int | None = Field(None, ge=1)
    """number of models of a run whose metrics leave: the last one, and others at equal intervals"""
    max_lifetime_questions: int | None = Field(None, ge=1)
    """number of questions of all jobs, for ever, that are answered: models whose metrics leave, statistics of inputs,
    descriptions, fingerprints"""
    max_starts: int | None = Field(None, ge=1)
    """how often the server may start a job again and repeat its requests"""
    min_entries: int = Field(0, ge=0)
    """fewest entries that a request may ask to train or to score; for scores, of every tensor"""
    max_model_entries: int = Field(2**28, ge=1)
    """largest number of entries of a job's model; a site needs about 22 bytes for each"""
    max_model_change: float | None = Field(None, gt=0)
    """largest distance of a model from the last one, as a multiple of the norm of the site's own delta"""
    verify_initial_model: bool = False
    """answer requests for the job's initial model only if it is the one that its seed defines"""
    withhold_isolated: bool = False
    """leave out the changes of units of linear layers that reveal the input of a single example"""
    score_bits: int | None = Field(None, ge=1, le=8)
    """quantize scores to this many bits, per tensor"""
    max_upload_bytes: int | None = Field(None, ge=128)
    """size limit of a message in bytes"""
    max_upload_share: float = Field(1.0, gt=0, le=1)
    """largest share of the model's entries in a message"""
    tensors: tuple[str, ...] = ("*",)
    """names of tensors that may leave; * and ? are wildcards"""
    clip_norm: float | None = Field(None, gt=0)
    """clip longer deltas to this L2 norm before they leave"""
    max_norm: float | None = Field(None, gt=0)
    """refuse deltas with a larger L2 norm"""
    noise: float = Field(0.0, ge=0)
    """standard deviation of Gaussian noise on weights and deltas, as a share of clip_norm"""
    epsilon: float | None = Field(None, gt=0, le=MAX_EPSILON)
    """privacy budget of a subject over all jobs; only jobs with privacy may train then"""
    delta: float = Field(1e-5, ge=MIN_DELTA, le=MAX_DELTA)
    """probability that epsilon does not bound"""
    masked: bool = False
    """refuse weights, deltas and scores that are not masked (wire.aggregation), so that the server reads their sum
    only"""
    min_sum_sites: int = Field(3, ge=3)
    """fewest sites of a masked sum, and of a combination of several"""
    permit: str | None = Field(None, min_length=1, max_length=200)
    """number of the ethics vote or data permit that a job must name; default: jobs need none"""
    checkpoint_days: int | None = Field(None, ge=0)
    """days that checkpoints are kept after a job has last used them; 0: until the last answer; default: 90 at a site,
    no limit at a server"""
    foreign_jobs: bool = False
    """let results of other packages' jobs leave without any check"""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic reads ``true`` as 1: a limit that its author never wrote."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError(f"found {str(value).lower()}; expected a value, not yes or no")
        return value

    @model_validator(mode="after")
    def _require_clip_norm_for_noise(self) -> Self:
        if self.noise and self.clip_norm is None:
            raise ValueError("noise is a share of clip_norm; give clip_norm, too")
        return self

    @property
    def privacy_budget(self) -> Budget | None:
        """Limit on the privacy loss of a subject over all jobs; None: each job's own budget is the only one."""
        return None if self.epsilon is None else Budget(self.epsilon, self.delta)

    @property
    def upload_caps(self) -> dict[str, int | float]:
        """Limits on uploads that the site tells the server, so that no update is requested that may not leave."""
        caps = {"max_upload_bytes": self.max_upload_bytes, "max_upload_share": self.max_upload_share}
        return {name: cap for name, cap in caps.items() if cap not in (None, 1.0)}

    def find_refusals(
        self, content: Content, usage: SampleUsage, mask: Mask, values: Tensor, layout: Layout, size: int | None = None
    ) -> Iterator[str]:
        """Yield the reasons why an update may not leave; none when it may.

        Args:
            content: content of the update.
            usage: training examples and minibatches from which it was computed.
            mask: entries that are sent.
            values: ``(mask.count,)`` values of these entries; for weights, less the weights that the site received.
            layout: layout of the model.
            size: bytes of the encoded message, if known.
        """
        yield from self.find_message_refusals(content, mask.count, layout.size, size)
        if content == "metrics":
            return
        yield from self.find_shortfalls(content, usage)
        if not mask <= Mask.from_tensors(layout, self.allows_tensor):
            yield f"tensors: the update has entries of a tensor that does not match {', '.join(self.tensors)}"
        if not bool(torch.isfinite(values).all()):
            yield "finite: a value is NaN or infinite"
        elif content == STATISTICS:
            yield from self._find_statistics_refusals(values, mask, layout)
        elif self.max_norm is not None and content != "scores" and compute_norm(values) > self.max_norm:
            yield f"max_norm: the delta has an L2 norm of {compute_norm(values):.3g}, the limit is {self.max_norm}"

    def find_message_refusals(self, content: str, sent: int, total: int, size: int | None = None) -> Iterator[str]:
        """Yield what forbids a message, whatever its values are.

        Args:
            content: content of the update.
            sent: number of entries in the message.
            total: number of entries of the model.
            size: bytes of the encoded message, if known.
        """
        if content not in self.contents:
            yield f"contents: {content} may not leave this site"
        if size is not None and self.max_upload_bytes is not None and size > self.max_upload_bytes:
            yield f"max_upload_bytes: the message has {size} bytes, the limit is {self.max_upload_bytes}"
        if content != "metrics" and sent > self.max_upload_share * total:
            share, limit = sent / total, self.max_upload_share
            yield f"max_upload_share: {share:.1%} of the model's entries, the limit is {limit:.1%}"
        if self.noise and content == STATISTICS:
            yield "noise: statistics of inputs would leave without noise"

    def _find_statistics_refusals(self, values: Tensor, mask: Mask, layout: Layout) -> Iterator[str]:
        """Yield the reasons why statistics of inputs may not leave."""
        # The mean of a column with one value present is that value, however many subjects the site has.
        for _, statistics in select_statistics(mask.put(values, torch.zeros(mask.size)), layout):
            count = statistics[0][statistics[0] > 0]
            if len(count) and int(count.min()) < self.min_examples:
                yield f"min_examples: an input has {int(count.min())} values, the minimum is {self.min_examples}"

    def find_shortfalls(self, content: str, usage: SampleUsage) -> Iterator[str]:
        """Yield each minimum of examples or minibatches that an update falls short of; none for metrics."""
        if content == "metrics":
            return
        minima = [("min_examples", "examples", usage.examples, self.min_examples)]
        if content == "scores":
            minima.append(("min_score_examples", "examples", usage.examples, self.min_score_examples))
            minima.append(("min_score_batches", "minibatches", usage.batches, self.min_score_batches))
        for term, unit, count, minimum in minima:
            if count < minimum:
                yield f"{term}: {content} were computed from {count} {unit}, the minimum is {minimum}"

    def find_job_refusals(self, permit: str | None) -> Iterator[str]:
        """Yield the reasons why a job may not run here, before any data is read; none if it may.

        Args:
            permit: the job's permit; None: it names none.
        """
        if self.permit is not None and permit != self.permit:
            found = "the job has none" if permit is None else f"the job has {permit!r}"
            yield f"permit: this site takes part under {self.permit!r}, and {found}; set permit: {self.permit!r}"

    def find_description_refusals(self, *, permit: str | None) -> Iterator[str]:
        """Yield the reasons why statistics of the site's data may not leave; none if they may.

        Args:
            permit: the job's permit; None: it names none.
        """
        yield from self.find_job_refusals(permit)
        if STATISTICS not in self.contents:
            yield "contents: statistics may not leave this site"
        for term in ("masked", "noise", "epsilon"):
            if getattr(self, term):
                yield f"{term}: statistics would leave without it"

    def find_value_refusals(self, *, is_hidden: bool) -> Iterator[str]:
        """Yield the reason why values may not leave in a job; none if they may.

        Args:
            is_hidden: whether the server reads no value of a single site.
        """
        if self.masked and not is_hidden:
            yield "masked: no values of a single site may be readable; set wire.aggregation: masked"

    @staticmethod
    def is_question(content: str) -> bool:
        """Return whether an update of a content answers a question of the job's choice, whatever its model."""
        return content == STATISTICS

    def find_case_refusals(self, cases: int) -> Iterator[str]:
        """Yield the reason why statistics of so few cases may not leave; none if they may."""
        if cases < self.min_examples:
            yield f"min_examples: {cases} cases, the minimum is {self.min_examples}"

    def find_request_refusals(self, kind: str, entries: int) -> Iterator[str]:
        """Yield the reason why a request asks for too few entries; none if it may be answered.

        Args:
            kind: kind of the request.
            entries: number of entries that it asks to train or to score.
        """
        # A score or a delta of few entries escapes quantization and averaging, which act on many values at once.
        # Statistics of inputs depend on no model and are as many as there are inputs.
        if kind not in (EVALUATE, STATISTICS) and entries < self.min_entries:
            yield f"min_entries: the request asks for {entries} entries, the minimum is {self.min_entries}"

    def find_score_refusals(self, trainable: Mask, scored: Mask, layout: Layout) -> Iterator[str]:
        """Yield each tensor of which a request asks for the scores of too few entries.

        Scores are quantized per tensor, so few entries of one tensor would leave unchanged, however many entries of
        other tensors go with them. A tensor that is asked for as a whole passes.

        Args:
            trainable: entries that the request asks for.
            scored: entries that have a score; where the method chooses them itself, no tensor has too few.
            layout: layout of the model.
        """
        if not scored <= trainable:
            return
        for name, bits in layout.unflatten(trainable.bits).items():
            count, minimum = int(bits.sum()), min(self.min_entries, bits.numel())
            if 0 < count < minimum:
                asked = f"scores of {count} entries of {name}"
                yield f"min_entries: the request asks for {asked}, the minimum is {minimum}"

    def sanitize_metrics(
        self, metrics: Mapping[str, float], examples: Mapping[str, int], groups: Collection[str] = ()
    ) -> dict[str, float]:
        """Return the metrics that may leave, each computed from enough examples.

        Args:
            metrics: the site's metrics.
            examples: numbers of test and of validation examples, by the name of the metric that reports them.
            groups: subgroups that the site declared; of others nothing leaves under ``release: cells``.

        Rounding to hundredths is absolute below 1: relative to the value, it would show a single example among many
        whose error a hostile model keeps near zero.
        """
        # Epsilon follows from the job's settings and the number of subjects, and the record needs it whole.
        spent = {name: value for name, value in metrics.items() if name == EPSILON}
        if self.metrics == "none":
            return spent
        # Validation examples are a part of their own: enough test examples do not hide a single one of these.
        enough = {
            name: value
            for name, value in metrics.items()
            if name != EPSILON and examples.get(get_count_name(name), 0) >= self.min_test_examples
        }
        if self.release == "cells":
            enough = {name: v for name, v in enough.items() if not (part := split_metric(name)) or part[1] in groups}
        enough = suppress_small(enough, self.min_test_examples)
        if self.metrics == "rounded":
            enough = {
                name: value if name in COUNTS or name.startswith(f"{SUBJECTS} in ") else _round_metric(value)
                for name, value in enough.items()
            }
        return enough | spent

    def allows_metrics(self, t: int, rounds: int, evaluate_every: int) -> bool:
        """Return whether the metrics may leave of the model that a request of round ``t`` carries.

        A server that has made a model up for each question cannot ask more of them in a job of more rounds.

        Args:
            t: round of the request; above ``rounds``: its model is the last one.
            rounds: rounds of the job.
            evaluate_every: rounds from one evaluated model of the job to the next.

        >>> [t for t in range(1, 22) if Policy(max_evaluations=5).allows_metrics(t, 20, 2)]
        [1, 7, 13, 19, 21]
        """
        if self.max_evaluations is None or t > rounds:
            return True
        if self.max_evaluations == 1:
            return False
        interval = evaluate_every * math.ceil(rounds / (evaluate_every * (self.max_evaluations - 1)))
        return (t - 1) % interval == 0

    def allows_tensor(self, spec: TensorSpec) -> bool:
        """Whether the tensor's name matches one of ``tensors``."""
        return any(fnmatchcase(spec.name, pattern) for pattern in self.tensors)

    def sanitize_values(self, content: Content, patch: Patch, layout: Layout) -> Tensor:
        """Return the values ``(count,)`` that may leave in place of a patch's: coarse scores, clipped and noisy deltas.

        Where no term applies, the very object ``patch.values`` is returned.

        Args:
            content: content of the update.
            patch: its values; for weights, less the weights that the site received.
            layout: layout of the model.
        """
        values = patch.values
        if content == STATISTICS:
            return values
        if content == "scores":
            if self.score_bits is None:
                return values
            scores = patch.to_vector()
            for tensor in layout.unflatten(scores).values():
                tensor.copy_(_quantize(tensor, self.score_bits))
            return patch.mask.take(scores)
        if self.clip_norm is not None and (norm := compute_norm(values)) > self.clip_norm:
            values = values * (self.clip_norm / norm)
        if self.noise and self.clip_norm is not None:
            noise = torch.randn(values.shape, generator=_build_secret_generator())
            values = values + self.noise * self.clip_norm * noise
        return values


def _round_metric(value: float) -> float:
    if not math.isfinite(value):
        return value
    return round(value, 2 - max(0, math.floor(math.log10(max(abs(value), 1.0)))))


def _quantize(scores: Tensor, bits: int) -> Tensor:
    """Return the scores rounded to multiples of the largest one over ``2^bits - 1``."""
    largest, levels = scores.abs().max(), 2**bits - 1
    return (scores / largest * levels).round() / levels * largest if largest > 0 else scores


def compute_norm(values: Tensor) -> float:
    """Return the L2 norm, summed in double precision."""
    return float(values.double().square().sum().sqrt())


def _build_secret_generator() -> torch.Generator:
    # The run's seed is known to the server, which could subtract noise derived from it.
    generator = torch.Generator()
    generator.seed()
    return generator


def find_policy_file(name_or_file: Path) -> Path:
    """Return the file of a policy: the user's own file, or a preset by its name, such as ``careful``.

    Raises:
        ConfigError: there is neither such a file nor such a preset.
    """
    if name_or_file.is_file():
        return name_or_file
    if file := PRESETS.get(str(name_or_file)):
        return file
    raise ConfigError(f"{name_or_file}: there is no such file and no such preset; the presets are {', '.join(PRESETS)}")


def read_policy(file: Path) -> Policy:
    """Read a policy; without a file, return the default policy, which allows everything.

    Raises:
        ConfigError: the file cannot be read, or a term is unknown or out of range.
    """
    if not file.is_file():
        return Policy()
    content = read_content(file, "cannot be read as a policy, terms and values in YAML: ") or {}
    try:
        return Policy.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{file}: {'; '.join(describe_problems(error, Policy, content))}") from error


def raise_refusals(refusals: Iterable[str]) -> None:
    """Raise the given reasons as one refusal, if there are any.

    Raises:
        PolicyRefusal: there is at least one reason.
    """
    if listed := "; ".join(refusals):
        raise PolicyRefusal(f"this site's policy: {listed}")
