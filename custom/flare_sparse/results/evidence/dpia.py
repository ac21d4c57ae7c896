"""An annex for a data protection impact assessment: what was recorded, each figure with its source, for a person."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config.policy.policy import Policy
from ...config.withdrawals import WITHDRAWN, Withdrawals
from ...core.checkpoint.store import compute_file_digest
from ...core.errors import ConfigError, require_extra
from ..report.attacks import KNOWLEDGE, describe_attacks
from ..report.tables import build_subgroups, describe_gap, format_markdown
from ..runs.load import load_study
from ..runs.results import AUDIT_FILE, RunResult
from .facts import list_files

FILE = "dpia.md"
_ATTACKS = (
    "EDPB Opinion 28/2024 asks how likely it is that data of persons are extracted from a model, or obtained by "
    "queries to it. Attacks on this run or on a repetition of it (`audit.json`) are no statement of that likelihood; "
    "not among them are the rebuilding of inputs from messages, queries to a model in use, and combinations with other "
    "data."
)
_LEFT = (
    "Messages by kind, with their bytes. Of a site's data a message holds: weights, values of the trained model; a "
    "delta, their change; scores, one number for each entry of the model; statistics, number, mean and deviation of "
    "inputs; examples, their number; metrics, computed on test subjects; events, codes of what happened. The hello has "
    "versions and limits. No message has a subject, an identifier or a path. Bytes are those of the encoded values; "
    "the few numbers beside them (examples, metrics, versions) are not counted, and stand in the egress log."
)
_COHORTS = (
    "Numbers of examples as the sites reported them. The rounds answered include the evaluation of the last model."
)
_LOGS = (
    "A site writes a line to its own log before a message leaves; each line holds the digest of the one before it. The "
    "digest of the last line, noted here, fixes all lines up to it: a log that the site shows later must contain it."
)
_ABOUT = (
    "A draft from the record of run {run}, for a person to complete and to judge. It states what was recorded and what "
    "was not; it assesses no risk and claims no compliance. Research use only: the model is no medical device. Sources "
    "are files of the result folder, or what a site has handed out; method means that it follows from how the software "
    "works, which its documentation describes."
)
_AGAIN = """The configuration ends in the digest above with the same data, versions and kind of processor:

    flare-sparse run config.yaml --env local --out again

Data that the configuration reads from a disk stays at the sites; give a path of your own with
`--set simulator.data.path=...`."""
_CONTROLLER = (
    "purpose of the processing",
    "legal basis",
    "categories of data subjects, and of data beyond those below",
    "necessity and proportionality",
    "rights of the subjects, and how they are exercised",
    "recipients of the model and of this record",
    "risks to the subjects, and their assessment",
    "opinion of the data-protection officer",
)
"""What no record of a run has."""
_AGGREGATION = {
    "plain": "none: the server reads the values that each site sends",
    "masked": "masked: the server reads sums over sites. Limits: accomplices take their part out of a sum; a server "
    "that deviates can compare sums over nearly the same model; a sum of few sites tells much about each",
}
"""What the setting does, and the limits that the documentation states (secure-aggregation.md)."""


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


def write_dpia(run: RunResult, facts: dict[str, Any], file: Path) -> None:
    """Write the annex, in the format that the name of the file ends with: .md, .docx or .pdf.

    Args:
        run: the run.
        facts: what :func:`~flare_sparse.results.evidence.facts.collect_facts` returns.
        file: the file; an earlier one is replaced.

    Raises:
        ConfigError: the file has another ending, or the extra evidence is not installed.
    """
    title, sections = f"Annex to a data protection impact assessment: {run.summary['name']}", build_dpia(run, facts)
    writers = {".docx": _write_docx, ".pdf": _write_pdf}
    if file.suffix == ".md":
        file.write_text(format_dpia(title, sections), encoding="utf-8")
        return
    if file.suffix not in writers:
        raise ConfigError(f"{file}: an annex is a file that ends with .md, {', '.join(writers)}")
    with require_extra(f"an annex as {file.suffix}", "evidence"):
        writers[file.suffix](title, sections, file)


def build_dpia(run: RunResult, facts: dict[str, Any]) -> list[Section]:
    """Return the parts of the annex: those that a person completes, and the record of the run.

    Args:
        run: the run.
        facts: what :func:`~flare_sparse.results.evidence.facts.collect_facts` returns.
    """
    return [
        Section("About this annex", [_ABOUT.format(run=run.summary["run"])]),
        Section("To be completed by the controller", (), ("what", "statement"), [(what, "") for what in _CONTROLLER]),
        *list_sections(run, facts),
    ]


def list_sections(run: RunResult, facts: dict[str, Any]) -> list[Section]:
    """Return the record of a run in words: who took part, what left, under which terms, what was tried."""
    made = {str(attack["attack"]) for attack in run.audit.get("attacks", [])}
    not_made = "; ".join(f"{what} ({name})" for name, what in KNOWLEDGE.items() if name not in made)
    unread = f"`{AUDIT_FILE}` is damaged or of another model: repeat the audit."
    tried = describe_attacks(run) or [unread if (run.path / AUDIT_FILE).is_file() else "No attack was tried."]
    recorded = "recorded", "source"
    site = "site", "training examples", "validation", "test", "rounds answered"
    log = "site", "lines", "sha256 of the last line", "compared with the server's ledger", "source"
    deviations = _list_deviations(facts)
    return [
        Section("Processing and parties", (), ("what", *recorded), _list_processing(run, facts)),
        Section("Cohorts", [_COHORTS], (*site, "source"), _list_cohorts(run)),
        Section(
            "What left each site",
            [_LEFT],
            ("site", "kind", "contents", "messages", "bytes", "source"),
            _list_egress(facts["egress"]),
        ),
        Section("Egress logs", [_LOGS], log, _list_logs(facts["egress"])),
        Section("Measures and their limits", (), ("measure", *recorded), _list_measures(run, facts)),
        Section("Privacy budget, in the terms of NIST SP 800-226", (), ("term", *recorded), _list_budget(run)),
        *_build_subgroups(run),
        Section("Retention and withdrawal", (), ("what", *recorded), _list_retention(run, facts)),
        Section("Attacks", [_ATTACKS, *tried, f"Not tried: {not_made or 'none of those known'}."]),
        Section("Deviations", (), ("round", "site", "deviation", "source"), deviations)
        if deviations
        else Section("Deviations", ["None recorded: every site contributed to every round (`rounds.jsonl`)."]),
        Section("Files, and how to repeat the run", [_AGAIN], ("file", "bytes", "sha256"), _list_files(run)),
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


def _write_pdf(title: str, sections: Sequence[Section], file: Path) -> None:
    """Write pages in landscape, with their numbers; the head of a table stands on each page that it goes on.

    Raises:
        ConfigError: the fonts that every reader of PDF has lack a letter.
    """
    from xml.sax.saxutils import escape

    from reportlab.lib import colors
    from reportlab.lib.pagesizes import A4, landscape
    from reportlab.lib.styles import getSampleStyleSheet
    from reportlab.platypus import LongTable, Paragraph, SimpleDocTemplate, Spacer

    for letter in format_dpia(title, sections):
        if not letter.encode("cp1252", errors="ignore"):
            raise ConfigError(f"{file}: a PDF has no letter {letter!r}; expected Western European letters. Write .docx")
    styles = getSampleStyleSheet()
    body = styles["BodyText"]
    cell = body.clone("cell", fontSize=8, leading=10)
    look = [
        ("GRID", (0, 0), (-1, -1), 0.4, colors.lightgrey),
        ("BACKGROUND", (0, 0), (-1, 0), colors.whitesmoke),
        ("VALIGN", (0, 0), (-1, -1), "TOP"),
    ]
    document = SimpleDocTemplate(
        str(file), pagesize=landscape(A4), leftMargin=50, rightMargin=50, title=title, invariant=1
    )
    story = [Paragraph(escape(title), styles["Title"])]
    for section in sections:
        story.append(Paragraph(escape(section.title), styles["Heading2"]))
        story += [Paragraph(escape(_strip_marks(paragraph)), body) for paragraph in section.paragraphs]
        if section.columns:
            rows = [
                [Paragraph(escape(_strip_marks(str(value))), cell) for value in row]
                for row in (section.columns, *section.rows)
            ]
            # Wider where the text is longer, or still to be written; none so narrow that words break.
            lengths = [max(len(str(cells[n])) for cells in section.rows) for n in range(len(section.columns))]
            shares = [max(min(length or 90, 90), 14) for length in lengths] if section.rows else [1] * len(lengths)
            widths = [document.width * share / sum(shares) for share in shares]
            story += [Spacer(1, 6), LongTable(rows, widths, repeatRows=1, style=look)]

    def number_page(canvas: Any, _: Any) -> None:
        canvas.setFont("Helvetica", 8)
        canvas.drawRightString(landscape(A4)[0] - 50, 30, f"{title}, page {canvas.getPageNumber()}")

    document.build(story, onFirstPage=number_page, onLaterPages=number_page)


def _write_docx(title: str, sections: Sequence[Section], file: Path) -> None:
    from docx import Document
    from docx.enum.section import WD_ORIENT
    from docx.oxml import OxmlElement
    from docx.shared import Pt

    document = Document()
    page = document.sections[0]
    # Wide: tables with digests and terms of a policy.
    page.orientation, page.page_width, page.page_height = WD_ORIENT.LANDSCAPE, page.page_height, page.page_width
    page.left_margin = page.right_margin = Pt(50)
    document.styles["Normal"].font.size = Pt(10)
    document.add_heading(title, 0)
    for section in sections:
        document.add_heading(section.title, 1)
        for paragraph in section.paragraphs:
            document.add_paragraph(_strip_marks(paragraph))
        if section.columns:
            rows = [section.columns, *section.rows]
            table = document.add_table(len(rows), len(section.columns), style="Light Grid Accent 1")
            # On each page that a table goes on.
            table.rows[0]._tr.get_or_add_trPr().append(OxmlElement("w:tblHeader"))
            for cells, row in zip(table.rows, rows, strict=True):
                cells._tr.get_or_add_trPr().append(OxmlElement("w:cantSplit"))
                for cell, value in zip(cells.cells, row, strict=True):
                    cell.text = _strip_marks(str(value))
    document.save(str(file))


def _strip_marks(text: str) -> str:
    """Return a text without the marks of code in Markdown."""
    return text.replace("`", "")


def _list_files(run: RunResult) -> list[tuple[Any, ...]]:
    files = [(name, run.path / name) for name in list_files(run.path)]
    return [(f"`{name}`", f"{path.stat().st_size:,}", compute_file_digest(path)) for name, path in files]


def _list_logs(egress: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return rows of the sites' logs: their length and head, and whether their messages are those of the server."""
    return [
        (site, part["lines"], part["head"], part["note"], "egress log of the site, chain intact")
        if part["head"]
        else (site, "not given", "not given", "not possible", part["note"])
        for site, part in egress.items()
    ]


def _list_egress(egress: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    sources = {"log": "egress log of the site", "ledger": "`ledger.jsonl` of the server"}
    return [
        (site, row["kind"], row["contents"], row["messages"], f"{row['bytes']:,}", sources[part["source"]])
        for site, part in egress.items()
        for row in part["sums"]
    ]


def _list_processing(run: RunResult, facts: dict[str, Any]) -> list[tuple[Any, ...]]:
    approval, task = facts["approval"], run.config.get("task", {})
    submitter, final = approval.submitter or {}, run.summary["final"]["metrics"]
    who = ", ".join(submitter[part] for part in ("name", "org", "role") if part in submitter) or "none"
    columns = {name: task[name] for name in ("features", "target", "targets", "group") if task.get(name)}
    metrics = ", ".join(f"{name} {final[name]:.4g}" for name in run.metric_names if name in final)
    return [
        ("permit", run.config.get("permit") or "none named", "`config.yaml`"),
        ("task", task.get("name", "of the user"), "`config.yaml`"),
        ("data that it reads", _format_terms(columns) or _describe_reads(run), "`config.yaml`"),
        ("method", f"{run.summary['method']}, {run.summary['rounds']} rounds", "`summary.json`"),
        ("sites", ", ".join(run.sites), "`summary.json`"),
        ("submitter", f"{who}. Signature {approval.signature}: {approval.note}", "the job's signatures"),
        ("submitted", approval.submitted_at or "not recorded", "the server"),
        ("accepted by", ", ".join(approval.deployed) or "not recorded", "the server"),
        ("code that came with the job", "none" if not (run.path / "code").is_dir() else "see `code/`", "`code/`"),
        ("model", f"sha256 {facts['model_sha256']}", "`summary.json`, computed again"),
        ("metrics of the last model", metrics or "none", "`summary.json`"),
        ("software", _format_terms(run.summary.get("versions", {})) or "not recorded", "`summary.json`"),
    ]


def _describe_reads(run: RunResult) -> str:
    return load_study(run.path).assembly.task.reads or "not described by the settings"


def _list_cohorts(run: RunResult) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for site, counts in run.cohorts.items():
        examples = ["none reported" if counts[n] is None else counts[n] for n in ("train", "validation", "test")]
        part = run.contributions.get(site)
        rows.append((site, *examples, f"{part.contributed} of {part.expected}" if part else "none", "`summary.json`"))
    return rows


def _list_measures(run: RunResult, facts: dict[str, Any]) -> list[tuple[Any, ...]]:
    wire, task = run.config.get("wire", {}), run.config.get("task", {})
    return [
        ("sums over sites", _AGGREGATION[wire.get("aggregation", "plain")], "`config.yaml`"),
        ("privacy budget", "see below" if run.summary.get("privacy") else "none", "`summary.json`"),
        ("sparse or coarse messages", "they send less; that is no protection by itself", "method"),
        ("metrics by subgroup", ", ".join(map(str, task.get("subgroups") or ())) or "none computed", "`config.yaml`"),
        *_join_sites("policy", {site: _describe_policy(policy) for site, policy in facts["policies"].items()}),
    ]


def _describe_policy(policy: Mapping[str, Any]) -> tuple[str, str]:
    if not policy["terms"]:
        return policy["note"], "not recorded"
    defaults = Policy().model_dump(mode="json")
    terms = {name: value for name, value in policy["terms"].items() if value != defaults[name]}
    return _format_terms(terms) or "no term that forbids anything", "given with `--site`"


def _join_sites(what: str, by_site: Mapping[str, tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Return a row for each text and source, with the sites that have it."""
    sites: dict[tuple[str, str], list[str]] = {}
    for site, row in by_site.items():
        sites.setdefault(row, []).append(site)
    return [(f"{what} of {', '.join(names)}", *row) for row, names in sites.items()]


def _format_terms(terms: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{name}: {', '.join(map(str, value)) if isinstance(value, list) else value}" for name, value in terms.items()
    )


def _list_deviations(facts: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (
            part["round"] or "run",
            part["site"] or "all",
            f"{part['kind'].replace('_', ' ')}: {part['detail']}",
            "`rounds.jsonl`" if part["round"] else "`summary.json`",
        )
        for part in facts["deviations"]
    ]


def _list_budget(run: RunResult) -> list[tuple[Any, ...]]:
    budget = run.summary.get("privacy")
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
    days = run.config.get("federation", {}).get("checkpoint_days")
    withdrawn = Withdrawals.read(run.path).describe()
    return [
        (
            "checkpoints in the result folder",
            "until they are removed" if days is None else f"{days} days",
            "`config.yaml`",
        ),
        *_join_sites(
            "checkpoints", {site: _describe_checkpoints(policy) for site, policy in facts["policies"].items()}
        ),
        ("checkpoints of the server", "no limit, unless `checkpoint_days` in the policy of its kit sets one", "method"),
        ("egress logs, privacy ledgers", "kept at the sites, no limit", "method"),
        ("models and record", "no limit: to be stated by the controller", "not recorded"),
        ("withdrawals", withdrawn or "none", f"`{WITHDRAWN}`" if withdrawn else f"no `{WITHDRAWN}`"),
    ]


def _describe_checkpoints(policy: Mapping[str, Any]) -> tuple[str, str]:
    if not policy["terms"]:
        return f"{policy['note']}; by default a site of a federation keeps them 90 days", "method"
    days = policy["terms"]["checkpoint_days"]
    return "90 days, the default" if days is None else f"{days} days", "policy given with `--site`"
