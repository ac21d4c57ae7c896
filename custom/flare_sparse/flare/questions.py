"""Questions about a site's data that train nothing: one door for all of them, at the site and at the server.

A job asks one question. Each site derives it from its own copy of the job, with all of its terms: what the server sends
must equal it, and nothing else of the server's message is read. Every question is counted in the site's record of
requests before the data is read.

Federated statistics of the sites' columns are one question, nnU-Net's fingerprints of their cases the other.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from pydantic import BaseModel

from ..config.loading import serialize_job
from ..config.people import ReleaseGate
from ..config.policy.policy import Policy, raise_refusals
from ..config.schema import JobConfig, build_task
from ..config.yaml_files import format_yaml
from ..core.checkpoint.writing import write_json
from ..core.errors import ConfigError, DataError, PolicyRefusal, RequestRefused, get_failure_code
from ..core.exchange import RequestId
from ..privacy.release import compute_step
from ..results.runs.description import is_label
from ..rounds.endpoints.request_log import RequestLog
from ..tasks.columns import BINS, LEAST, QUANTILES, Description, Figures, compute_figures, encode_columns, list_columns
from ..tasks.data.cases import select_cases
from ..tasks.data.source import find_site_data
from ..tasks.nnunet.fingerprint import Fingerprint, compute_fingerprint, find_differences, merge_fingerprints
from ..tasks.nnunet.raw import find_raw_cases
from ..tasks.nnunet.task import NnunetConfig
from ..tasks.task import SiteData
from .egress import install_recorder
from .payload import QUESTION, build_refusal, extract, get_refusal_code, wrap
from .running import hold_data
from .session import find_record, open_gate, read_job, read_site_policy
from .workspace import get_workspace, write_site_error

ANSWER = "answer"
"""Only key of an answer's data: bytes, which the guard and the egress log count."""
ADMITTED = "flare_sparse.admitted"
"""Key of the answer to an admitted question in FLARE's context; the property is private, so it stays at the site."""
Parsed = TypeVar("Parsed", bound=BaseModel)


@dataclass(eq=False)
class QuestionExecutor(Executor, ABC):
    """Answers the question of a site's own copy of the job, if the site's policy lets statistics leave.

    The fields that a subclass adds are terms of its question.

    Attributes:
        kind: name of the question in the record of requests.
    """

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        super().__init__()

    def collect_terms(self) -> dict[str, Any]:
        """Return all that the answer depends on beside the job's settings and the site's data, as JSON values."""
        return asdict(self)

    @abstractmethod
    def compute(self, job: JobConfig, policy: Policy, data: SiteData, gate: ReleaseGate | None) -> str:
        """Return the answer as text.

        Args:
            job: this site's copy of the job.
            policy: its policy.
            data: its data.
            gate: decides on numbers about people; None: exact ones may leave.
        """

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Log what leaves, from the start of the job."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.START_RUN:
            install_recorder(fl_ctx)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Return the answer, or a refusal with the error code only; its text stays at the site."""
        fl_ctx.set_prop(ADMITTED, None, private=True, sticky=False)
        try:
            answer = DXO(DataKind.STATISTICS, data={ANSWER: self._answer(shareable, fl_ctx).encode()})
        except Exception as error:  # noqa: BLE001 - whatever reading a user's data raises
            code = get_failure_code(error)
            write_site_error(error, code, fl_ctx)
            return build_refusal(code, ReturnCode.EXECUTION_EXCEPTION)
        fl_ctx.set_prop(ADMITTED, answer, private=True, sticky=False)
        return answer.to_shareable()

    def _answer(self, shareable: Shareable, fl_ctx: FLContext) -> str:
        """Return the answer to a server's message.

        Raises:
            RequestRefused: the message is not the question of this site's copy of the job, or there were enough.
            PolicyRefusal: a term of the policy forbids statistics.
            DataError: the site names no data.
        """
        job, policy, question = read_job(fl_ctx), read_site_policy(fl_ctx), build_question(self)
        asked = extract(QUESTION, shareable)
        if not isinstance(asked, str) or asked != question:
            found = f"another one ({len(asked)} characters)" if isinstance(asked, str) else "no question"
            raise RequestRefused(f"this site's copy of the job asks {question}; the server sent {found}")
        raise_refusals(policy.find_description_refusals(permit=job.permit))
        # Counted before the data is read: a process that is ended in between must not forget it.
        digest = self._count(job, policy, question, fl_ctx)
        hold_data(fl_ctx)
        data = find_site_data(fl_ctx.get_identity_name(), Path(get_workspace(fl_ctx).get_site_config_dir()))
        gate = open_gate(fl_ctx)
        if gate is None:
            return self.compute(job, policy, data, None)
        # Never computed anew: two answers over rows that differ by one person would tell that person's values.
        return gate.keep_answer(digest, lambda: self.compute(job, policy, data, gate))

    def _count(self, job: JobConfig, policy: Policy, question: str, fl_ctx: FLContext) -> str:
        """Count a question in the site's record, and return its digest."""
        settings = format_yaml(serialize_job(job))
        digest = hashlib.sha256(f"{question}\n{settings}".encode()).hexdigest()
        log = RequestLog(
            digest[:16],
            lambda kind, t: int((kind, t) == (self.kind, 0)),
            attempts=job.federation.retries + 1,
            max_starts=policy.max_starts,
            file=find_record(fl_ctx, job.name, digest[:16]),
        )
        log.admit(RequestId(self.kind, 0), digest)
        log.admit_question(self.kind, digest, policy.max_lifetime_questions)
        return digest


def build_question(executor: QuestionExecutor) -> str:
    """Return the question that an executor answers, as the text that a server must send."""
    # No braces: FLARE takes them in a job's configuration for a name to fill in.
    return "; ".join(
        [executor.kind, *(f"{name}: {json.dumps(v)}" for name, v in sorted(executor.collect_terms().items()))]
    )


class QuestionController(Controller, Generic[Parsed]):
    """Asks every site the question of the job, checks each answer, and writes what they give; it keeps no single one.

    Args:
        question: what is asked.
        timeout_s: seconds in which a site must answer.
    """

    kind: type[Parsed]
    """What an answer holds."""
    result: ClassVar[str]
    """File in the server's folder of the job that receives what the answers give."""

    def __init__(self, question: str, timeout_s: int):
        super().__init__()
        self.question, self.timeout_s = question, timeout_s
        self._found: dict[str, Parsed] = {}
        self._refusals: dict[str, str] = {}

    def parse(self, answer: bytes) -> Parsed:
        """Return the content of an answer; whatever it raises, the site has sent no answer."""
        return self.kind.model_validate_json(answer)

    @abstractmethod
    def join(self, answers: Mapping[str, Parsed]) -> Any:
        """Return what is written as JSON, from the answers in the order of the sites' names."""

    def find_obstacle(self, answers: Mapping[str, Parsed]) -> str:
        """Return why the answers are not joined; empty if they are. The text must hold no value of a site."""
        return ""

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing: the sites need no preparation."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing: nothing is open."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Collect the answers of all sites; end the job with an error if one is missing."""
        sites = sorted(client.name for client in fl_ctx.get_engine().get_clients())
        data = wrap(QUESTION, self.question)
        task = Task(QUESTION, data, timeout=self.timeout_s, result_received_cb=self._receive)
        self.broadcast_and_wait(task, fl_ctx, min_responses=len(sites), abort_signal=abort_signal)
        if abort_signal.triggered:
            return
        silent = {site: "no answer" for site in sites if site not in self._found}
        if missing := silent | self._refusals:
            self.system_panic("; ".join(f"{site}: {reason}" for site, reason in sorted(missing.items())), fl_ctx)
            return
        answers = {site: self._found[site] for site in sites}
        if reason := self.find_obstacle(answers):
            self.system_panic(reason, fl_ctx)
            return
        try:
            content = self.join(answers)
        except Exception as error:  # noqa: BLE001 - its text has values of the sites
            self.system_panic(f"E_CONFIG: the answers cannot be joined: {type(error).__name__}", fl_ctx)
            return
        file = Path(get_workspace(fl_ctx).get_run_dir(fl_ctx.get_job_id())) / self.result
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, content)

    def _receive(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """Keep the content of an answer, or why there is none; FLARE ends the job if a callback raises."""
        result, site = client_task.result, client_task.client.name
        client_task.result = None
        if result.get_return_code() != ReturnCode.OK:
            self._refusals[site] = get_refusal_code(result)
            return
        try:
            self._found[site] = self.parse(from_shareable(result).data[ANSWER])
        except Exception as error:  # noqa: BLE001 - whatever a site may send
            # Its text could carry names of subjects.
            self._refusals[site] = f"E_KIND: {type(error).__name__}"

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Drop a result that nobody waits for."""


@dataclass(eq=False)
class StatisticsExecutor(QuestionExecutor):
    """Computes figures of a site's columns, each from enough rows.

    Args:
        least: fewest rows; ``LEAST`` or the site's policy (``min_examples``) may ask for more.
    """

    least: int

    kind = "describe"

    def collect_terms(self) -> dict[str, Any]:
        return {**super().collect_terms(), "quantiles": QUANTILES, "bins": BINS}

    def compute(self, job: JobConfig, policy: Policy, data: SiteData, gate: ReleaseGate | None) -> str:
        task, least = build_task(job), max(self.least, policy.min_examples, LEAST)
        if gate is not None:
            gate.bind(task, data)
            least = max(least, gate.rule.minimum)
        columns = list_columns(task, data)
        values = encode_columns(columns, least) if gate is None else encode_columns(columns, least, gate.bound_count)
        if not values:
            raise DataError(f"no column has {least} rows, the fewest from which this site computes a figure")
        # By name: labels come in the order of the rows, whose first one would show in the order of the answer.
        figures = {name: compute_figures(values[name], least) for name in sorted(values)}
        if gate is not None:
            figures = {name: coarsen_figures(name, own, gate) for name, own in figures.items()}
        return Description(figures).model_dump_json()


def coarsen_figures(name: str, figures: Figures, gate: ReleaseGate) -> Figures:
    """Return figures whose counts are rounded as released ones, and the others on the grid of the column.

    Of a label, such as ``sex=F``, the share of the rounded counts alone.
    """
    count = gate.round_count(name.partition("=")[0], figures.count)
    if is_label(name):
        share = min(gate.round_count(name, round(figures.mean * figures.count)) / count, 1.0)
        deviation = math.sqrt(share * (1 - share))
        return Figures(count=count, mean=share, stddev=deviation, quantile={}, histogram=())
    step = compute_step(gate.rule, figures.stddev, count)

    def snap(value: float) -> float:
        return round(value / step) * step if step else value

    edges = [snap(figures.histogram[0][0]), *(snap(high) for _, high, _ in figures.histogram)]
    counts = [gate.round_count(f"{name} {number}", cell[2]) for number, cell in enumerate(figures.histogram)]
    return Figures(
        count=count,
        mean=snap(figures.mean),
        stddev=snap(figures.stddev),
        quantile={percent: snap(value) for percent, value in figures.quantile.items()},
        histogram=tuple(zip(edges, edges[1:], counts, strict=False)),
    )


class DescriptionController(QuestionController[Description]):
    """Asks every site to describe its columns, checks each description, and writes them by column and site."""

    kind, result = Description, "statistics/columns.json"

    def join(self, answers: Mapping[str, Description]) -> dict[str, dict[str, Any]]:
        columns: dict[str, dict[str, Any]] = {}
        for site, description in answers.items():
            for name, figures in description.root.items():
                columns.setdefault(name, {})[site] = figures.model_dump(mode="json")
        return columns


LEAST_SITES = 2


@dataclass(eq=False)
class FingerprintExecutor(QuestionExecutor):
    """Answers with the fingerprint of the site's cases.

    Args:
        samples_per_case: foreground voxels drawn from each case.
    """

    samples_per_case: int

    kind = "fingerprint"

    def compute(self, job: JobConfig, policy: Policy, data: SiteData, gate: ReleaseGate | None) -> str:
        if gate is not None and self.kind not in gate.approved:
            raise PolicyRefusal(
                "this site's policy: release: a fingerprint has a line for each case; a person approves it with "
                f"approved_rows: [{self.kind}]"
            )
        config = job.task.config
        if not isinstance(config, NnunetConfig):
            raise ConfigError("the job's task is not nnunet")
        cases = select_cases(data, find_raw_cases(data.path, config.derivative))
        raise_refusals(policy.find_case_refusals(len({case.subject for case in cases.values()})))
        least, skips = max(policy.min_examples, 1), config.skip_bad_subjects
        found = compute_fingerprint(data.path, self.samples_per_case, cases, least=least, skip_bad_subjects=skips)
        return found.model_dump_json()


class FingerprintController(QuestionController[Fingerprint]):
    """Asks every site for its fingerprint, checks each, and writes the merged one; no single one is kept."""

    kind, result = Fingerprint, "nnunet/fingerprint.json"

    def find_obstacle(self, answers: Mapping[str, Fingerprint]) -> str:
        sites = list(answers)
        if len(sites) < LEAST_SITES:
            return f"E_QUORUM: {', '.join(sites)} alone is connected, whose own fingerprint the merged one would be"
        found = find_differences(list(answers.values())).items()
        differences = [f"in {name} ({sites[0]}, {sites[other]})" for name, other in found]
        return f"E_CONFIG: the fingerprints differ {', '.join(differences)}" if differences else ""

    def join(self, answers: Mapping[str, Fingerprint]) -> dict[str, Any]:
        merged = merge_fingerprints(list(answers.values())).model_dump(mode="json")
        return {"sites": list(answers), "fingerprint": merged}
