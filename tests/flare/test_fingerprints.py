"""The job that collects nnU-Net's fingerprints: the sites' policies, and a server that trusts no answer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from described_site import DescribedSite
from nnunet_data import require_nnunet, write_raw
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from flare_sparse.config.loading import parse_job
from flare_sparse.config.schema import JobConfig
from flare_sparse.flare.payload import QUESTION, build_refusal, get_refusal_code, wrap
from flare_sparse.flare.questions import (
    ANSWER,
    FingerprintController,
    FingerprintExecutor,
    build_question,
)
from flare_sparse.flare.recipe import QuestionRecipe
from flare_sparse.flare.site.setup import CLASSES
from flare_sparse.rounds.endpoints.egress import EGRESS_FOLDER, read_chain
from flare_sparse.tasks.nnunet.fingerprint import (
    Fingerprint,
    Intensities,
    compute_fingerprint,
    merge_fingerprints,
)

SAMPLES = 500
QUESTIONED = wrap(QUESTION, build_question(FingerprintExecutor(SAMPLES)))


@pytest.fixture
def job() -> JobConfig:
    return parse_job({"name": "study", "permit": "EA 1", "method": {"name": "fedavg"}, "task": {"name": "nnunet"}})


def make_site(tmp_path: Path, job: JobConfig, cases: int = 3, policy: dict[str, Any] | None = None) -> DescribedSite:
    folder = write_raw(tmp_path / "raw", cases)
    return DescribedSite(tmp_path / "A", job, folder, FingerprintExecutor(SAMPLES), policy)


def test_such_a_job_carries_no_code_and_every_class_is_allowed(tmp_path: Path, job: JobConfig) -> None:
    QuestionRecipe(job, FingerprintExecutor(SAMPLES), FingerprintController).export(str(tmp_path))
    assert not list(tmp_path.glob("**/*.py"))
    (site,), (server,) = (
        [json.loads(file.read_text()) for file in tmp_path.glob(f"**/config_fed_{end}.json")]
        for end in ("client", "server")
    )
    paths = [part["executor"]["path"] for part in site["executors"]] + [part["path"] for part in server["workflows"]]
    assert [path.rpartition(".")[2] for path in paths] == ["FingerprintExecutor", "FingerprintController"]
    assert set(paths) <= set(CLASSES)
    assert not [*site["components"], *site["task_result_filters"]]


@pytest.mark.slow
def test_site_answers_with_its_fingerprint_which_the_egress_log_names(tmp_path: Path, job: JobConfig) -> None:
    require_nnunet()
    site = make_site(tmp_path, job)
    text = from_shareable(site.answer(QUESTION, QUESTIONED)).data[ANSWER]
    assert Fingerprint.model_validate_json(text) == compute_fingerprint(tmp_path / "raw", SAMPLES)
    (line,) = read_chain(site.folder / EGRESS_FOLDER / "A")[0]
    assert (line["permit"], line["contents"]) == ("EA 1", ["statistics"])
    assert line["bytes"] >= len(text)

    (site.folder / "local" / "flare_sparse_withdrawn.txt").write_text("case01\n")
    without = Fingerprint.model_validate_json(from_shareable(site.answer(QUESTION, QUESTIONED)).data[ANSWER])
    assert without.cases == 2


@pytest.mark.parametrize(
    ("policy", "term"),
    [
        ({"contents": ["weights", "metrics"]}, "contents: statistics may not leave"),
        ({"permit": "EA 2"}, "permit: this site takes part under 'EA 2'"),
        ({"epsilon": 8}, "epsilon: statistics would leave without it"),
        ({"min_examples": 4}, "min_examples: 3 cases, the minimum is 4"),
    ],
)
def test_policy_keeps_the_fingerprint_at_the_site(
    policy: dict[str, Any], term: str, tmp_path: Path, job: JobConfig
) -> None:
    site = make_site(tmp_path, job, policy=policy)
    result = site.answer(QUESTION, QUESTIONED)
    assert get_refusal_code(result) == "E_POLICY"
    assert "DXO" not in result
    assert term in site.read_error()


def build_fingerprint(side: int, samples: int = SAMPLES) -> Fingerprint:
    part = Intensities(values=(1.0, 2.0, 3.0), counts=(1, 1, 1))
    dataset = {"channel_names": {"0": "MRI"}, "labels": {"background": 0, "a": 1}, "file_ending": ".nii.gz"}
    return Fingerprint(
        dataset=dataset, reader="NibabelIO", samples_per_case=samples, geometry=(((1, 1, 1), (side, 9, 9)),),
        relative_sizes=(0.5,), intensities=(part,),
    )  # fmt: skip


def send(content: Any) -> Shareable:
    return DXO(DataKind.STATISTICS, data={ANSWER: content}).to_shareable()


def run_controller(
    answers: dict[str, Shareable | None], folder: Path, monkeypatch: pytest.MonkeyPatch, signal: Signal | None = None
) -> list[str]:
    """Let a controller receive the answers of its sites; return the reasons of its panics."""
    controller, panics = FingerprintController("", 60), list[str]()

    def broadcast(task: Any, fl_ctx: Any, **_: Any) -> None:
        for name, answer in answers.items():
            if answer is not None:
                client_task = SimpleNamespace(client=SimpleNamespace(name=name), task=task, result=answer)
                task.result_received_cb(client_task, fl_ctx)

    monkeypatch.setattr(controller, "broadcast_and_wait", broadcast)
    monkeypatch.setattr(controller, "system_panic", lambda reason, fl_ctx: panics.append(reason))
    engine = SimpleNamespace(
        get_clients=lambda: [SimpleNamespace(name=name) for name in answers],
        get_workspace=lambda: SimpleNamespace(get_run_dir=lambda job: str(folder)),
    )
    fl_ctx: Any = SimpleNamespace(get_engine=lambda: engine, get_job_id=lambda: "id")
    controller.control_flow(signal or Signal(), fl_ctx)
    return panics


def test_server_keeps_the_merged_fingerprint_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [build_fingerprint(9), build_fingerprint(11)]
    answers = {name: send(part.model_dump_json().encode()) for name, part in zip("BA", parts, strict=True)}
    # A job that is started again replaces what it has written.
    assert [run_controller(answers, tmp_path, monkeypatch) for _ in range(2)] == [[], []]
    content = json.loads((tmp_path / FingerprintController.result).read_text())
    assert content["sites"] == ["A", "B"]
    assert Fingerprint.model_validate(content["fingerprint"]) == merge_fingerprints(parts)
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["fingerprint.json"]


GOOD = build_fingerprint(9).model_dump_json().encode()
OTHER = build_fingerprint(11, 400).model_dump_json().encode()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "B: no answer"),
        (build_refusal("E_POLICY", ReturnCode.EXECUTION_EXCEPTION), "B: E_POLICY"),
        (send(GOOD.replace(b'"counts":[1', b'"counts":[-1')), "B: E_KIND: ValidationError"),
        (send(b"patient 4711"), "B: E_KIND: ValidationError"),
        (send(b"[" * 100_000), "B: E_KIND: ValidationError"),
        (send(3), "B: E_KIND: ValidationError"),
        (Shareable(), "B: E_KIND: ValueError"),
        (send(OTHER), "E_CONFIG: the fingerprints differ in samples_per_case (A, B)"),
        (send(GOOD.replace(b'"a":1', b'"Jane Doe":1')), "E_CONFIG: the fingerprints differ in dataset (A, B)"),
        (send(GOOD.replace(b'"labels":', b'"patient":"Jane Doe","labels":')), "B: E_KIND: ValidationError"),
        (send(GOOD.replace(b'"file_ending":', b'"regions_class_order":[[1]],"file_ending":')), "B: E_KIND: Valid"),
        (send(GOOD), "E_CONFIG: the answers cannot be joined: ConfigError"),
    ],
)
def test_job_ends_with_the_site_whose_fingerprint_is_missing(
    answer: Shareable | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (panic,) = run_controller({"A": send(GOOD), "B": answer}, tmp_path, monkeypatch)
    assert panic.startswith(reason)
    assert "Jane Doe" not in panic
    assert not (tmp_path / FingerprintController.result).exists()


def test_one_site_alone_is_not_merged_and_an_abort_is_no_missing_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (panic,) = run_controller({"A": send(GOOD)}, tmp_path, monkeypatch)
    assert panic.startswith("E_QUORUM: A alone is connected")
    aborted = Signal()
    aborted.trigger(value=True)
    assert run_controller({"A": None, "B": None}, tmp_path, monkeypatch, aborted) == []
    assert not (tmp_path / FingerprintController.result).exists()
