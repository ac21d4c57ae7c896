"""nnU-Net's fingerprints of the sites, merged by the server: to the guards of a site, its answer is statistics."""

from collections.abc import Mapping
from typing import Any

from ..config.people import ReleaseGate
from ..config.policy.policy import Policy, raise_refusals
from ..config.schema import JobConfig
from ..core.errors import ConfigError, PolicyRefusal
from ..tasks.data.cases import select_cases
from ..tasks.nnunet.fingerprint import (
    Fingerprint,
    compute_fingerprint,
    find_differences,
    merge_fingerprints,
    parse_fingerprint,
)
from ..tasks.nnunet.raw import find_raw_cases
from ..tasks.nnunet.task import NnunetConfig
from ..tasks.task import SiteData
from .questions import QuestionController, QuestionExecutor, QuestionRecipe, build_question

RESULT = "nnunet/fingerprint.json"
"""File in the server's folder of the job: the sites, and the fingerprint of all their cases."""
LEAST_SITES = 2


class FingerprintRecipe(QuestionRecipe):
    """A job in which each site computes its fingerprint, and the server merges them.

    Args:
        config: the study's settings, whose task is ``nnunet``; it needs no plan.
        samples_per_case: foreground voxels drawn from each case, the same number at every site.
    """

    def __init__(self, config: JobConfig, samples_per_case: int):
        executor, timeout_s = FingerprintExecutor(samples_per_case), int(config.federation.task_timeout_s)
        super().__init__(config, executor, FingerprintController(build_question(executor), timeout_s))


class FingerprintExecutor(QuestionExecutor):
    """Answers with the fingerprint of the site's cases.

    Args:
        samples_per_case: foreground voxels drawn from each case.
    """

    kind = "fingerprint"

    def __init__(self, samples_per_case: int):
        super().__init__()
        self.samples_per_case = samples_per_case

    def list_terms(self) -> dict[str, Any]:
        return {"samples_per_case": self.samples_per_case}

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
        return compute_fingerprint(
            data.path,
            self.samples_per_case,
            cases,
            least=max(policy.min_examples, 1),
            skip_bad_subjects=config.skip_bad_subjects,
        ).model_dump_json()


class FingerprintController(QuestionController[Fingerprint]):
    """Asks every site for its fingerprint, checks each, and writes the merged one; no single one is kept."""

    result = RESULT

    def parse(self, answer: bytes) -> Fingerprint:
        return parse_fingerprint(answer)

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
