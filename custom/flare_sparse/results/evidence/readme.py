"""Text of the evidence for people: what was done, with whose data, under which terms, and how to repeat it."""

from __future__ import annotations

from typing import Any

from ..runs.progress import format_bytes
from ..runs.results import RunResult


def format_readme(run: RunResult, facts: dict[str, Any]) -> str:
    """Return the page ``README.md`` of a crate."""
    return f"""# Evidence of {facts["name"]}

Run `{facts["run"]}`: `{facts["method"]}`, {facts["rounds"]} rounds, seed {facts["seed"]}. The machine-readable form of
this page is `evidence.json`; `ro-crate-metadata.json` describes every file.

## Model

sha256 of its values: `{facts["model_sha256"]}`

## Cohorts

{_format_cohorts(facts["cohorts"])}

## Privacy

{_format_privacy(facts)}

## Policies

{"Permit: " + facts["permit"] if facts["permit"] else "The job names no permit."}

{_format_policies(facts["policies"])}

## Approval

{_format_approval(facts["approval"])}

## Traffic

{format_bytes(run.sum_directions("payload_bytes"))} in {run.sum_directions("messages")} messages; `ledger.jsonl` has a
line for each.

{_format_egress(facts["egress"])}

## Deviations

{_format_deviations(facts["deviations"])}

## Repeat the run

The configuration ends in the digest above with the same data, versions and kind of processor:

```bash
flare-sparse run config.yaml --env local --out again
```

Data that the configuration reads from a disk stays at the sites; give a path of your own with
`--set simulator.data.path=...`. Versions: {_format_versions(facts["versions"])}. `sbom.cdx.json` lists every installed
distribution.
"""


def _format_cohorts(cohorts: dict[str, dict[str, Any]]) -> str:
    rows = [
        "| site | training | validation | test | rounds contributed | missed |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for site, cohort in cohorts.items():
        counts = ["?" if cohort[part] is None else str(cohort[part]) for part in ("train", "validation", "test")]
        rounds = f"{cohort['rounds_contributed']} of {cohort['rounds_expected']}"
        rows.append("| " + " | ".join([site, *counts, rounds, cohort["missed"]]) + " |")
    return "\n".join(rows) + "\n\nNumbers of examples; `?`: the site did not report it."


def _format_privacy(facts: dict[str, Any]) -> str:
    privacy, audit = facts["privacy"], facts["audit"]
    budget = f"Budget: `{privacy['budget']}`." if privacy["budget"] else "No privacy budget was computed for this run."
    attacks = audit.get("attacks")
    tried = (
        f"{len(attacks)} attacks were tried; their results are in `audit.json`." if attacks else "No attack was tried."
    )
    return f"{budget} {tried}"


def _format_policies(policies: dict[str, dict[str, Any]]) -> str:
    return "\n".join(
        f"- {site}: {'`policies/' + site + '.yaml`' if policy['terms'] else policy['note']}"
        for site, policy in policies.items()
    )


def _format_approval(approval: dict[str, Any]) -> str:
    submitter = approval["submitter"]
    name = f"Submitted by {submitter['name']} ({submitter['org']}, {submitter['role']}). " if submitter else ""
    return f"{name}Signature: {approval['signature']}. {approval['note']}"


def _format_egress(egress: dict[str, dict[str, Any]]) -> str:
    return "\n".join(
        f"- egress log of {site}: "
        + (f"{part['note']}; sha256 of line {part['lines']}: `{part['head']}`" if part["lines"] else part["note"])
        for site, part in egress.items()
    )


def _format_deviations(deviations: list[dict[str, Any]]) -> str:
    if not deviations:
        return "None: every site contributed to every round at the first attempt."
    return "\n".join(
        f"- {'run' if part['round'] is None else 'round ' + str(part['round'])}"
        f"{', ' + part['site'] if part['site'] else ''}: {part['kind'].replace('_', ' ')}: {part['detail']}"
        for part in deviations
    )


def _format_versions(versions: dict[str, str] | str) -> str:
    if isinstance(versions, str):
        return versions
    return ", ".join(f"{name} {version}" for name, version in versions.items())
