"""``flare-sparse check`` loads, scans, trains and evaluates every site, and ends with a verdict and an exit code."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from line import call
from typer.testing import Result

from flare_sparse.api import check_script
from flare_sparse.config.study import Study
from flare_sparse.core.errors import ConfigError, DataError
from flare_sparse.core.findings import Finding, get_exit_code, merge_findings
from flare_sparse.privacy.dp.accounting import Charge, compute_epsilon
from flare_sparse.training import compute

COUNTS = "8 training, 0 validation, 2 test examples"
TASK = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from flare_sparse.tasks.task import Cohort, Examples, Metric, Task


class Heart(Task):
    metric = Metric("mae", "mmHg", "min")

    def model(self):
        return nn.Linear(3, 1)

    def load(self, data, seed):
        table = np.loadtxt(data.path, delimiter=",", dtype=np.float32, ndmin=2)
        x, y = torch.from_numpy(table[:, :3]), torch.from_numpy(table[:, 3])
        return Examples(TensorDataset(x[4:], y[4:]), TensorDataset(x[:4], y[:4]))

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]).squeeze(1), batch[1])

    def predict(self, model, batch):
        return model(batch[0]).squeeze(1), batch[1]

    def metrics(self, predictions, targets):
        return {"mae": float((predictions - targets).abs().mean())}
"""


@pytest.fixture
def heart(tmp_path: Path) -> Path:
    """A configuration of three sites of twelve examples with a task in a module of its own."""
    for number in (1, 2, 3):
        np.savetxt(tmp_path / f"site-{number}.csv", np.random.default_rng(number).random((12, 4)), delimiter=",")
    (tmp_path / "heart.py").write_text(TASK)
    file = tmp_path / "heart.yaml"
    file.write_text(
        "name: heart\nmethod: {name: fedavg, rounds: 1}\ntask: {class: heart.Heart}\n"
        "simulator: {sites: 3, data: {path: '{site}.csv'}}\n"
    )
    return file


def check(file: Path, old: str = "", new: str = "", *options: str) -> Result:
    """Check a configuration after replacing ``old`` by ``new`` in its task's module."""
    module = file.with_suffix(".py")
    assert old in module.read_text()
    module.write_text(module.read_text().replace(old, new))
    # Python keeps an imported module, and the folder of every test holds one of the same name.
    for name in ("heart", "helper"):
        sys.modules.pop(name, None)
    sys.path[:] = [folder for folder in sys.path if "pytest-of" not in folder]
    return call("check", file, *options)


def find_line(file: Path, text: str) -> str:
    """Return ``heart.py:LINE`` of the line of the task's module that holds ``text``."""
    lines = file.with_suffix(".py").read_text().splitlines()
    return f"heart.py:{next(number for number, line in enumerate(lines, start=1) if text in line)}"


def replace_value(file: Path, site: str, row: int, column: int, value: float) -> None:
    path = file.parent / f"{site}.csv"
    table = np.loadtxt(path, delimiter=",")
    table[row, column] = value
    np.savetxt(path, table, delimiter=",")


def test_check_shows_every_site_in_a_table_and_ends_with_a_verdict(config: Path) -> None:
    result = call("check", config)
    lines = result.output.splitlines()
    assert result.exit_code == 0, result.output
    note = "PASS federation: a site weighs as many examples as it says it has"
    assert lines[1].startswith(note)
    assert lines[3] == "PASS model: 3 scalars"
    rows = [line for line in lines if line.startswith("PASS site ")]
    for number, row in enumerate(rows, start=1):
        found = re.fullmatch(
            rf"PASS site site-{number}: {COUNTS}; one step moves the model by (.*); first mae (.*)", row
        )
        assert found is not None, row
        assert min(map(float, found.groups())) > 0
    assert lines[-1] == "READY 9 checks passed"
    assert [str(finding) for finding in Study.load(config).check()] == lines[1:-1]


def test_check_shows_the_largest_weight_of_a_site(config: Path) -> None:
    result = call("check", config, "--set", "federation.max_share=0.5")
    assert "PASS federation: one site has at most 50% of a round's weight" in result.output


def test_check_reports_every_site_with_bad_data_and_the_quorum_that_they_miss(config: Path) -> None:
    for site in ("site-1", "site-2"):
        (config.parent / site / "ok").unlink()
    result = call("check", config)
    assert result.exit_code == 1
    assert "FAIL data of site-1: E_DATA\nsite-1: no file 'ok'" in result.output
    assert "FAIL data of site-2: E_DATA\nsite-2: no file 'ok'" in result.output
    assert "FAIL first round: E_QUORUM" in result.output
    assert result.output.splitlines()[-1].startswith("NOT READY 3 of 9 checks failed: data of site-1, data of site-2")


def test_check_continues_with_the_sites_that_have_data(config: Path) -> None:
    (config.parent / "site-1/ok").unlink()
    result = call("check", config)
    assert result.exit_code == 1
    assert f"PASS site site-2: {COUNTS}" in result.output


def test_check_reports_a_model_that_cannot_be_built_and_still_reads_the_data(config: Path) -> None:
    result = call("check", config, "--set", "task.broken=true")
    assert "FAIL model: E_CONFIG" in result.output
    assert f"PASS site site-2: {COUNTS}\n" in result.output
    assert result.exit_code == 2


def test_check_reports_all_errors_of_a_configuration(config: Path) -> None:
    result = call("check", config, "--set", "task.widht=3", "--set", "method.rounds=0")
    assert result.exit_code == 2
    assert "Did you mean 'width'?" in result.output
    assert "method.rounds: found 0; expected a whole number, >= 1" in result.output


def test_check_reports_a_diverging_step_of_sound_data(config: Path) -> None:
    result = call("check", config, "--set", "method.training={optimizer: sgd, lr: 3e38}", "--set", "task.scale=1e20")
    assert "FAIL round at site-1, site-2: E_FINITE" in result.output
    assert "lower method.training.lr" in result.output
    assert result.exit_code == 1


@pytest.mark.parametrize("simulated", [True, False])
def test_check_names_kernels_that_are_missing_here(
    config: Path, monkeypatch: pytest.MonkeyPatch, simulated: bool
) -> None:
    """This machine tells nothing of the sites of a federation."""
    assert "PASS sparse kernels: available" in call("check", config, "--set", "method.training.compute=sparse").output
    monkeypatch.setattr(compute, "find_spec", lambda name: None)
    if not simulated:
        text = config.read_text()
        config.write_text(text[: text.index("simulator:")])
    result = call("check", config, "--set", "method.training.compute=sparse")
    assert f"{'FAIL' if simulated else 'WARN'} sparse kernels" in result.output
    assert "numba is not installed (pip install 'flare-sparse[fast]')" in result.output
    assert ("on this machine, which is no site" in result.output) is not simulated
    assert result.exit_code == (2 if simulated else 0)
    assert "sparse kernels" not in call("check", config).output


def test_check_continues_without_a_simulator_section(config: Path) -> None:
    text = config.read_text()
    config.write_text(text[: text.index("simulator:")])
    result = call("check", str(config))
    assert result.exit_code == 0, result.output
    assert "SKIP sites" in result.output
    assert "PASS method" in result.output


def test_error_in_a_library_is_located_at_the_line_of_the_users_task(heart: Path) -> None:
    """An error of numpy's names the line that calls numpy, at the site where it happens."""
    (heart.parent / "site-2.csv").write_text("1,2,3,4\nfive,6,7,8\n")
    result = check(heart)
    assert result.exit_code == 1
    assert "FAIL data of site-2: E_SITE\nsite site-2: Heart.load(" in result.output
    assert "ValueError: could not convert string 'five'" in result.output
    assert f"{find_line(heart, 'np.loadtxt')} in load: table = np.loadtxt(" in result.output
    assert "npyio" not in result.output


@pytest.mark.parametrize(
    ("old", "new", "check_name", "line"),
    [
        ("nn.functional.mse_loss(model", "nn.functional.mse_loss(1 // 0, model",
         "round at site-1", "mse_loss(1"),
        ("model(batch[0]).squeeze(1), batch[1]\n\n    def metrics", "model(batch[2]), batch[1]\n\n    def metrics",
         "round at site-1", "model(batch[2])"),
        ('{"mae": float(', '{"mae": float(undefined + ', "round at site-1", "undefined"),
    ],
)  # fmt: skip
def test_error_in_loss_predict_or_metrics_shows_its_line(
    heart: Path, old: str, new: str, check_name: str, line: str
) -> None:
    result = check(heart, old, new)
    assert result.exit_code == 1
    assert f"FAIL {check_name}: E_SITE" in result.output
    assert f"{find_line(heart, line)} in " in result.output


def test_values_that_are_not_finite_are_listed_by_file_example_and_column(heart: Path) -> None:
    """The loss of the first minibatch may be finite; every example is looked at."""
    replace_value(heart, "site-2", 9, 1, np.nan)
    replace_value(heart, "site-3", 0, 3, np.inf)
    result = check(heart)
    assert result.exit_code == 1
    assert "FAIL inputs of site-2: E_DATA" in result.output
    assert f"{heart.parent / 'site-2.csv'}:\n  NaN in batch[0] of training examples 5 (column 1)\n" in result.output
    assert "  infinity in batch[1] of test examples 0\n" in result.output
    assert "training.lr" not in result.output
    assert "inputs of site-2, inputs of site-3" in result.output.splitlines()[-1]


def test_identifiers_and_columns_that_the_task_knows_name_what_is_not_finite(heart: Path) -> None:
    replace_value(heart, "site-1", 5, 2, np.nan)
    ids = '0, [f"p{i}" for i in range(4, 12)], [], ["age", "bmi", "hr"]'
    result = check(heart, "TensorDataset(x[:4], y[:4]))", f"TensorDataset(x[:4], y[:4]), {ids})")
    assert "NaN in batch[0] of training examples p5 (hr)" in result.output


def test_loss_without_a_gradient_is_warned_about(heart: Path) -> None:
    result = check(heart, "return nn.functional.mse_loss(", "return 0 * nn.functional.mse_loss(")
    assert result.exit_code == 0
    assert "WARN training at site-1, site-2, site-3: the step does not change the model" in result.output


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('{"mae": ', '{"mse": ', "Heart.metrics() has no 'mae', by which rounds and models are compared; it has mse"),
        ("float((predictions - targets)", "float(torch.nan * (predictions - targets)",
         "'mae' is nan; expected a finite"),
        ("float((predictions - targets).abs().mean())", "(predictions - targets).abs().mean()",
         "'mae' is Tensor; expected a finite number, such as float(value)"),
        ('{"mae": float((predictions - targets).abs().mean())}', "float((predictions - targets).abs().mean())",
         "Heart.metrics() returned float; expected a dict"),
    ],
)  # fmt: skip
def test_unusable_metrics_are_named(heart: Path, old: str, new: str, message: str) -> None:
    result = check(heart, old, new)
    assert result.exit_code == 1
    assert "FAIL round at site-1, site-2, site-3: E_METRICS" in result.output
    assert message in result.output


def test_predictions_and_targets_that_would_be_paired_all_with_all_are_warned_about(heart: Path) -> None:
    result = check(
        heart,
        "return model(batch[0]).squeeze(1), batch[1]\n\n    def metrics",
        "return model(batch[0]), batch[1]\n\n    def metrics",
    )
    assert result.exit_code == 0
    assert (
        "WARN metrics of site-1, site-2, site-3: predict() returns predictions of shape (4, 1) and targets of shape "
        in result.output
    )
    assert result.output.splitlines()[-1].endswith("metrics of site-1, site-2, site-3")


def test_warning_of_the_task_about_a_sites_examples_is_shown(heart: Path) -> None:
    result = check(heart, "TensorDataset(x[:4], y[:4]))", "TensorDataset(x[:4], y[:4]), warnings=('doses are in mg',))")
    assert result.exit_code == 0, result.output
    assert "WARN data of site-1, site-2, site-3: doses are in mg" in result.output
    assert result.output.splitlines()[-1].endswith("1 to look at: data of site-1, site-2, site-3")


def test_load_that_returns_a_tuple_is_explained(heart: Path) -> None:
    result = check(
        heart,
        "return Examples(TensorDataset(x[4:], y[4:]), TensorDataset(x[:4], y[:4]))",
        "return TensorDataset(x[4:], y[4:]), TensorDataset(x[:4], y[:4])",
    )
    assert result.exit_code == 1
    expected = "Heart.load() returned tuple; expected flare_sparse.tasks.task.Examples(train, test)"
    assert f"FAIL data of site-1, site-2, site-3: E_DATA\n{expected}" in result.output


def test_site_without_test_examples_is_warned_about_and_so_are_all_sites_without_them(heart: Path) -> None:
    old, none = "TensorDataset(x[:4], y[:4])", "TensorDataset(x[:0], y[:0])"
    some = check(heart, old, f'({none} if data.site == "site-2" else {old})')
    assert some.exit_code == 0, some.output
    assert "WARN data of site-2: no test examples" in some.output
    result = check(heart, 'data.site == "site-2"', "True")
    assert result.exit_code == 0
    assert "WARN test examples: no site has test examples" in result.output


def test_data_set_without_examples_fails(heart: Path) -> None:
    text = heart.read_text()
    data = "simulator: {data: {path: t.csv, partition: {kind: natural}}}\n"
    heart.write_text(
        text[: text.index("task:")] + "task: {name: table, kind: regression, target: age, features: [sex]}\n" + data
    )
    (heart.parent / "t.csv").write_text("subject,age,sex,site\n")
    result = check(heart)
    assert result.exit_code == 1
    assert f"FAIL sites: E_DATA\n{heart.parent / 't.csv'}: the table has no rows" in result.output


def test_more_sites_required_than_natural_sites_exist_fails(heart: Path) -> None:
    cohort = (
        "    def cohort(self, path):\n"
        '        return Cohort(("a", "b", "c", "d"), {"site": np.array(["A", "A", "B", "B"])})\n\n'
    )
    text = heart.read_text()
    data = "simulator: {data: {path: site-1.csv, partition: {kind: natural}}}\nfederation: {min_sites: 3}\n"
    heart.write_text(text[: text.index("simulator:")] + data)
    result = check(heart, "    def loss", f"{cohort}    def loss")
    assert result.exit_code == 1
    assert "FAIL first round: E_QUORUM" in result.output


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"mmHg", "min")', '"mmHg", "minimise")',
         "mode is 'minimise'; expected 'min' (lower is better) or 'max' (higher is better)"),
        ('Metric("mae", "mmHg", "min")', "None", "does not define metric, a flare_sparse.Metric"),
        ("    def predict", "    def predct", "does not define predict()"),
        ("import numpy as np", "import numpy as np\nimport nosuchmodule",
         "heart imports 'nosuchmodule', which is not found"),
        ("class Heart(Task):", "class Heart(Task:", "at {file}:"),
    ],
)  # fmt: skip
def test_task_that_cannot_be_imported_is_explained(heart: Path, old: str, new: str, message: str) -> None:
    result = check(heart, old, new)
    assert result.exit_code == 2
    assert message.format(file=heart.with_suffix(".py")) in result.output
    assert "Traceback" not in result.output


def test_helper_module_that_travels_is_named(heart: Path) -> None:
    (heart.parent / "helper.py").write_text("scale = 1.0\n")
    result = check(heart, "import numpy as np", "import numpy as np\nfrom helper import scale")
    assert result.exit_code == 0, result.output
    assert "PASS own code: heart.py, helper.py; travels with the job" in result.output


def test_problem_that_all_sites_have_is_printed_once() -> None:
    found = [Finding("WARN", f"data of site-{i}", "no column age") for i in (1, 2)] + [
        Finding.from_error("data of site-2", DataError("x"))
    ]
    assert [str(finding) for finding in merge_findings(found)] == [
        "WARN data of site-1, site-2: no column age",
        "FAIL data of site-2: E_DATA\nx",
    ]
    wrong = Finding.from_error("x", ConfigError("y"))
    assert [get_exit_code(part) for part in (found, found[:2], [wrong, *found])] == [1, 0, 2]


def test_class_of_a_notebook_is_refused_with_the_way_out(heart: Path) -> None:
    heart.write_text(heart.read_text().replace("heart.Heart", "__main__.Heart"))
    result = check(heart)
    assert result.exit_code == 2
    assert "set task.class to my_module.Heart" in result.output


CLIENT = """
import nvflare.client as flare

flare.init()
while flare.is_running():
    received = flare.receive()
    flare.send(flare.FLModel(params=received.params, meta={"NUM_STEPS_CURRENT_ROUND": 1}))
"""


@pytest.mark.slow
def test_script_that_learns_nothing_or_is_slow_missing_data_and_a_missing_launcher_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine that runs many tests at once may need more than the minute of a user's.
    monkeypatch.setattr(check_script, "LIMIT_S", 300.0)
    (tmp_path / "client.py").write_text(f"{CLIENT}    if False:\n        from opacus import PrivacyEngine\n")
    (tmp_path / "net_of_script.py").write_text("from torch import nn\n\nclass Net(nn.Linear):\n    pass\n")
    (tmp_path / "site-1").mkdir()
    file = tmp_path / "script.yaml"
    file.write_text(
        "name: script\nmethod: {name: fedavg, rounds: 1}\n"
        "task: {script: client.py, model: net_of_script.Net, model_args: {in_features: 2, out_features: 1}}\n"
        "simulator: {sites: 2, data: {path: '{site}'}}\n"
    )
    result = call("check", str(file))
    assert result.exit_code == 1
    assert "PASS own code: client.py, net_of_script.py; travels with the job" in result.output
    assert "PASS model: 3 scalars" in result.output
    assert f"PASS data of site-1: {tmp_path / 'site-1'}" in result.output
    assert (
        "WARN privacy: client.py trains with differential privacy and never asks flare.is_evaluate()" in result.output
    )
    assert "WARN training at site-1: the script sent the parameters that it received" in result.output
    assert f"FAIL data of site-2: E_DATA\n{tmp_path / 'site-2'}: there is no such file or folder" in result.output
    result = call("check", str(file), "--set", "task.launch=no-such-program --nproc 2")
    assert "FAIL launcher: E_CONFIG\ntask.launch: 'no-such-program' is not found" in result.output
    (tmp_path / "client.py").write_text(f"import time\n\ntime.sleep(600)\n{CLIENT}")
    monkeypatch.setattr(check_script, "LIMIT_S", 1.0)
    result = call("check", str(file))
    assert "WARN training at site-1: the script still ran after 1 s and was stopped" in result.output


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "there is no file client.py"),
        (b"x = (\n", "'(' was never closed"),
        ("import opacus  # caf\xe9\n".encode("latin-1"), "can't decode byte 0xe9"),
        (b"\0", "cannot contain null bytes"),
    ],
)
def test_script_that_is_no_python_is_named_once(script: bytes | None, reason: str, tmp_path: Path) -> None:
    if script is not None:
        (tmp_path / "client.py").write_bytes(script)
    file = tmp_path / "script.yaml"
    file.write_text(
        "name: script\nmethod: {name: fedavg, rounds: 1}\n"
        "simulator: {sites: 2, data: {path: ., partition: {kind: shared}}}\n"
        "task: {script: client.py, model: torch.nn.Linear, model_args: {in_features: 2, out_features: 1}}\n"
    )
    result = call("check", str(file))
    assert result.exit_code == 2
    assert result.output.count(reason) == 1
    assert result.output.splitlines()[-1].startswith("NOT READY 1 of")


def test_check_and_estimate_show_what_a_job_charges(config: Path) -> None:
    settings = config.read_text().replace("{name: fedavg}", "{name: fedavg, rounds: 4, training: {batch_size: 64}}")
    config.write_text(f"{settings}privacy: {{noise_multiplier: 8.0}}\n")
    epsilon = compute_epsilon([Charge(8.0, 1.0, 4)], 1e-5)
    result = call("check", config)
    assert f"PASS privacy of site-1: epsilon {epsilon:.2f} at delta 1e-05" in result.stdout
    figures = json.loads(call("estimate", config, "--subjects", "8", "--json").stdout)
    assert figures["epsilon"] == epsilon
    assert figures["privacy"]["sites"] == {
        "every site": {
            "subjects": 8, "sample_rate": 1.0, "steps": 4, "noise_multiplier": 8.0, "epsilon": epsilon
        }
    }  # fmt: skip
    assert "epsilon depends on the number of subjects; add --subjects N" in call("estimate", config).stdout
    budget = call("estimate", config, "--set", "privacy={epsilon: 3}", "--json")
    assert json.loads(budget.stdout)["epsilon"] == 3
