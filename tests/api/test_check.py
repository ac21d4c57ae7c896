"""``check`` passes if and only if a run of one round ends with all sites: examples, configurations, and mutations."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from line import call
from small_data import list_overrides

from flare_sparse.tasks.models.base import MODELS_VARIABLE

ROOT = Path(__file__).parents[2]
Rows = list[dict[str, str]]

KINDS: dict[str, dict[str, Any]] = {
    "binary": {"kind": "binary", "target": "sick"},
    "regression": {"kind": "regression", "target": "dose", "target_scale": [50, 10]},
    "classes": {"kind": "classes", "target": "stage", "classes": ["I", "II", "III"]},
    "survival": {"kind": "survival", "target": "months", "event": "sick"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "site": {},
    "site, imputed": {"missing": "impute"},
    "federated": {"scaling": "federated"},
    "federated, imputed": {"scaling": "federated", "missing": "impute", "clip": 3},
    "constants": {"scaling": {"age": [50, 10], "marker": [0, 1]}, "missing": "impute"},
    "none, skipping": {"scaling": "none", "skip_bad_subjects": True},
}


def set_cell(name: str, value: str, row: int = 0) -> Callable[[Rows], Rows]:
    """Return a mutation that changes one cell."""
    return lambda rows: [{**own, name: value} if i == row else own for i, own in enumerate(rows)]


def set_at_site(name: str, value: str, site: str = "B") -> Callable[[Rows], Rows]:
    """Return a mutation that gives all rows of a site one value."""
    return lambda rows: [{**own, name: value} if own["site"] == site else own for own in rows]


def keep_one_subject(rows: Rows) -> Rows:
    """Leave a site one row."""
    last = [own for own in rows if own["site"] == "B"][-1]
    return [own for own in rows if own["site"] != "B" or own is last]


MUTATIONS: dict[str, Callable[[Rows], Rows]] = {
    "nothing": lambda rows: rows,
    "a missing value": set_cell("marker", ""),
    "a column missing at a site": set_at_site("marker", ""),
    "a missing target": set_cell("sick", ""),
    "no target at a site": lambda rows: set_at_site("stage", "")(
        set_at_site("dose", "")(set_at_site("sick", "")(rows))
    ),
    "one class at a site": lambda rows: set_at_site("stage", "I")(set_at_site("sick", "0")(rows)),
    "one subject at a site": keep_one_subject,
    "a wrong column": lambda rows: [{("mark" if k == "marker" else k): v for k, v in own.items()} for own in rows],
    "text in a number": set_cell("marker", "high"),
    "an unknown label": lambda rows: set_cell("stage", "V")(set_cell("sick", "2")(rows)),
    "an infinite value": set_cell("marker", "inf"),
    "a constant column": lambda rows: [{**own, "marker": "1"} for own in rows],
    "an identifier twice": set_cell("id", "p1", row=5),
    "a row without a site": set_cell("site", ""),
    "no rows": lambda rows: rows[:0],
    "a negative time": set_cell("months", "-1"),
}
FEW = [
    ("binary", "federated, imputed", "a missing value"),
    ("binary", "federated", "a missing value"),
    ("regression", "site", "one subject at a site"),
    ("classes", "site, imputed", "one class at a site"),
    ("survival", "none, skipping", "no target at a site"),
    ("binary", "constants", "a wrong column"),
]


def write_table(folder: Path, rows: Rows, task: dict[str, Any]) -> Path:
    """Write a table and a study of it; return the study's file."""
    header = list(rows[0]) if rows else ["id", "site", "age", "marker", "sick", "dose", "stage", "months"]
    lines = [",".join(header), *(",".join(own[name] for name in header) for own in rows)]
    (folder / "t.csv").write_text("\n".join(lines) + "\n")
    settings = {
        "name": "study",
        "method": {"name": "fedavg", "training": {"lr": 0.01, "batch_size": 8}},
        "task": {"name": "table", "features": ["age", "marker"], "id": "id", "model": {"name": "mlp"}, **task},
        "simulator": {"data": {"path": "t.csv", "partition": {"kind": "natural", "column": "site"}}},
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(settings))
    return folder / "study.yaml"


def build_rows() -> Rows:
    random = np.random.default_rng(0)
    return [
        {
            "id": f"p{i}",
            "site": "ABC"[i % 3],
            "age": f"{random.normal(50, 10):.1f}",
            "marker": f"{random.normal():.2f}",
            "sick": str(i // 3 % 2),
            "dose": f"{random.normal(50, 10):.1f}",
            "stage": ["I", "II", "III"][i // 3 % 3],
            "months": str(1 + i % 24),
        }
        for i in range(60)
    ]


def assert_agreement(folder: Path, file: Path, *overrides: str) -> bool:
    """Check and run a study; return whether both pass."""
    options = [option for override in overrides for option in ("--set", override)]
    checked = call("check", file, *options)
    ran = call("run", file, "--env", "local", *options, "--set", "method.rounds=1", "--out", folder / "out")
    assert checked.exception is None or isinstance(checked.exception, SystemExit), checked.exception
    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
    assert (checked.exit_code == 0) == (ran.exit_code == 0), f"{checked.output}\n--- run\n{ran.output}"
    return checked.exit_code == 0


def list_tables() -> Iterator[Any]:
    """Yield kinds of target with every mutation and, in turn, one of the scalings; all but a few rows are long."""
    scalings = list(SETTINGS)
    rows = [
        (kind, scalings[(i + 2 * j) % len(scalings)], mutation)
        for i, kind in enumerate(KINDS)
        for j, mutation in enumerate(MUTATIONS)
    ]
    # Missing values are where scaling and imputation meet.
    rows += [("binary", scaling, mutation) for scaling in scalings for mutation in list(MUTATIONS)[:3]]
    for row in dict.fromkeys([*FEW, *rows]):
        yield pytest.param(*row, marks=[] if row in FEW else [pytest.mark.long], id="-".join(row))


@pytest.mark.parametrize(("kind", "scaling", "mutation"), list(list_tables()))
def test_check_of_a_table_agrees_with_its_run(kind: str, scaling: str, mutation: str, tmp_path: Path) -> None:
    file = write_table(tmp_path, MUTATIONS[mutation](build_rows()), {**KINDS[kind], **SETTINGS[scaling]})
    passes = assert_agreement(tmp_path, file)
    if mutation == "nothing":
        assert passes


CONFIGS = {
    "a wrong shape": ["task.shape=[50, 64, 52]"],
    "more sites than there are": ["federation.min_sites=99"],
    "nearly all subjects for testing": ["task.split.test=0.9"],
    "no step": ["method.training.lr=1e-30"],
    "a step that diverges": ["method.training={optimizer: sgd, lr: 1e300}"],
}


def list_configurations() -> Iterator[Any]:
    """Yield configurations of several tasks with each mutation; tests/rounds/local/test_estimate.py has the others."""
    for name in ("neurosfl_brain_age", "lora_a2_brain_age", "fedavg_readmission", "scbf_mortality"):
        for mutation in CONFIGS:
            if mutation == "a wrong shape" and "brain_age" not in name:
                continue
            is_short = (name, mutation) == ("fedavg_readmission", "more sites than there are")
            marks = [] if is_short else [pytest.mark.long]
            yield pytest.param(ROOT / "app_configs" / f"{name}.yaml", mutation, marks=marks, id=f"{name}-{mutation}")


@pytest.mark.parametrize(("file", "mutation"), list(list_configurations()))
def test_check_of_a_configuration_agrees_with_its_run(
    file: Path, mutation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODELS_VARIABLE, str(tmp_path / "models"))
    overrides = list_overrides(file, tmp_path, rounds=1)
    assert_agreement(tmp_path, file, *overrides, *CONFIGS[mutation])


def list_examples() -> Iterator[Any]:
    """Yield the configurations on the pages of docs/."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for number, text in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)):
            if all(re.search(f"^{section}:", text, re.MULTILINE) for section in ("method", "task")):
                yield pytest.param(text, marks=pytest.mark.long, id=f"{page.stem}-{number}")


@pytest.mark.parametrize("text", list(list_examples()))
def test_check_of_an_example_agrees_with_its_run(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most examples lack their data here: both refuse it."""
    monkeypatch.chdir(tmp_path)
    names = ["patient", "hospital", "age", "sex", "stage", "marker", "months", "died"]
    rows = [
        f"p{i},{'AB'[i % 2]},{40 + i % 30},{'FM'[i % 2]},{'I' * (1 + i % 3)},{i % 7 or ''},{1 + i},{i % 2}"
        for i in range(80)
    ]
    Path("patients.csv").write_text("\n".join([",".join(names), *rows]) + "\n")
    Path("study.yaml").write_text(text)
    assert_agreement(tmp_path, tmp_path / "study.yaml")
