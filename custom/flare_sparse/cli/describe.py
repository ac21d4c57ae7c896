"""``flare-sparse describe``: federated statistics of the sites' data, before anything is trained."""

from pathlib import Path

from ..core.findings import Finding
from .console import Screen, err, print_finding, print_json
from .console import out as console
from .options import AdminKit, ConfigFile


def describe(
    config: ConfigFile,
    kit: AdminKit = None,
) -> None:
    """Describe the data of all sites before training: counts, missing values, histograms and quantiles by site.

    Each site answers one question of its own copy of the job, follows its policy and sends no figure of few rows.
    Writes a page with plots, and warns of what may decide the study: a site with one class, sites that differ in a
    label such as the scanner, a column in another unit. Without --kit the sites are those of FLARE's simulator. Needs
    the extra report.

    [dim]flare-sparse describe study.yaml[/]

    [dim]flare-sparse describe study.yaml --kit kits/lead@our.org[/]
    """
    from ..api.describe import describe_study
    from ..config.study import Study

    study = Study.load(config)
    folder = Path("runs") / f"{study.config.name}-description"
    record = describe_study(study, folder, kit=kit, observer=Screen(err))
    if print_json(record):
        return
    for warning in record["warnings"]:
        print_finding(Finding("WARN", "data", warning))
    console.print(f"page: {folder / 'description.html'}")
