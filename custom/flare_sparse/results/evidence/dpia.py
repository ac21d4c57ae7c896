"""An annex for a data protection impact assessment: what was recorded, each figure with its source, for a person."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...rounds.endpoints.egress import find_logs, read_log, sum_lines
from ..report.attacks import describe_attacks
from ..report.tables import format_markdown
from ..runs.results import RunResult

FILE = "dpia.md"


def format_dpia(run: RunResult, facts: dict[str, Any]) -> str:
    """Return the annex as Markdown.

    Args:
        run: the run.
        facts: what :func:`~flare_sparse.results.evidence.facts.collect_facts` returns.

    Raises:
        EgressError: an egress log in the run's folder was changed.
    """
    attacks = describe_attacks(run) or ["None was tried (`flare-sparse audit`)."]
    return f"""# Annex to a data protection impact assessment: {facts["name"]}

A draft from the record of run `{facts["run"]}`, for a person to complete and to judge. It states what was recorded and
what was not; it assesses no risk and claims no compliance. Research use only.

To be added by the controller: purpose, legal basis, categories of data and of subjects, retention at sites and server,
rights of the subjects, who may receive the model.

## Processing and parties

{format_markdown(("what", "recorded", "source"), _list_processing(run, facts))}

## Cohorts

{format_markdown(("site", "training examples", "validation", "test", "rounds", "source"), _list_cohorts(facts))}

## What left each site

{format_markdown(("site", "kind", "contents", "messages", "bytes", "source"), _list_egress(run))}

## Measures

{format_markdown(("measure", "recorded", "source"), _list_measures(run, facts))}

## Attacks

{_format_list(attacks)}

Attacks that were not tried are not excluded; the list of those that the package knows is in its documentation.

## Deviations

{len(facts["deviations"])} deviations of rounds and sites (`rounds.jsonl`, listed in `evidence.json`).
"""


def _list_processing(run: RunResult, facts: dict[str, Any]) -> list[tuple[Any, ...]]:
    approval, task = facts["approval"], run.config.get("task", {})
    submitter = approval["submitter"] or {}
    who = ", ".join(submitter[part] for part in ("name", "org", "role") if part in submitter) or "no federation"
    return [
        ("permit", facts["permit"] or "none named", "`config.yaml`"),
        ("task", task.get("name", "of the user"), "`config.yaml`"),
        ("method", f"{facts['method']}, {facts['rounds']} rounds", "`summary.json`"),
        ("sites", ", ".join(run.sites), "`summary.json`"),
        ("submitter", f"{who}; signature {approval['signature']}", "the job's signatures"),
        ("model", f"sha256 {facts['model_sha256']}", "`summary.json`, computed again"),
    ]


def _list_cohorts(facts: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (
            site,
            *("not reported" if part[name] is None else part[name] for name in ("train", "validation", "test")),
            f"{part['rounds_contributed']} of {part['rounds_expected']}",
            "`summary.json`",
        )
        for site, part in facts["cohorts"].items()
    ]


def _list_egress(run: RunResult) -> list[tuple[Any, ...]]:
    """Return rows from the sites' own logs where the folder has them, else from the server's ledger."""
    logs = {site: read_log(folder) for site, folder in find_logs(run.path).items()}
    if logs:
        return [
            (site, kind, contents, messages, size, "egress log of the site")
            for site, lines in logs.items()
            for (_, kind, contents), (messages, size) in sum_lines(lines).items()
        ]
    lines = [
        {"job": line["site"], "kind": line["kind"], "contents": [line["content"]], "bytes": line["payload_bytes"]}
        for line in run.messages
        if line["direction"] == "up"
    ]
    return [(*key, *sums, "`ledger.jsonl` of the server") for key, sums in sum_lines(lines).items()]


def _list_measures(run: RunResult, facts: dict[str, Any]) -> list[tuple[Any, ...]]:
    wire, budget = run.config.get("wire", {}), facts["privacy"]["budget"]
    rows: list[tuple[Any, ...]] = [
        ("sums that the server cannot take apart", wire.get("aggregation", "plain"), "`config.yaml`"),
        ("encryption of weights", wire.get("encryption", "none"), "`config.yaml`"),
    ]
    if budget:
        spent = ", ".join(f"{site} {epsilon:.2f}" for site, epsilon in sorted(budget.get("spent", {}).items()))
        outside = ", ".join(budget.get("outside_budget", [])) or "nothing"
        rows += [
            ("privacy budget", f"epsilon {budget['epsilon']}, delta {budget['delta']}", "`config.yaml`"),
            ("spent by site", spent, "`summary.json`"),
            ("unit of the bound", "a subject of a site, over this run", "`privacy` of `config.yaml`"),
            ("trust model", "each site adds the noise of its own subjects; no other party is trusted", "method"),
            ("outside the bound", outside, "`summary.json`"),
        ]
    else:
        found = "none computed: what the run tells about a subject has no bound"
        rows.append(("privacy budget", found, "`summary.json`"))
    for site, policy in facts["policies"].items():
        terms = policy["terms"]
        source = "given with `--policy`" if terms else "not recorded"
        rows.append((f"policy of {site}", terms or policy["note"], source))
    return rows


def _format_list(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)
