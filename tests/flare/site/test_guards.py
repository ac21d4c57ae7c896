"""The guards in FLARE's own order: a site's filters, a job's filters, the gate. Nothing gets past but what was approved."""

from __future__ import annotations

import json
from collections.abc import Callable
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
from torch import nn
from torch.utils.data import TensorDataset
from toy import Toy

from flare_sparse.assemble import build_initial_model
from flare_sparse.capabilities import local_capabilities
from flare_sparse.encryption import PRECISION, KeyContexts, ServerCipher, SiteCipher
from flare_sparse.endpoints.server import ServerEndpoint
from flare_sparse.endpoints.site import SiteEndpoint
from flare_sparse.exchange import Assignment, Patch, Request, UpdateSpec
from flare_sparse.flare.executor import SparseExecutor
from flare_sparse.flare.filters import EncodeUpdate
from flare_sparse.flare.payload import (
    CODE_HEADER,
    HELLO,
    UPDATE,
    extract_hello,
    hello_to_shareable,
    message_to_shareable,
    update_to_dxo,
)
from flare_sparse.flare.session import SiteSession
from flare_sparse.flare.site.guards import SiteLastGate, SitePlanAuthorizer, SiteResultPolicy
from flare_sparse.flare.site.install import install_guards
from flare_sparse.mask import Mask
from flare_sparse.methods import METHODS
from flare_sparse.task import Examples
from flare_sparse.training import Site
from flare_sparse.wire.ledger import Ledger

RUN = "0" * 16


class Sum(Toy):
    """One layer."""

    def model(self) -> nn.Module:
        return nn.Linear(6, 1)


class Hospital:
    """One site of a federation of one, with the server beside it, from a question to what leaves."""

    def __init__(
        self,
        folder: Path,
        method: str = "fedavg",
        policy: dict[str, Any] | None = None,
        keys: KeyContexts | None = None,
    ):
        (folder / "local").mkdir(parents=True)
        (folder / "run").mkdir()
        if policy:
            (folder / "local" / "flare_sparse_policy.yaml").write_text(yaml.safe_dump(policy))
        task = Sum()
        layout, weights = build_initial_model(task, 1)
        x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
        data = Examples(TensorDataset(x[8:], x[8:, :1]), TensorDataset(x[:8], x[:8, :1]))
        self.method = METHODS[method](METHODS[method].Config(rounds=2), layout, 1)
        self.server = ServerEndpoint(layout, RUN, "float32", Ledger(), ServerCipher(keys.server) if keys else None)
        session = SiteSession()
        cipher = SiteCipher(keys.client) if keys else None
        session._desk = SiteEndpoint(Site("site-1", task, data, layout, 1), self.method, RUN, "float32", cipher=cipher)
        self.endpoint, self.folder, self.layout, self.session = session._desk, folder, layout, session
        state = self.method.init(weights, ["site-1"])
        self.question = self.server.ask(self.method.ask(state, ["site-1"]) or {})
        workspace = SimpleNamespace(
            get_site_config_dir=lambda: str(folder / "local"), get_run_dir=lambda job: str(folder / "run")
        )
        engine = SimpleNamespace(
            get_component=lambda name: session, get_workspace=lambda: workspace, fire_event=lambda *event: None
        )
        self.fl_ctx = FLContextManager(engine=engine, identity_name="site-1", job_id="job").new_context()
        self.fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace, private=True, sticky=False)

    def leaves(self, *job_filters: Filter, site_filters: tuple[Filter, ...] | None = None) -> Shareable:
        """What FLARE would send after the site's filters, the job's, and the gate."""
        request = self.endpoint.receive(self.question.messages["site-1"])
        update = self.endpoint.answer(request)
        vector = torch.zeros(self.layout.size)
        reply = update_to_dxo(update, self.layout, vector).to_shareable()
        reply[UPDATE] = (request, update, vector)
        site_filters = (SiteResultPolicy(),) if site_filters is None else site_filters
        scope = SimpleNamespace(task_result_filters={"out": list(site_filters)})
        self.fl_ctx.set_prop(FLContextKey.SCOPE_OBJECT, scope, private=True, sticky=False)
        mine = {"exchange/out": [EncodeUpdate(), *job_filters]}
        reply = apply_filters("task_result_filters", reply, self.fl_ctx, mine, "exchange", "out")
        self.fl_ctx.set_prop(FLContextKey.TASK_RESULT, reply, private=True, sticky=False)
        SiteLastGate().handle_event(EventType.AFTER_TASK_RESULT_FILTER, self.fl_ctx)
        return reply

    def said(self) -> str:
        file = self.folder / "run" / "site_error.txt"
        return file.read_text() if file.is_file() else ""


class Job(Filter):
    """A filter of a job, which may do anything."""

    def __init__(self, act: Callable[[Shareable], Shareable]):
        super().__init__()
        self._act = act

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        return self._act(shareable)


def blank(reply: Shareable) -> bool:
    """Nothing is left but codes."""
    return set(reply) <= {"__headers__"} and reply.get_return_code() != ReturnCode.OK


def test_an_honest_answer_leaves_as_it_is(tmp_path: Path) -> None:
    guarded, plain = Hospital(tmp_path / "a"), Hospital(tmp_path / "b")
    left, sent = guarded.leaves(), plain.leaves(site_filters=())
    assert left.get_return_code() == ReturnCode.OK
    assert blank(sent)  # the gate without the policy in the scope lets nothing out
    message, meta = from_shareable(left).data["message"], from_shareable(left).meta
    update = guarded.server.decode("site-1", message, meta["examples"], meta["metrics"])
    trained = Hospital(tmp_path / "c")
    request = trained.endpoint.receive(trained.question.messages["site-1"])
    assert torch.equal(update.patch.values, trained.endpoint.answer(request).patch.values)


def seven(reply: Shareable) -> Shareable:
    """All values 777, in a message that is otherwise perfect."""
    dxo = from_shareable(reply)
    hospital = seven.hospital  # type: ignore[attr-defined]
    endpoint = hospital.endpoint
    update = endpoint.answer(endpoint.asked)
    values = torch.full_like(update.patch.values, 777.0)
    forged = type(update)(
        type(update.patch)(values, update.patch.mask), update.content, update.num_examples, update.metrics
    )
    return message_to_shareable(endpoint.encode(endpoint.asked, forged).data, dict(dxo.meta))


def more_beside(reply: Shareable) -> Shareable:
    dxo = from_shareable(reply)
    dxo.data["also"] = np.zeros(3)
    return dxo.update_shareable(Shareable())


def more_in_meta(reply: Shareable) -> Shareable:
    dxo = from_shareable(reply)
    dxo.set_meta_prop("subjects", "sub-01")
    return dxo.update_shareable(reply)


def other_metric(reply: Shareable) -> Shareable:
    dxo = from_shareable(reply)
    dxo.meta["metrics"] = {"mse": 3.1415}
    return dxo.update_shareable(reply)


def more_examples(reply: Shareable) -> Shareable:
    dxo = from_shareable(reply)
    dxo.meta["examples"] = 10**9
    return dxo.update_shareable(reply)


def damaged(reply: Shareable) -> Shareable:
    dxo = from_shareable(reply)
    dxo.data["message"] = dxo.data["message"][:-8].copy()
    return dxo.update_shareable(reply)


def beside(act: Callable[[Shareable], Any]) -> Callable[[Shareable], Shareable]:
    def process(reply: Shareable) -> Shareable:
        act(reply)
        return reply

    return process


BESIDE: dict[str, Callable[[Shareable], Shareable]] = {
    "a key": beside(lambda reply: reply.__setitem__("stolen", np.arange(10**6))),
    "a header": beside(lambda reply: reply.set_header("note", "sub-01")),
    "a cookie": beside(lambda reply: reply.add_cookie("note", "sub-01")),
    "peer properties": beside(lambda reply: reply.set_peer_props({"note": "sub-01"})),
    "a key of the DXO": beside(lambda reply: reply["DXO"].__setitem__("note", "sub-01")),
    "a number that says more": beside(lambda reply: reply["DXO"]["meta"].__setitem__("examples", np.float64(32.0))),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_a_jobs_filter_puts_beside_an_answer_stays_at_the_site(name: str, tmp_path: Path) -> None:
    plain, spoiled = Hospital(tmp_path / "a").leaves(), Hospital(tmp_path / "b").leaves(Job(BESIDE[name]))
    assert spoiled.get_return_code() == ReturnCode.OK
    for reply in (plain, spoiled):
        message = reply["DXO"]["data"].pop("message")
        assert type(message) is np.ndarray
        reply["DXO"]["data"]["message"] = message.tobytes()
    assert spoiled == plain
    assert type(spoiled["DXO"]["meta"]["examples"]) is int


HOSTILE: dict[str, Callable[[Shareable], Shareable]] = {
    "777": seven,
    "a foreign payload": lambda reply: DXO(DataKind.WEIGHTS, data={"w": np.ones(3)}).to_shareable(),
    "no DXO": lambda reply: Shareable({"stolen": "sub-01"}),
    "more beside the message": more_beside,
    "more in the meta": more_in_meta,
    "another metric": other_metric,
    "more examples": more_examples,
    "a damaged message": damaged,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_jobs_filter_makes_of_an_answer_never_leaves(name: str, tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "site")
    seven.hospital = hospital  # type: ignore[attr-defined]
    reply = hospital.leaves(Job(HOSTILE[name]))
    assert blank(reply)
    assert str(reply.get_header(CODE_HEADER)).startswith("E_")
    assert "sub-01" not in str(reply)
    assert hospital.said()


def test_an_encrypted_answer_leaves_and_holds_what_the_site_approved(tmp_path: Path) -> None:
    keys = KeyContexts.generate()
    hospital = Hospital(tmp_path / "site", policy={"clip_norm": 0.001, "encrypted": True}, keys=keys)
    dxo = from_shareable(hospital.leaves())
    update = hospital.server.decode("site-1", dxo.data["message"], dxo.meta["examples"], dxo.meta["metrics"])
    assert bool(update.patch.values.isnan().all())
    assert update.patch.encrypted is not None
    values = SiteCipher(keys.client).decrypt(update.patch.encrypted, update.patch.mask.count)
    moved = values - update.patch.mask.take(hospital.endpoint.site.weights)
    assert float(moved.norm()) == pytest.approx(0.001, abs=10 * PRECISION)


@pytest.mark.parametrize("name", ["777", "a damaged message", "more examples"])
def test_the_gate_looks_into_an_encrypted_answer(name: str, tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "site", keys=KeyContexts.generate())
    seven.hospital = hospital  # type: ignore[attr-defined]
    assert blank(hospital.leaves(Job(HOSTILE[name])))
    assert hospital.said()


@pytest.mark.parametrize(
    ("policy", "weights", "said"),
    [
        ({"max_norm": 1e-6}, None, "max_norm"),
        ({}, float("nan"), "finite: a value is NaN or infinite"),
        ({}, 1e6, "E_RANGE"),
    ],
)
def test_what_nobody_can_check_later_is_checked_before_it_is_encrypted(
    policy: dict[str, Any], weights: float | None, said: str, tmp_path: Path
) -> None:
    hospital = Hospital(tmp_path / "site", policy=policy, keys=KeyContexts.generate())
    if weights is not None:
        hospital.endpoint.site.train = lambda start, *given, **more: torch.full_like(start, weights)  # type: ignore[method-assign]
    reply = hospital.leaves()
    assert blank(reply)
    assert reply.get_header(CODE_HEADER) == ("E_RANGE" if said == "E_RANGE" else "E_POLICY")
    assert said in hospital.said()


def test_a_site_may_insist_on_encryption(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "site", policy={"encrypted": True})
    assert blank(hospital.leaves())
    assert "encrypted: weights in the clear" in hospital.said()


def test_an_error_reply_carries_codes_and_nothing_else(tmp_path: Path) -> None:
    def smuggle(reply: Shareable) -> Shareable:
        reply = Shareable({"stolen": "sub-01"})
        reply.set_return_code("sub-02 is ill")
        reply.set_header(CODE_HEADER, "sub-03")
        reply.set_header("note", "sub-04")
        return reply

    reply = Hospital(tmp_path / "site").leaves(Job(smuggle))
    assert blank(reply)
    assert reply.get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR
    assert "sub-0" not in str(reply)


@pytest.mark.parametrize(
    ("method", "policy", "said"),
    [
        ("neurosfl", {"contents": ["weights", "metrics"]}, "contents: scores may not leave"),
        ("neurosfl", {"min_score_examples": 64}, "min_score_examples: scores of 8, wanted are 64"),
        ("neurosfl", {"min_score_batches": 2}, "min_score_batches: scores of 1, wanted are 2"),
        ("fedavg", {"min_examples": 33}, "min_examples: weights of 32, wanted are 33"),
        ("fedavg", {"max_upload_bytes": 130}, "max_upload_bytes"),
        ("fedavg", {"max_upload_share": 0.3}, "max_upload_share"),
        ("fedavg", {"max_norm": 1e-6}, "max_norm"),
        ("fedavg", {"tensors": ["*.bias"]}, "tensors"),
        ("fedavg", {"methods": ["neurosfl"]}, "methods: fedavg may not run here"),
        ("fedavg", {"no_such_term": 1}, "no_such_term"),
    ],
)
def test_what_the_policy_forbids_goes_out_as_a_code_and_is_explained_at_the_site(
    method: str, policy: dict[str, Any], said: str, tmp_path: Path
) -> None:
    hospital = Hospital(tmp_path / "site", method, policy)
    reply = hospital.leaves()
    assert blank(reply)
    assert reply.get_header(CODE_HEADER) in ("E_POLICY", "E_CONFIG")
    assert said in hospital.said()


@pytest.mark.parametrize(("batches", "size", "leaves"), [(1, 1, False), (3, 8, False), (4, 8, True), (None, 8, True)])
def test_scores_leave_when_enough_examples_stand_behind_them_however_many_the_site_has(
    batches: int | None, size: int, leaves: bool, tmp_path: Path
) -> None:
    hospital = Hospital(tmp_path / "site", "neurosfl", {"min_score_examples": 30, "min_score_batches": 4})
    assert hospital.endpoint.site.num_examples == 32
    config = {"rounds": 2, "saliency_batches": batches, "training": {"batch_size": size}}
    hospital.method.config = hospital.method.Config(**config)
    assert blank(hospital.leaves()) is not leaves


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_metrics_of_few_test_examples_stay_at_the_site_and_the_answer_leaves(kind: str, tmp_path: Path) -> None:
    for least, leave in ((8, True), (9, False)):
        hospital = Hospital(tmp_path / str(least), policy={"min_test_examples": least})
        if kind == "evaluate":
            model = Patch.from_vector(torch.zeros(hospital.layout.size), Mask.full(hospital.layout.size))
            hospital.question = hospital.server.ask(
                {"site-1": Assignment(Request("evaluate", 0, model, model.mask), UpdateSpec("metrics"))}
            )
        reply = hospital.leaves()
        assert reply.get_return_code() == ReturnCode.OK
        assert bool(from_shareable(reply).meta["metrics"]) is leave


def test_a_change_is_clipped_before_it_leaves(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "site", policy={"clip_norm": 0.001, "max_norm": 0.0011})
    dxo = from_shareable(hospital.leaves())
    update = hospital.server.decode("site-1", dxo.data["message"], dxo.meta["examples"], dxo.meta["metrics"])
    moved = update.patch.values - update.patch.mask.take(hospital.endpoint.site.weights)
    assert float(moved.norm()) == pytest.approx(0.001, rel=1e-3)


def test_the_result_of_another_package_leaves_only_where_the_site_says_so(tmp_path: Path) -> None:
    foreign = Job(HOSTILE["a foreign payload"])
    assert blank(Hospital(tmp_path / "closed").leaves(foreign))
    open_ = Hospital(tmp_path / "open", policy={"foreign_jobs": True}).leaves(foreign)
    assert from_shareable(open_).data_kind == DataKind.WEIGHTS


def hello(hospital: Hospital, spoil: Callable[[Shareable], Shareable] = lambda reply: reply) -> Shareable:
    """What leaves when the server asks a site what it can take part in."""
    reply = spoil(SparseExecutor().execute(HELLO, Shareable(), hospital.fl_ctx, Signal()))
    hospital.fl_ctx.set_prop(FLContextKey.TASK_RESULT, reply, private=True, sticky=False)
    SiteLastGate().handle_event(EventType.AFTER_TASK_RESULT_FILTER, hospital.fl_ctx)
    return reply


def test_the_hello_tells_the_caps_of_the_policy_and_nothing_else_of_it(tmp_path: Path) -> None:
    policy = {"max_upload_bytes": 5000, "max_upload_share": 0.5, "min_examples": 20, "tensors": ["*.weight"]}
    said = extract_hello(hello(Hospital(tmp_path / "site", policy=policy)))
    assert said == local_capabilities(max_upload_bytes=5000, max_upload_share=0.5).to_message()
    assert extract_hello(hello(Hospital(tmp_path / "open"))) == local_capabilities().to_message()


def test_a_site_that_cannot_be_opened_or_has_a_malformed_policy_says_its_versions(tmp_path: Path) -> None:
    assert (
        extract_hello(hello(Hospital(tmp_path / "odd", policy={"no_such_term": 1})))
        == local_capabilities().to_message()
    )
    closed = Hospital(tmp_path / "closed")
    closed.session._desk = None
    assert extract_hello(hello(closed)) == local_capabilities().to_message()


def forged(reply: Shareable) -> Shareable:
    reply = hello_to_shareable({**local_capabilities().to_message(), "rank": 9, "note": "sub-01"})
    reply["stolen"] = "sub-02"
    reply.set_header("note", "sub-03")
    return reply


@pytest.mark.parametrize("spoil", [forged, HOSTILE["a foreign payload"], HOSTILE["no DXO"]])
def test_what_a_jobs_filter_makes_of_a_hello_never_leaves(
    spoil: Callable[[Shareable], Shareable], tmp_path: Path
) -> None:
    reply = hello(Hospital(tmp_path / "site"), spoil)
    assert "sub-0" not in str(reply)
    assert blank(reply) or extract_hello(reply) == local_capabilities().to_message()


@pytest.mark.parametrize(
    "content",
    [None, [], {"kind": np.zeros(3)}, {"kind": "APP_DEFINED", "data": np.zeros(3)}, {"kind": [], "data": {"hello": 1}}],
    ids=str,
)
def test_a_hello_that_cannot_be_read_is_none(content: Any) -> None:
    reply = hello_to_shareable({})
    reply["DXO"] = content
    assert extract_hello(reply) is None


def built(hospital: Hospital, where: str, path: str, **args: Any) -> None:
    config = {"path": path, "args": args}
    hospital.fl_ctx.set_prop(FLContextKey.COMPONENT_CONFIG, config, private=True, sticky=False)
    node = SimpleNamespace(path=lambda: where)
    hospital.fl_ctx.set_prop(FLContextKey.COMPONENT_NODE, node, private=True, sticky=False)
    SitePlanAuthorizer().handle_event(EventType.BEFORE_BUILD_COMPONENT, hospital.fl_ctx)


def test_a_job_with_filters_or_executors_of_its_own_is_refused(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "site")
    install_guards(tmp_path / "site")
    built(hospital, "executors.#1.executor", "flare_sparse.flare.executor.SparseExecutor")
    built(hospital, "components.#1", "nvflare.app_common.widgets.intime_model_selector.IntimeModelSelector")
    for where in ("executors.#1.executor", "task_result_filters.#1.filters.#1", "task_data_filters.#1.filters.#1"):
        with pytest.raises(UnsafeComponentError, match="E_POLICY"):
            built(hospital, where, "custom.Overwrite")
    (tmp_path / "site" / "local" / "flare_sparse_policy.yaml").write_text("foreign_jobs: true\n")
    built(hospital, "executors.#1.executor", "custom.Overwrite")
    with pytest.raises(UnsafeComponentError, match="no class that a job may name"):
        built(hospital, "executors.#1.executor", "flare_sparse.flare.site.allow_list.allow")


def test_a_job_names_no_more_of_this_package_than_its_classes_wherever_it_does(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "site")
    install_guards(tmp_path / "site")
    user_task = {"path": "our_hospital.tasks.Dose", "args": {"config": {"width": 3}}}
    built(hospital, "components.#2", "flare_sparse.flare.session.UserTask", task=user_task)
    built(hospital, "components.#2.args.task", "our_hospital.tasks.Dose", config={"width": 3})
    allow = "flare_sparse.flare.site.allow_list.allow"
    for where, path, args in (
        ("components.#1", allow, {}),
        ("components.#1.args.kit", "flare_sparse.flare.checkpoints.checkpoint_folder", {}),
        ("components.#1", "nvflare.app_common.np.np_trainer.NPTrainer", {"later": [{"class_path": allow}]}),
        ("executors.#1.executor", "flare_sparse.flare.executor.torch", {}),
    ):
        with pytest.raises(UnsafeComponentError, match="E_POLICY"):
            built(hospital, where, path, **args)


def test_what_cannot_be_looked_at_is_refused(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "site")
    (tmp_path / "site" / "local" / "privacy.json").write_text("[]")
    with pytest.raises(UnsafeComponentError, match="E_POLICY: AttributeError"):
        built(hospital, "components.#1", "flare_sparse.flare.session.SiteSession")


def test_a_site_whose_guards_were_taken_away_runs_no_job(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "site")
    ours = ("executors.#1.executor", "flare_sparse.flare.executor.SparseExecutor")
    with pytest.raises(UnsafeComponentError, match=r"privacy\.json is missing"):
        built(hospital, *ours)
    install_guards(tmp_path / "site")
    file = tmp_path / "site" / "local" / "privacy.json"
    whole = json.loads(file.read_text())
    file.write_text(json.dumps({**whole, "components": []}))
    with pytest.raises(UnsafeComponentError, match="lack SiteLastGate"):
        built(hospital, *ours)
    file.write_text(json.dumps({**whole, "scopes": [*whole["scopes"], {"name": "other", "task_result_filters": []}]}))
    with pytest.raises(UnsafeComponentError, match="'other' lacks SiteResultPolicy"):
        built(hospital, *ours)


def test_what_stands_in_a_kit_stays_and_twice_is_as_once(tmp_path: Path) -> None:
    local = tmp_path / "kit" / "local"
    local.mkdir(parents=True)
    theirs = {"path": "nvflare.app_common.filters.percentile_privacy.PercentilePrivacy", "args": {"percentile": 10}}
    scopes = [{"name": "private", "task_result_filters": [theirs]}, {"name": "public"}]
    (local / "privacy.json").write_text(json.dumps({"scopes": scopes, "default_scope": "private"}))
    (local / "resources.json").write_text(json.dumps({"format_version": 2, "client": {"retry_timeout": 30}}))
    policy = tmp_path / "policy.yaml"
    policy.write_text("min_examples: 5\n")
    assert install_guards(tmp_path / "kit", policy).min_examples == 5
    once = {file.name: file.read_text() for file in local.iterdir()}
    assert install_guards(tmp_path / "kit").min_examples == 5
    assert {file.name: file.read_text() for file in local.iterdir()} == once
    privacy, resources = (json.loads(once[name]) for name in ("privacy.json", "resources.json"))
    assert privacy["scopes"][0]["task_result_filters"][0] == theirs
    assert privacy["default_scope"] == "private"
    assert [len(scope["task_result_filters"]) for scope in privacy["scopes"]] == [2, 1]
    assert resources["client"] == {"retry_timeout": 30}
    assert resources["allow_log_streaming"] is False
