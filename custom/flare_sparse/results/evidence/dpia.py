"""An annex for a data protection impact assessment: what was recorded, each figure with its source, for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...rounds.endpoints.egress import LOG_FILE, find_logs, read_log, sum_lines
from ..report.attacks import describe_attacks
from ..report.subgroups import build_subgroups, describe_gap
from ..report.tables import format_markdown
from ..runs.results import RunResult

FILE = "dpia.md"
ATTACKS = {
    "loss threshold": "an outsider looks at the errors of the model",
    "rmia": "an outsider compares the model with similar ones",
    "gradient classifier": "a site learns from the gradients of its own subjects",
    "canaries": "planted examples are searched for",
    "inversion": "a server rebuilds inputs from a message",
    "site of an update": "a server recognises the site of an update",
}
"""The attacks that the package knows, with their attackers."""
_QUERIES = "Not among the attacks: queries to a model in use, and combinations with data from elsewhere."
_ABOUT = (
    "A draft from the record of run {run}, for a person to complete and to judge. It states what was recorded and what "
    "was not; it assesses no risk and claims no compliance. Research use only: the model is no medical device."
)
_MISSING = (
    "To be added by the controller: purpose, legal basis, categories of data and of subjects, rights of the subjects, "
    "who may receive the model."
)


@dataclass(frozen=True)
class Section:
    """A part of the annex.

    Attributes:
        title: its heading.
        paragraphs: its text.
        columns, rows: its table; no columns: it has none.
    """

    title: str
    paragraphs: Sequence[str] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()


def write_dpia(run: RunResult, facts: dict[str, Any], egress: Mapping[str, Path], file: Path) -> None:
    """Write the annex, in the format that the name of the file ends with: .md or .docx.

    Args:
        run: the run.
        facts: what :func:`~flare_sparse.results.evidence.facts.collect_facts` returns.
        egress: by site, the folder of its egress log, or its startup kit.
        file: the file; an earlier one is replaced.

    Raises:
        ConfigError: the file has another ending, python-docx is not installed, or there is no log in a folder.
        EgressError: an egress log was changed.
    """
    logs = {**find_logs(run.path), **{site: _find_log(site, folder) for site, folder in egress.items()}}
    title, sections = f"Annex to a data protection impact assessment: {facts['name']}", build_dpia(run, facts, logs)
    if file.suffix == ".md":
        file.write_text(format_dpia(title, sections), encoding="utf-8")
    elif file.suffix == ".docx":
        _write_docx(title, sections, file)
    else:
        raise ConfigError(f"{file}: an annex is a file that ends with .md or .docx")


def build_dpia(run: RunResult, facts: dict[str, Any], logs: Mapping[str, Path]) -> list[Section]:
    """Return the parts of the annex.

    Args:
        run: the run.
        facts: what :func:`~flare_sparse.results.evidence.facts.collect_facts` returns.
        logs: by site, the folder of its egress log, as far as it is here.
    """
    made = {str(attack["attack"]) for attack in run.audit.get("attacks", [])}
    not_made = "; ".join(f"{name} ({what})" for name, what in ATTACKS.items() if name not in made)
    recorded = "recorded", "source"
    return [
        Section("About this annex", [_ABOUT.format(run=facts["run"]), _MISSING]),
        Section("Processing and parties", (), ("what", *recorded), _list_processing(run, facts)),
        Section(
            "Cohorts",
            (),
            ("site", "training examples", "validation", "test", "rounds", "source"),
            _list_cohorts(facts),
        ),
        Section(
            "What left each site",
            _compare_logs(run, logs),
            ("site", "kind", "contents", "messages", "bytes", "source"),
            _list_egress(run, logs),
        ),
        Section("Measures", (), ("measure", *recorded), _list_measures(run, facts)),
        Section("Privacy budget, in the terms of NIST SP 800-226", (), ("term", *recorded), _list_budget(facts)),
        *_build_subgroups(run),
        Section("Retention", (), ("what", *recorded), _list_retention(run, facts)),
        Section("Attacks", [*describe_attacks(run), f"Not tried: {not_made or 'none of those known'}.", _QUERIES]),
        Section(
            "Deviations",
            [f"{len(facts['deviations'])} deviations of rounds and sites (rounds.jsonl, listed in evidence.json)."],
        ),
    ]


def _build_subgroups(run: RunResult) -> list[Section]:
    """Return the part with the metrics by subgroup and the largest gap; none without them."""
    gap, table = describe_gap(run), build_subgroups([run])
    if table is None:
        return [Section("Subgroups", [gap])] if gap else []
    # The column with the label of the only run says nothing here.
    columns, *rows = ([row[0], *row[2:]] for row in (table.columns, *table.rows))
    rows = [[*row, "`summary.json`"] for row in rows]
    return [Section("Subgroups", [gap, table.note], [*columns, "source"], rows)]


def format_dpia(title: str, sections: Sequence[Section]) -> str:
    """Return the annex as Markdown."""
    parts = [f"# {title}"]
    for section in sections:
        parts += [f"## {section.title}", *section.paragraphs]
        if section.columns:
            parts.append(format_markdown(section.columns, section.rows))
    return "\n\n".join(parts) + "\n"


def _write_docx(title: str, sections: Sequence[Section], file: Path) -> None:
    try:
        from docx import Document
    except ImportError as error:
        raise ConfigError("an annex as .docx needs python-docx: pip install 'flare-sparse[evidence]'") from error
    document = Document()
    document.add_heading(title, 0)
    for section in sections:
        document.add_heading(section.title, 1)
        for paragraph in section.paragraphs:
            document.add_paragraph(paragraph)
        if section.columns:
            rows = [section.columns, *section.rows]
            table = document.add_table(len(rows), len(section.columns), style="Light Grid Accent 1")
            for cells, row in zip(table.rows, rows, strict=True):
                for cell, value in zip(cells.cells, row, strict=True):
                    # Without the marks of code in Markdown.
                    cell.text = str(value).replace("`", "")
    document.save(str(file))


def _find_log(site: str, folder: Path) -> Path:
    """Return the folder of a site's log: the given one, or that of the site within a startup kit.

    Raises:
        ConfigError: there is none.
    """
    if (folder / LOG_FILE).is_file():
        return folder
    if site not in (found := find_logs(folder)):
        raise ConfigError(f"--egress {site}={folder}: no {LOG_FILE} of this site there; give the folder that holds it")
    return found[site]


def _read_lines(run: RunResult, folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a log that are of this run; a hello and a refusal name the job alone.

    Raises:
        EgressError: the log was changed.
    """
    name, run_ids = run.summary["name"], (run.summary["run"], "")
    return [line for line in read_log(folder) if line["job"] == name and line["run"] in run_ids]


def _compare_logs(run: RunResult, logs: Mapping[str, Path]) -> list[str]:
    """Return the length of the sites' logs, and whether their messages are those that the server received."""
    texts: dict[str, list[str]] = {}
    for site, folder in logs.items():
        whole, lines = len(read_log(folder)), [line for line in _read_lines(run, folder) if line["run"]]
        received = [m for m in run.messages if m["direction"] == "up" and m["site"] == site]
        sent = sorted((line["kind"], line["round"], line["bytes"]) for line in lines)
        got = sorted((line["kind"], line["round"], line["payload_bytes"]) for line in received)
        verdict = "the same messages and bytes as the server's ledger"
        if sent != got:
            totals = [f"{len(part)} messages, {sum(size for *_, size in part)} bytes" for part in (sent, got)]
            verdict = f"{totals[0]}, and the server's ledger {totals[1]}: see rejected messages among the deviations"
        texts.setdefault(f"{whole} lines of all jobs, chain intact; of this run it has {verdict}.", []).append(site)
    return [f"Egress log of {', '.join(sites)}: {text}" for text, sites in texts.items()]


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


def _list_egress(run: RunResult, logs: Mapping[str, Path]) -> list[tuple[Any, ...]]:
    """Return rows from each site's own log where it is here, else from the server's ledger."""
    rows: list[tuple[Any, ...]] = []
    for site in run.sites:
        if site in logs:
            sums, source = sum_lines(_read_lines(run, logs[site])), "egress log of the site"
        else:
            lines = [
                {"job": site, "kind": m["kind"], "contents": [m["content"]], "bytes": m["payload_bytes"]}
                for m in run.messages
                if m["direction"] == "up" and m["site"] == site
            ]
            sums, source = sum_lines(lines), "`ledger.jsonl` of the server"
        rows += [(site, kind, contents, *figures, source) for (_, kind, contents), figures in sums.items()]
    return rows


def _list_measures(run: RunResult, facts: dict[str, Any]) -> list[tuple[Any, ...]]:
    wire, task = run.config.get("wire", {}), run.config.get("task", {})
    rows: list[tuple[Any, ...]] = [
        ("sums that the server cannot take apart", wire.get("aggregation", "plain"), "`config.yaml`"),
        ("encryption of weights", wire.get("encryption", "none"), "`config.yaml`"),
        ("metrics by subgroup", ", ".join(map(str, task.get("subgroups") or ())) or "none computed", "`config.yaml`"),
    ]
    for site, policy in facts["policies"].items():
        terms = policy["terms"]
        source = "given with `--policy`" if terms else "not recorded"
        rows.append((f"policy of {site}", terms or policy["note"], source))
    return rows


def _list_budget(facts: dict[str, Any]) -> list[tuple[Any, ...]]:
    budget = facts["privacy"]["budget"]
    if not budget:
        return [("epsilon", "none computed: what the run tells about a subject has no bound", "`summary.json`")]
    spent = ", ".join(f"{site} {epsilon:.2f}" for site, epsilon in sorted(budget.get("spent", {}).items()))
    outside = ", ".join(budget.get("outside_budget", [])) or "nothing"
    unit = budget.get("unit", "subject")
    return [
        ("privacy parameters", f"epsilon {budget['epsilon']}, delta {budget['delta']}", "`config.yaml`"),
        ("spent by site", spent, "`summary.json`"),
        ("unit of privacy", f"a {unit} of a site, over this run; other runs of the site add to it", "`config.yaml`"),
        (
            "trust model",
            "each site is the curator of its own data and adds the noise; no other party is trusted",
            "method",
        ),
        ("mechanism", "DP-SGD: Poisson samples, clipped gradients, Gaussian noise", "method"),
        ("composition", "privacy loss random variables (Gopi et al. 2021)", "method"),
        ("outside the bound", outside, "`summary.json`"),
        (
            "side channels",
            "not excluded: the time of an answer, attacks on the last bits of floating-point sums, who took part",
            "method",
        ),
    ]


def _list_retention(run: RunResult, facts: dict[str, Any]) -> list[tuple[Any, ...]]:
    federation = run.config.get("federation", {})
    days = federation.get("checkpoint_days")
    rows: list[tuple[Any, ...]] = [
        (
            "checkpoints in the result folder",
            "until they are removed" if days is None else f"{days} days",
            "`config.yaml`",
        ),
        ("commits whose checkpoints are kept", federation.get("kept_commits", "not recorded"), "`config.yaml`"),
    ]
    for site, policy in facts["policies"].items():
        days = (policy["terms"] or {}).get("checkpoint_days")
        kept = "not stated" if days is None else f"{days} days"
        rows.append((f"checkpoints of {site}", kept, "policy given with `--policy`"))
    return [*rows, ("models, record, logs", "no limit: to be stated by the controller", "not recorded")]
