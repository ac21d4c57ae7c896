"""The guards in FLARE's order (site filters, job filters, gate): only the approved update leaves the site."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.utils.task_utils import apply_filters
from secure_sums import get_identity
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from toy import Toy

from flare_sparse.config.assemble import build_initial_model
from flare_sparse.core.exchange import Assignment, Patch, Request, UpdateSpec
from flare_sparse.core.mask import Mask
from flare_sparse.flare.executor import EncodeUpdate, SparseExecutor
from flare_sparse.flare.payload import (
    CODE_HEADER,
    HELLO,
    SUM,
    UPDATE,
    extract,
    message_to_shareable,
    shareable_to_message,
    update_to_dxo,
    wrap,
)
from flare_sparse.flare.session import SiteSession
from flare_sparse.flare.site import guards
from flare_sparse.flare.site.authorizer import SitePlanAuthorizer
from flare_sparse.flare.site.guards import SiteLastGate, SiteResultPolicy
from flare_sparse.flare.site.setup import RECIPE_CLASSES, install_guards
from flare_sparse.methods.registry import METHODS
from flare_sparse.privacy.dp.account import PrivacyAccount
from flare_sparse.privacy.dp.accounting import SamplingPlan, compute_epsilon
from flare_sparse.privacy.dp.config import PrivacyConfig
from flare_sparse.privacy.dp.mechanism import LEAST_NOISE, SiteMechanism
from flare_sparse.privacy.release import Numbers, ReleaseRecord, Rule, SentCell, SiteRelease, update_record
from flare_sparse.privacy.secure_aggregation.stage import SiteSums, SumRules
from flare_sparse.rounds.endpoints.request_log import RequestLog
from flare_sparse.rounds.endpoints.server import ServerEndpoint
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.tasks.task import Examples
from flare_sparse.training import LocalTask, SitePrivacy, build_site
from flare_sparse.wire.capabilities import local_capabilities
from flare_sparse.wire.formats import ValueType
from flare_sparse.wire.ledger import Ledger
from flare_sparse.wire.stage import StageRun
from flare_sparse.wire.steps import Step, SumId, pack_message, unpack_message

RUN = "0" * 16


class Sum(Toy):
    """One layer."""

    def model(self) -> nn.Module:
        return nn.Linear(6, 1)


class Hospital:
    """The only site of a federation, with the server beside it: from a request to the result that leaves."""

    def __init__(
        self,
        folder: Path,
        method: str = "fedavg",
        policy: dict[str, Any] | None = None,
        values: ValueType = "float32",
        privacy: SitePrivacy | None = None,
    ):
        (folder / "local").mkdir(parents=True)
        (folder / "run").mkdir()
        if policy:
            (folder / "local" / "flare_sparse_policy.yaml").write_text(yaml.safe_dump(policy))
        task = Sum()
        layout, weights = build_initial_model(task, 1)
        x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
        data = Examples(TensorDataset(x[8:], x[8:, :1]), TensorDataset(x[:8], x[:8, :1]))
        settings = {"rounds": 2, **({"sparsity": 0.5, "saliency_batches": 1} if method == "neurosfl" else {})}
        self.method = METHODS[method](METHODS[method].Config.model_validate(settings), layout, 1)
        self.server = ServerEndpoint(layout, RUN, values, Ledger(), seed=1)
        session = SiteSession()
        site = build_site(LocalTask.open("site-1", task, data, layout, 1), privacy=privacy)
        session._endpoint = SiteEndpoint(site, self.method, RUN, values)
        self.endpoint, self.folder, self.layout, self.session = session._endpoint, folder, layout, session
        state = self.method.init(weights, ["site-1"])
        self.attempt = self.server.encode_requests(self.method.ask(state, ["site-1"]) or {})
        workspace = SimpleNamespace(
            get_root_dir=lambda: str(folder),
            get_site_config_dir=lambda: str(folder / "local"),
            get_run_dir=lambda job: str(folder / "run"),
        )
        engine = SimpleNamespace(
            get_component=lambda name: session, get_workspace=lambda: workspace, fire_event=lambda *event: None
        )
        self.fl_ctx = FLContextManager(engine=engine, identity_name="site-1", job_id="job").new_context()
        self.fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace, private=True, sticky=False)

    def run_task(self, *job_filters: Filter, site_filters: tuple[Filter, ...] | None = None) -> Shareable:
        """Return what FLARE would send after the site's filters, the job's filters and the gate."""
        request = self.endpoint.receive(self.attempt.messages["site-1"])
        update = self.endpoint.answer(request)
        reply = update_to_dxo(update, self.layout).to_shareable()
        reply[UPDATE] = (request, update)
        site_filters = (SiteResultPolicy(),) if site_filters is None else site_filters
        scope = SimpleNamespace(task_result_filters={"out": list(site_filters)})
        self.fl_ctx.set_prop(FLContextKey.SCOPE_OBJECT, scope, private=True, sticky=False)
        job_filters_by_task = {"exchange/out": [EncodeUpdate(), *job_filters]}
        reply = apply_filters("task_result_filters", reply, self.fl_ctx, job_filters_by_task, "exchange", "out")
        self.fl_ctx.set_prop(FLContextKey.TASK_RESULT, reply, private=True, sticky=False)
        SiteLastGate().handle_event(EventType.AFTER_TASK_RESULT_FILTER, self.fl_ctx)
        return reply

    def read_site_error(self) -> str:
        file = self.folder / "run" / "site_error.txt"
        return file.read_text() if file.is_file() else ""


class JobFilter(Filter):
    """A filter of a job, which applies any function to the result."""

    def __init__(self, act: Callable[[Shareable], Shareable]):
        super().__init__()
        self._act = act

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        return self._act(shareable)


def is_stripped(reply: Shareable) -> bool:
    """Whether nothing but codes is left in a reply."""
    return set(reply) <= {"__headers__"} and reply.get_return_code() != ReturnCode.OK


def test_unchanged_update_leaves_with_the_bits_of_the_trained_weights(tmp_path: Path) -> None:
    guarded, plain = Hospital(tmp_path / "a"), Hospital(tmp_path / "b")
    approved, unapproved = guarded.run_task(), plain.run_task(site_filters=())
    assert approved.get_return_code() == ReturnCode.OK
    assert is_stripped(unapproved)  # without SiteResultPolicy in the scope the gate lets nothing leave
    message, meta = from_shareable(approved).data["message"], from_shareable(approved).meta
    update = guarded.server.decode("site-1", message, meta["examples"], meta["metrics"])
    trained = Hospital(tmp_path / "c")
    request = trained.endpoint.receive(trained.attempt.messages["site-1"])
    assert torch.equal(update.patch.values, trained.endpoint.answer(request).patch.values)


QUANTIZED = pytest.mark.parametrize("values", ["int8", "int4", "int2", "int1"])


@QUANTIZED
def test_quantized_update_leaves_with_the_values_that_the_seed_rounds_to(values: Any, tmp_path: Path) -> None:
    hospital = Hospital(tmp_path, values=values)
    reply = hospital.run_task()
    assert reply.get_return_code() == ReturnCode.OK, hospital.read_site_error()
    message, meta = from_shareable(reply).data["message"], from_shareable(reply).meta
    update = hospital.server.decode("site-1", message, meta["examples"], meta["metrics"])
    assert hospital.endpoint.request is not None
    trained = hospital.endpoint.answer(hospital.endpoint.request).patch.values
    assert (
        0 < (update.patch.values - trained).abs().max() < 0.7 * (trained - hospital.endpoint.site.weights).abs().max()
    )


@pytest.mark.parametrize("values", ["int8", "int4", "int2"])
def test_job_filter_that_rounds_otherwise_sends_nothing(values: Any, tmp_path: Path) -> None:
    """Each value could be rounded to another number within the tolerance of few bits: a channel for anything."""
    hospital = Hospital(tmp_path, values=values)

    def round_otherwise(reply: Shareable) -> Shareable:
        endpoint = hospital.endpoint
        assert endpoint.request is not None
        endpoint.method.seed += 1
        message = endpoint.encode_message(endpoint.request, endpoint.answer(endpoint.request))
        endpoint.method.seed -= 1
        return message_to_shareable(message.data, dict(from_shareable(reply).meta))

    reply = hospital.run_task(JobFilter(round_otherwise))
    assert is_stripped(reply)
    assert "not the update that the site approved" in hospital.read_site_error()


def forge_values(reply: Shareable) -> Shareable:
    """Replace all values by 777, in a message that is otherwise valid."""
    dxo = from_shareable(reply)
    hospital = forge_values.hospital  # type: ignore[attr-defined]
    endpoint = hospital.endpoint
    update = endpoint.answer(endpoint.request)
    values = torch.full_like(update.patch.values, 777.0)
    forged = type(update)(
        type(update.patch)(values, update.patch.mask), update.content, update.num_examples, update.metrics
    )
    return message_to_shareable(endpoint.encode(endpoint.request, forged).data, dict(dxo.meta))


def add_data(reply: Shareable) -> Shareable:
    dxo = from_shareable(reply)
    dxo.data["also"] = np.zeros(3)
    return dxo.update_shareable(Shareable())


def add_meta(reply: Shareable) -> Shareable:
    dxo = from_shareable(reply)
    dxo.set_meta_prop("subjects", "sub-01")
    return dxo.update_shareable(reply)


def change_metric(reply: Shareable) -> Shareable:
    dxo = from_shareable(reply)
    dxo.meta["metrics"] = {"mse": 3.1415}
    return dxo.update_shareable(reply)


def change_examples(reply: Shareable) -> Shareable:
    dxo = from_shareable(reply)
    dxo.meta["examples"] = 10**9
    return dxo.update_shareable(reply)


def truncate_message(reply: Shareable) -> Shareable:
    dxo = from_shareable(reply)
    dxo.data["message"] = dxo.data["message"][:-8].copy()
    return dxo.update_shareable(reply)


def in_place(act: Callable[[Shareable], Any]) -> Callable[[Shareable], Shareable]:
    def process(reply: Shareable) -> Shareable:
        act(reply)
        return reply

    return process


ADDITIONS: dict[str, Callable[[Shareable], Shareable]] = {
    "a key": in_place(lambda reply: reply.__setitem__("stolen", np.arange(10**6))),
    "a header": in_place(lambda reply: reply.set_header("note", "sub-01")),
    "a cookie": in_place(lambda reply: reply.add_cookie("note", "sub-01")),
    "peer properties": in_place(lambda reply: reply.set_peer_props({"note": "sub-01"})),
    "a key of the DXO": in_place(lambda reply: reply["DXO"].__setitem__("note", "sub-01")),
    "a number with more bits": in_place(lambda reply: reply["DXO"]["meta"].__setitem__("examples", np.float64(32.0))),
}


@pytest.mark.parametrize("name", ADDITIONS)
def test_additions_of_a_job_filter_do_not_leave_the_site(name: str, tmp_path: Path) -> None:
    plain, spoiled = Hospital(tmp_path / "a").run_task(), Hospital(tmp_path / "b").run_task(JobFilter(ADDITIONS[name]))
    assert spoiled.get_return_code() == ReturnCode.OK
    for reply in (plain, spoiled):
        message = reply["DXO"]["data"].pop("message")
        assert type(message) is np.ndarray
        reply["DXO"]["data"]["message"] = message.tobytes()
    assert spoiled == plain
    assert type(spoiled["DXO"]["meta"]["examples"]) is int


HOSTILE: dict[str, Callable[[Shareable], Shareable]] = {
    "777": forge_values,
    "a foreign payload": lambda reply: DXO(DataKind.WEIGHTS, data={"w": np.ones(3)}).to_shareable(),
    "no DXO": lambda reply: Shareable({"stolen": "sub-01"}),
    "more beside the message": add_data,
    "more in the meta": add_meta,
    "another metric": change_metric,
    "more examples": change_examples,
    "a truncated message": truncate_message,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_changes_of_a_job_filter_never_leave_the_site(name: str, tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "site")
    forge_values.hospital = hospital  # type: ignore[attr-defined]
    reply = hospital.run_task(JobFilter(HOSTILE[name]))
    assert is_stripped(reply)
    assert str(reply.get_header(CODE_HEADER)).startswith("E_")
    assert "sub-01" not in str(reply)
    assert hospital.read_site_error()


def build_masked_hospital(folder: Path, policy: dict[str, Any] | None = None) -> tuple[Hospital, SiteSums]:
    hospital = Hospital(folder, policy=policy)
    run = StageRun(hospital.layout, RUN, hospital.method.get_sum_weights)
    admit = RequestLog(RUN, hospital.method.count_requests, attempts=1).admit_sum
    sums = SiteSums(get_identity("site-1"), run, SumRules(64.0), admit)
    hospital.endpoint.stage = sums
    return hospital, sums


def ask_for_keys(hospital: Hospital, *filters: Callable[[Shareable], Shareable]) -> Shareable:
    """Return what leaves when the server asks for the keys of a sum, after the job's filters."""
    question = pack_message(Step.KEYS, SumId(RUN, "train", 1, 1), b"")
    reply = SparseExecutor("fedavg", "toy", {}).execute(SUM, wrap(SUM, question), hospital.fl_ctx, Signal())
    for change in filters:
        reply = change(reply)
    hospital.fl_ctx.set_prop(FLContextKey.TASK_RESULT, reply, private=True, sticky=False)
    SiteLastGate().handle_event(EventType.AFTER_TASK_RESULT_FILTER, hospital.fl_ctx)
    return reply


def test_masked_update_leaves_without_values_and_the_sum_has_the_approved_ones(tmp_path: Path) -> None:
    hospital, sums = build_masked_hospital(tmp_path / "site", policy={"clip_norm": 0.001, "masked": True})
    dxo = from_shareable(hospital.run_task())
    update = hospital.server.decode("site-1", dxo.data["message"], dxo.meta["examples"], dxo.meta["metrics"])
    assert (update.content, update.patch.mask.count) == ("metrics", 0)
    assert sums._withheld is not None
    assert float(np.linalg.norm(sums._withheld.values)) == pytest.approx(0.001, rel=1e-3)


def test_reply_of_a_sum_leaves_as_the_site_made_it_whatever_a_job_filter_does(tmp_path: Path) -> None:
    hospital, sums = build_masked_hospital(tmp_path / "site")
    hospital.run_task()

    def forge(reply: Shareable) -> Shareable:
        return wrap(SUM, np.concatenate([extract(SUM, reply), np.zeros(8, np.uint8)]))

    reply = extract(SUM, ask_for_keys(hospital, forge))
    assert sums._party is not None
    assert unpack_message(reply, "site-1")[2] == sums._party.keys.to_bytes()


def test_withheld_values_that_a_job_filter_has_changed_never_leave(tmp_path: Path) -> None:
    hospital, sums = build_masked_hospital(tmp_path / "site")
    encode = sums.seal

    def forge(update: Any, *others: Any) -> Any:
        forged = Patch(update.patch.values + 1, update.patch.mask)
        return encode(replace(update, patch=forged), *others)

    sums.seal = forge  # type: ignore[method-assign]
    assert is_stripped(hospital.run_task())
    assert "changed the values that wait for the sum" in hospital.read_site_error()
    assert sums._withheld is None
    assert unpack_message(extract(SUM, ask_for_keys(hospital)), "site-1")[2] == b""


def test_policy_is_checked_before_values_wait_for_a_sum(tmp_path: Path) -> None:
    hospital, sums = build_masked_hospital(tmp_path / "site", policy={"max_norm": 1e-6})
    assert is_stripped(hospital.run_task())
    assert "max_norm" in hospital.read_site_error()
    assert sums._withheld is None


def test_policy_can_require_masked_sums(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "site", policy={"masked": True})
    assert is_stripped(hospital.run_task())
    assert "masked: no values of a single site may be readable" in hospital.read_site_error()


def test_step_of_a_sum_in_a_plain_job_is_refused(tmp_path: Path) -> None:
    reply = ask_for_keys(Hospital(tmp_path / "site"))
    assert is_stripped(reply)
    assert reply.get_header(CODE_HEADER) == "E_REQUEST"


def test_error_reply_carries_nothing_but_codes(tmp_path: Path) -> None:
    def smuggle(reply: Shareable) -> Shareable:
        reply = Shareable({"stolen": "sub-01"})
        reply.set_return_code("sub-02 is ill")
        reply.set_header(CODE_HEADER, "sub-03")
        reply.set_header("note", "sub-04")
        return reply

    reply = Hospital(tmp_path / "site").run_task(JobFilter(smuggle))
    assert is_stripped(reply)
    assert reply.get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR
    assert "sub-0" not in str(reply)


@pytest.mark.parametrize(
    ("method", "policy", "reason"),
    [
        ("neurosfl", {"contents": ["weights", "metrics"]}, "contents: scores may not leave"),
        (
            "neurosfl",
            {"min_score_examples": 64},
            "min_score_examples: scores were computed from 8 examples, the minimum is 64",
        ),
        (
            "neurosfl",
            {"min_score_batches": 2},
            "min_score_batches: scores were computed from 1 minibatches, the minimum is 2",
        ),
        ("fedavg", {"min_examples": 33}, "min_examples: weights were computed from 32 examples, the minimum is 33"),
        ("fedavg", {"max_upload_bytes": 130}, "max_upload_bytes"),
        ("fedavg", {"max_upload_share": 0.3}, "max_upload_share"),
        ("fedavg", {"max_norm": 1e-6}, "max_norm"),
        ("fedavg", {"tensors": ["*.bias"]}, "tensors"),
        ("fedavg", {"methods": ["neurosfl"]}, "methods: fedavg may not run at this site"),
        ("fedavg", {"no_such_term": 1}, "no_such_term"),
    ],
)
def test_policy_refusal_leaves_as_a_code_and_is_explained_at_the_site(
    method: str, policy: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    hospital = Hospital(tmp_path / "site", method, policy)
    reply = hospital.run_task()
    assert is_stripped(reply)
    assert reply.get_header(CODE_HEADER) in ("E_POLICY", "E_CONFIG")
    assert reason in hospital.read_site_error()


@pytest.mark.parametrize(("batches", "size", "leaves"), [(1, 1, False), (3, 8, False), (4, 8, True), (None, 8, True)])
def test_minima_of_scores_count_the_examples_read_and_not_those_at_the_site(
    batches: int | None, size: int, leaves: bool, tmp_path: Path
) -> None:
    hospital = Hospital(tmp_path / "site", "neurosfl", {"min_score_examples": 30, "min_score_batches": 4})
    assert hospital.endpoint.site.num_examples == 32
    config = {"rounds": 2, "saliency_batches": batches, "training": {"batch_size": size}}
    hospital.method.config = hospital.method.Config(**config)
    assert is_stripped(hospital.run_task()) is not leaves


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_metrics_of_few_test_examples_are_removed_and_the_update_leaves(kind: str, tmp_path: Path) -> None:
    for minimum, leave in ((8, True), (9, False)):
        hospital = Hospital(tmp_path / str(minimum), policy={"min_test_examples": minimum})
        if kind == "evaluate":
            model = Patch.from_vector(torch.zeros(hospital.layout.size), Mask.full(hospital.layout.size))
            hospital.attempt = hospital.server.encode_requests(
                {"site-1": Assignment(Request("evaluate", 3, model, model.mask), UpdateSpec("metrics"))}
            )
        reply = hospital.run_task()
        assert reply.get_return_code() == ReturnCode.OK
        assert bool(from_shareable(reply).meta["metrics"]) is leave


def test_limited_metrics_leave_in_the_planned_rounds_and_only_if_they_are_counted(tmp_path: Path) -> None:
    log = RequestLog(RUN, lambda kind, t: 1, attempts=9)
    for limit, requests, leave in ((2, None, False), (2, log, True), (1, log, False)):
        hospital = Hospital(tmp_path / f"{limit} {leave}", policy={"max_evaluations": limit})
        hospital.endpoint.requests = requests
        reply = hospital.run_task()
        assert reply.get_return_code() == ReturnCode.OK
        assert bool(from_shareable(reply).meta["metrics"]) is leave


def test_site_with_a_budget_trains_for_jobs_with_privacy_only(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "none", policy={"epsilon": 8, "metrics": "none", "min_test_examples": 99})
    assert is_stripped(hospital.run_task())
    assert "epsilon: the job has no privacy section" in hospital.read_site_error()
    plan = SamplingPlan.build(32, 32, 1, 2)
    config = PrivacyConfig(noise_multiplier=4.0)
    privacy = SitePrivacy(SiteMechanism(config, plan, PrivacyAccount(), RUN, "job"))
    policy = {"epsilon": 8, "metrics": "none", "withhold_isolated": True}
    hospital = Hospital(tmp_path / "private", policy=policy, privacy=privacy)
    site = hospital.endpoint.site
    hospital.method.config = hospital.method.Config(rounds=2, training={"batch_size": 32})
    dxo = from_shareable(hospital.run_task())
    # The policy lets no metric leave, but the record needs what is spent.
    assert dxo.meta["metrics"] == {"epsilon": compute_epsilon([plan.build_charge(4.0)], config.delta)}
    update = hospital.server.decode("site-1", dxo.data["message"], dxo.meta["examples"], dxo.meta["metrics"])
    # Noise on every entry: none is withheld, which would tell something about the data.
    assert bool((update.patch.values != update.patch.mask.take(site.weights)).all())


@pytest.mark.parametrize("is_hidden", [False, True])
def test_noise_replaces_withholding_from_its_smallest_multiplier_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_hidden: bool
) -> None:
    noise = LEAST_NOISE if is_hidden else math.nextafter(LEAST_NOISE, 0.0)
    mechanism = SiteMechanism(
        PrivacyConfig(noise_multiplier=noise), SamplingPlan.build(32, 32, 1, 2), PrivacyAccount(), RUN, "job"
    )
    hospital = Hospital(tmp_path, policy={"withhold_isolated": True}, privacy=SitePrivacy(mechanism))
    hospital.method.config = hospital.method.Config(rounds=2, training={"batch_size": 32})
    withheld: list[Any] = []

    def withhold(values: Tensor, *_: Any) -> tuple[Tensor, int]:
        withheld.append(values)
        return values, 0

    monkeypatch.setattr(guards, "withhold_isolated_units", withhold)
    assert not is_stripped(hospital.run_task())
    assert bool(withheld) is not is_hidden


def test_delta_is_clipped_before_it_leaves(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "site", policy={"clip_norm": 0.001, "max_norm": 0.0011})
    dxo = from_shareable(hospital.run_task())
    update = hospital.server.decode("site-1", dxo.data["message"], dxo.meta["examples"], dxo.meta["metrics"])
    moved = update.patch.values - update.patch.mask.take(hospital.endpoint.site.weights)
    assert float(moved.norm()) == pytest.approx(0.001, rel=1e-3)


def test_foreign_payload_leaves_only_if_the_policy_allows_foreign_jobs(tmp_path: Path) -> None:
    foreign = JobFilter(HOSTILE["a foreign payload"])
    assert is_stripped(Hospital(tmp_path / "closed").run_task(foreign))
    allowed = Hospital(tmp_path / "open", policy={"foreign_jobs": True}).run_task(foreign)
    assert from_shareable(allowed).data_kind == DataKind.WEIGHTS
    # It charges no budget of the site's.
    hospital = Hospital(tmp_path / "budget", policy={"foreign_jobs": True, "epsilon": 8})
    assert is_stripped(hospital.run_task(foreign))
    assert "epsilon: a job of another package charges nothing" in hospital.read_site_error()
    # What is this package's stays under its guards.
    changed = Hospital(tmp_path / "own", policy={"foreign_jobs": True}).run_task(JobFilter(change_examples))
    assert is_stripped(changed)


def send_hello(hospital: Hospital, spoil: Callable[[Shareable], Shareable] = lambda reply: reply) -> Shareable:
    """Return what leaves when the server asks a site to introduce itself."""
    reply = spoil(SparseExecutor("fedavg", "toy", {}).execute(HELLO, Shareable(), hospital.fl_ctx, Signal()))
    hospital.fl_ctx.set_prop(FLContextKey.TASK_RESULT, reply, private=True, sticky=False)
    SiteLastGate().handle_event(EventType.AFTER_TASK_RESULT_FILTER, hospital.fl_ctx)
    return reply


def test_hello_tells_the_upload_caps_of_the_policy_and_no_other_term(tmp_path: Path) -> None:
    policy = {"max_upload_bytes": 5000, "max_upload_share": 0.5, "min_examples": 20, "tensors": ["*.weight"]}
    hello = extract(HELLO, send_hello(Hospital(tmp_path / "site", policy=policy)))
    assert hello == local_capabilities(max_upload_bytes=5000, max_upload_share=0.5).to_message()
    assert extract(HELLO, send_hello(Hospital(tmp_path / "open"))) == local_capabilities().to_message()


def test_hello_of_a_site_with_unusable_data_or_policy_tells_its_versions_only(tmp_path: Path) -> None:
    assert (
        extract(HELLO, send_hello(Hospital(tmp_path / "odd", policy={"no_such_term": 1})))
        == local_capabilities().to_message()
    )
    closed = Hospital(tmp_path / "closed")
    closed.session._endpoint = None
    assert extract(HELLO, send_hello(closed)) == local_capabilities().to_message()


def forge_hello(reply: Shareable) -> Shareable:
    reply = wrap(HELLO, {**local_capabilities().to_message(), "rank": 9, "note": "sub-01"})
    reply["stolen"] = "sub-02"
    reply.set_header("note", "sub-03")
    return reply


@pytest.mark.parametrize("spoil", [forge_hello, HOSTILE["a foreign payload"], HOSTILE["no DXO"]])
def test_changes_of_a_job_filter_to_a_hello_never_leave_the_site(
    spoil: Callable[[Shareable], Shareable], tmp_path: Path
) -> None:
    reply = send_hello(Hospital(tmp_path / "site"), spoil)
    assert "sub-0" not in str(reply)
    assert is_stripped(reply) or extract(HELLO, reply) == local_capabilities().to_message()


@pytest.mark.parametrize(
    "content",
    [None, [], {"kind": np.zeros(3)}, {"kind": "APP_DEFINED", "data": np.zeros(3)}, {"kind": [], "data": {"hello": 1}}],
    ids=str,
)
def test_unreadable_hello_is_none(content: Any) -> None:
    reply = wrap(HELLO, {})
    reply["DXO"] = content
    assert extract(HELLO, reply) is None


def build_component(hospital: Hospital, location: str, path: str, **args: Any) -> None:
    """Fire the event of FLARE before it builds a component of a job."""
    config = {"path": path, "args": args}
    hospital.fl_ctx.set_prop(FLContextKey.COMPONENT_CONFIG, config, private=True, sticky=False)
    node = SimpleNamespace(path=lambda: location)
    hospital.fl_ctx.set_prop(FLContextKey.COMPONENT_NODE, node, private=True, sticky=False)
    SitePlanAuthorizer().handle_event(EventType.BEFORE_BUILD_COMPONENT, hospital.fl_ctx)


def test_job_with_its_own_filters_or_executors_is_refused(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "site")
    install_guards(tmp_path / "site")
    build_component(hospital, "executors.#1.executor", "flare_sparse.flare.executor.SparseExecutor")
    build_component(hospital, "components.#1", "flare_sparse.flare.session.SiteSession")
    for where in ("executors.#1.executor", "task_result_filters.#1.filters.#1", "task_data_filters.#1.filters.#1"):
        with pytest.raises(UnsafeComponentError, match="E_POLICY"):
            build_component(hospital, where, "custom.Overwrite")
    recipe = next(path for path in RECIPE_CLASSES if path.startswith("flare_sparse."))
    with pytest.raises(UnsafeComponentError, match="is not a class that a job may name"):
        build_component(hospital, "components.#1.args.task", recipe)
    (tmp_path / "site" / "local" / "flare_sparse_policy.yaml").write_text("foreign_jobs: true\n")
    build_component(hospital, "executors.#1.executor", "custom.Overwrite")
    build_component(hospital, "components.#1", recipe)
    with pytest.raises(UnsafeComponentError, match="is not a class that a job may name"):
        build_component(hospital, "executors.#1.executor", "flare_sparse.flare.site.setup.allow_classes")


def test_job_may_name_only_the_allowed_classes_of_this_package_at_any_depth(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "site")
    install_guards(tmp_path / "site")
    user_task = {"path": "our_hospital.tasks.Dose", "args": {"config": {"width": 3}}}
    build_component(hospital, "components.#2", "flare_sparse.flare.session.UserPart", part=user_task)
    build_component(hospital, "components.#2.args.task", "our_hospital.tasks.Dose", config={"metric": {"name": "AUC"}})
    # FLARE builds the network of a training script, too: as an argument of its task, which is nothing by itself.
    script = {"path": "flare_sparse.tasks.script.ScriptTask", "args": {"model": {"path": "our_hospital.nets.Net"}}}
    build_component(hospital, "components.#2", "flare_sparse.flare.session.UserPart", part=script)
    build_component(hospital, "components.#2.args.task", "flare_sparse.tasks.script.ScriptTask", script="client.py")
    allow = "flare_sparse.flare.site.setup.allow_classes"
    for where, path, args in (
        ("components.#1", allow, {}),
        ("components.#1", "flare_sparse.tasks.script.ScriptTask", {}),
        ("components.#1.args.kit", "flare_sparse.flare.checkpoints.find_checkpoint_folder", {}),
        ("components.#2", "flare_sparse.flare.session.UserPart", {"part": {"args": [{"class_path": allow}]}}),
        ("components.#1", "nvflare.app_common.logging.job_log_streamer.JobLogStreamer", {}),
        ("components.#1", "our_hospital.tasks.Dose", {}),
        ("components.#2.args.task", "nvflare.app_common.np.np_trainer.NPTrainer", {}),
        ("components.#2", "flare_sparse.flare.session.UserPart", {"part": {"path": "nvflare.apis.dxo.DXO"}}),
        ("components.#2", "flare_sparse.flare.session.UserPart", {"part": {"name": "NPModelPersistor"}}),
        ("components.#2", "flare_sparse.flare.session.UserPart", {"part": [{"a": {"name": "FilePSIWriter"}}]}),
        ("executors.#1.executor", "flare_sparse.flare.executor.torch", {}),
    ):
        with pytest.raises(UnsafeComponentError, match="E_POLICY"):
            build_component(hospital, where, path, **args)


def test_log_streamer_that_flare_adds_names_the_restart(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "site")
    install_guards(tmp_path / "site")
    with pytest.raises(UnsafeComponentError, match="started before flare-sparse site setup: restart the site"):
        build_component(hospital, "components.#1", "nvflare.app_common.logging.job_log_streamer.JobLogStreamer")


def test_component_that_cannot_be_checked_is_refused(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "site")
    (tmp_path / "site" / "local" / "privacy.json").write_text("[]")
    with pytest.raises(UnsafeComponentError, match="E_POLICY: AttributeError"):
        build_component(hospital, "components.#1", "flare_sparse.flare.session.SiteSession")


def test_site_without_its_guards_runs_no_job(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "site")
    component = ("executors.#1.executor", "flare_sparse.flare.executor.SparseExecutor")
    with pytest.raises(UnsafeComponentError, match=r"privacy\.json is missing"):
        build_component(hospital, *component)
    install_guards(tmp_path / "site")
    file = tmp_path / "site" / "local" / "privacy.json"
    complete = json.loads(file.read_text())
    file.write_text(json.dumps({**complete, "components": []}))
    with pytest.raises(UnsafeComponentError, match="lack SiteLastGate"):
        build_component(hospital, *component)
    file.write_text(
        json.dumps({**complete, "scopes": [*complete["scopes"], {"name": "other", "task_result_filters": []}]})
    )
    with pytest.raises(UnsafeComponentError, match="'other' lacks SiteResultPolicy"):
        build_component(hospital, *component)


def test_installing_guards_keeps_other_entries_and_is_idempotent(tmp_path: Path) -> None:
    local = tmp_path / "kit" / "local"
    local.mkdir(parents=True)
    own_filter = {"path": "nvflare.app_common.filters.percentile_privacy.PercentilePrivacy", "args": {"percentile": 10}}
    scopes = [{"name": "private", "task_result_filters": [own_filter]}, {"name": "public"}]
    (local / "privacy.json").write_text(json.dumps({"scopes": scopes, "default_scope": "private"}))
    (local / "resources.json").write_text(json.dumps({"format_version": 2, "client": {"retry_timeout": 30}}))
    policy = tmp_path / "policy.yaml"
    policy.write_text("min_examples: 5\n")
    assert install_guards(tmp_path / "kit", policy).min_examples == 5
    once = {file.name: file.read_text() for file in local.iterdir()}
    assert install_guards(tmp_path / "kit").min_examples == 5
    assert {file.name: file.read_text() for file in local.iterdir()} == once
    privacy, resources = (json.loads(once[name]) for name in ("privacy.json", "resources.json"))
    assert privacy["scopes"][0]["task_result_filters"][0] == own_filter
    assert privacy["default_scope"] == "private"
    assert [len(scope["task_result_filters"]) for scope in privacy["scopes"]] == [2, 1]
    assert resources["client"] == {"retry_timeout": 30}
    assert resources["allow_log_streaming"] is False


def attach(hospital: Hospital, folder: Path, numbers: Numbers) -> None:
    hospital.endpoint.site.release = SiteRelease(folder / "release", Rule(10), numbers, "task")
    update_record(folder / "release", lambda known: known or ReleaseRecord(cells={"": SentCell(count=numbers.train)}))


def test_message_states_the_released_numbers_and_metrics_on_the_grid(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "site", policy={"release": "cells", "metrics": "rounded"})
    attach(hospital, tmp_path, Numbers(35, 10, 0))
    _, meta = shareable_to_message(hospital.run_task(), "site-1")
    assert meta["examples"] == 35
    assert meta["metrics"]["test_examples"] == 10
    others = {name: value for name, value in meta["metrics"].items() if name != "test_examples"}
    assert others
    assert all(value == int(value) for value in others.values()), "ten subjects: a grid of 1"
