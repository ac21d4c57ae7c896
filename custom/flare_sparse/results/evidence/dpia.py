"""An annex for a data protection impact assessment: what was recorded, each figure with its source, for a person."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...config.policy.policy import Policy
from ...core.checkpoint.store import compute_file_digest
from ...core.errors import ConfigError, require_extra
from ..report.attacks import KNOWLEDGE, describe_attacks
from ..report.tables import build_subgroups, describe_gap
from ..report.templates import fill_template
from ..runs.load import load_study
from ..runs.received import neutralize
from ..runs.results import AUDIT_FILE, RunResult
from .facts import Approval, describe_egress, digest_model, list_deviations, list_files

FILE = "dpia.md"


def write_dpia(
    run: RunResult, approval: Approval, policies: Mapping[str, Policy], egress: Mapping[str, Path], file: Path
) -> None:
    """Write the annex, in the format that the name of the file ends with: .md or .pdf.

    Args:
        run: the run.
        approval: who submitted the job.
        policies: policies in force by site; a run's record has none, because they stay at the sites.
        egress: folder of the egress log by site, as far as the sites have handed it out.
        file: the file; an earlier one is replaced.

    Raises:
        ConfigError: the file has another ending, the extra evidence is not installed, or as :func:`format_dpia`.
        EgressError: an egress log was changed.
    """
    text = format_dpia(run, approval, policies, egress)
    if file.suffix == ".md":
        file.write_text(text, encoding="utf-8")
    elif file.suffix == ".pdf":
        with require_extra("an annex as .pdf", "evidence"):
            _write_pdf(text, file)
    else:
        raise ConfigError(f"{file}: an annex is a file that ends with .md or .pdf")


def format_dpia(run: RunResult, approval: Approval, policies: Mapping[str, Policy], egress: Mapping[str, Path]) -> str:
    """Return the annex of :func:`write_dpia` as Markdown: what a person completes, and the record of the run in words.

    Raises:
        ConfigError: the model in the folder is not the one of the record, or a policy or a log is of a site that the
            run does not name.
        EgressError: an egress log was changed.
    """
    if unknown := sorted({*policies, *egress} - set(run.sites)):
        raise ConfigError(f"--site {unknown[0]}=...: the run has no such site; its sites are {', '.join(run.sites)}")
    summary, task, submitter = run.summary, run.config.get("task", {}), approval.submitter or {}
    final, made = summary["final"]["metrics"], {str(attack["attack"]) for attack in run.audit.get("attacks", [])}
    columns = {name: task[name] for name in ("features", "target", "targets", "group") if task.get(name)}
    reads = load_study(run.path).assembly.task.reads or "not described by the settings"
    unread = f"`{AUDIT_FILE}` is damaged or of another model: repeat the audit."
    privacy = summary.get("privacy") or {}
    content = {
        "run": run,
        "summary": summary,
        "model_sha256": digest_model(run),
        "egress": describe_egress(run, egress),
        "deviations": list_deviations(run),
        "task": task,
        "approval": approval,
        "submitter": ", ".join(submitter[part] for part in ("name", "org", "role") if part in submitter),
        "reads": _format_terms(columns) or reads,
        "has_code": (run.path / "code").is_dir(),
        "metrics": ", ".join(f"{name} {final[name]:.4g}" for name in run.metric_names if name in final),
        "versions": _format_terms(summary.get("versions", {})),
        "policies": _join_sites({site: _describe_policy(policies.get(site), approval) for site in run.sites}),
        "privacy": privacy,
        "spent": ", ".join(f"{site} {epsilon:.2f}" for site, epsilon in sorted(privacy.get("spent", {}).items())),
        "gap": describe_gap(run),
        "subgroups": build_subgroups([run]),
        "days": run.config.get("federation", {}).get("checkpoint_days"),
        "checkpoints": _join_sites({site: _describe_checkpoints(policies.get(site), approval) for site in run.sites}),
        "withdrawn": run.withdrawn,
        "tried": describe_attacks(run) or [unread if (run.path / AUDIT_FILE).is_file() else "No attack was tried."],
        "not_tried": "; ".join(f"{what} ({name})" for name, what in KNOWLEDGE.items() if name not in made),
        "files": [
            (neutralize(str(name)), (run.path / name).stat().st_size, compute_file_digest(run.path / name))
            for name in list_files(run.path)
        ],
    }
    # A bar or a line end of any kind in a value would end its cell.
    text = fill_template("evidence/dpia.md.jinja", content, lambda value: str(value).translate(_ENDS))
    # The template breaks long lines; a row of a table has one, a paragraph too.
    return re.sub(r"(?<!\n)\n(?![\n|]|    )", " ", text.strip()) + "\n"


_ENDS = str.maketrans({"|": "/"} | dict.fromkeys("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", " "))


def _write_pdf(text: str, file: Path) -> None:
    """Write pages in landscape, with their numbers; the head of a table stands on each page that it goes on.

    Raises:
        ConfigError: the fonts that every reader of PDF has lack a letter.
    """
    from xml.sax.saxutils import escape

    from reportlab.lib import colors
    from reportlab.lib.pagesizes import A4, landscape
    from reportlab.lib.styles import getSampleStyleSheet
    from reportlab.platypus import LongTable, Paragraph, SimpleDocTemplate, Spacer

    for letter in text:
        if not letter.encode("cp1252", errors="ignore"):
            raise ConfigError(f"{file}: a PDF has no letter {letter!r}; expected Western European letters. Write .md")
    styles = getSampleStyleSheet()
    cell = styles["BodyText"].clone("cell", fontSize=8, leading=10)
    names = {"#": "Title", "##": "Heading2"}
    look = [
        ("GRID", (0, 0), (-1, -1), 0.4, colors.lightgrey),
        ("BACKGROUND", (0, 0), (-1, 0), colors.whitesmoke),
        ("VALIGN", (0, 0), (-1, -1), "TOP"),
    ]
    title = text.partition("\n")[0].removeprefix("# ")
    document = SimpleDocTemplate(
        str(file), pagesize=landscape(A4), leftMargin=50, rightMargin=50, title=title, invariant=1
    )
    story: list[Any] = []
    for block in text.replace("`", "").strip().split("\n\n"):
        kind, _, rest = block.partition(" ")
        if kind != "|":
            name, part = (names[kind], rest) if kind in names else ("BodyText", block.strip())
            story.append(Paragraph(escape(part), styles[name]))
            continue
        head, _, *lines = ([part.strip() for part in line[1:-1].split("|")] for line in block.splitlines())
        rows = [[Paragraph(escape(value), cell) for value in line] for line in (head, *lines)]
        # Wider where the text is longer, or still to be written; none so narrow that words break.
        lengths = [max(map(len, values)) for values in zip(*lines, strict=True)] or [1] * len(head)
        shares = [max(min(length or 90, 90), 14) for length in lengths]
        widths = [document.width * share / sum(shares) for share in shares]
        story += [Spacer(1, 6), LongTable(rows, widths, repeatRows=1, style=look)]

    def number_page(canvas: Any, _: Any) -> None:
        canvas.setFont("Helvetica", 8)
        canvas.drawRightString(landscape(A4)[0] - 50, 30, f"{title}, page {canvas.getPageNumber()}")

    document.build(story, onFirstPage=number_page, onLaterPages=number_page)


def _describe_missing(approval: Approval) -> str:
    """Return why the terms of a site are not at hand."""
    if approval.job_id:
        return "not given: a site's policy stays at the site; add it with --site"
    return "none in force: no policy applies to a run without a federation"


def _describe_policy(policy: Policy | None, approval: Approval) -> tuple[str, str]:
    if policy is None:
        return _describe_missing(approval), "not recorded"
    defaults = Policy().model_dump(mode="json")
    terms = {name: value for name, value in policy.model_dump(mode="json").items() if value != defaults[name]}
    return _format_terms(terms) or "no term that forbids anything", "given with `--site`"


def _describe_checkpoints(policy: Policy | None, approval: Approval) -> tuple[str, str]:
    if policy is None:
        return f"{_describe_missing(approval)}; by default a site of a federation keeps them 90 days", "method"
    days = policy.checkpoint_days
    return "90 days, the default" if days is None else f"{days} days", "policy given with `--site`"


def _join_sites(by_site: Mapping[str, tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Return each text and source once, with the sites that have it."""
    sites: dict[tuple[str, str], list[str]] = {}
    for site, row in by_site.items():
        sites.setdefault(row, []).append(site)
    return [(", ".join(names), *row) for row, names in sites.items()]


def _format_terms(terms: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{name}: {', '.join(map(str, value)) if isinstance(value, list) else value}" for name, value in terms.items()
    )
