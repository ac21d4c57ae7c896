"""A site of FLARE whose privacy budget is spent abstains: only the code leaves, also after a restart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.utils.task_utils import apply_filters
from toy import Plain, ToyBench

from flare_sparse.core.exchange import Assignment, Patch, Request
from flare_sparse.core.mask import Mask
from flare_sparse.flare.executor import EncodeUpdate, SparseExecutor
from flare_sparse.flare.payload import CODE_HEADER, get_refusal_code, message_to_shareable
from flare_sparse.flare.session import SiteSession, describe_account
from flare_sparse.flare.site.guards import SiteLastGate, SiteResultPolicy
from flare_sparse.privacy.dp.account import LEDGER_FILE, PRIVACY_FOLDER, PrivacyAccount, read_ledger
from flare_sparse.privacy.dp.accounting import SamplingPlan, compute_epsilon
from flare_sparse.privacy.dp.config import PrivacyConfig
from flare_sparse.privacy.dp.mechanism import SiteMechanism
from flare_sparse.rounds.endpoints.server import ServerEndpoint
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.training import SitePrivacy
from flare_sparse.wire.ledger import Ledger

RUN = "0" * 16
PLAN = SamplingPlan.build(24, 64, 1, 3)


class Kit:
    """A startup kit whose policy has a budget for two rounds, and the server of its job."""

    def __init__(self, folder: Path):
        self.folder, self.bench = folder, ToyBench(Plain())
        for name in ("local", "run"):
            (folder / name).mkdir()
        epsilon = compute_epsilon([PLAN.build_charge(4.0, 2)], 1e-5)
        policy = {"epsilon": epsilon, "delta": 1e-5}
        (folder / "local" / "flare_sparse_policy.yaml").write_text(yaml.safe_dump(policy))
        self.server = ServerEndpoint(self.bench.layout, RUN, "float32", Ledger())
        self.start_site()

    def start_site(self) -> None:
        """Start the site's process: its account is what the kit holds."""
        session = SiteSession()
        workspace = SimpleNamespace(
            get_site_config_dir=lambda: str(self.folder / "local"),
            get_run_dir=lambda job: str(self.folder / "run"),
            get_root_dir=lambda: str(self.folder),
        )
        engine = SimpleNamespace(
            get_component=lambda name: session, get_workspace=lambda: workspace, fire_event=lambda *event: None
        )
        self.fl_ctx = FLContextManager(engine=engine, identity_name="site-1", job_id="job").new_context()
        self.fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace, private=True, sticky=False)
        config = PrivacyConfig(noise_multiplier=4.0)
        mechanism = SiteMechanism(config, PLAN, PrivacyAccount(*describe_account(self.fl_ctx)), RUN, "job")
        site = self.bench.site(1, privacy=SitePrivacy(mechanism))
        method = self.bench.method("fedavg", rounds=9, training={"batch_size": 64, "epochs": 1})
        session._endpoint = SiteEndpoint(site, method, RUN, "float32")

    def ask(self, t: int, weights: torch.Tensor) -> Shareable:
        """Return what leaves the site for a request to train."""
        full = Mask.full(self.bench.layout.size)
        request = Request("train", t, Patch.from_vector(weights, full), full)
        message = self.server.encode_requests({"site-1": Assignment(request)}).messages["site-1"]
        shareable = message_to_shareable(message, {})
        reply = SparseExecutor("fedavg", "toy", {}).execute("exchange", shareable, self.fl_ctx, Signal())
        scope = SimpleNamespace(task_result_filters={"out": [SiteResultPolicy()]})
        self.fl_ctx.set_prop(FLContextKey.SCOPE_OBJECT, scope, private=True, sticky=False)
        job_filters = {"exchange/out": [EncodeUpdate()]}
        reply = apply_filters("task_result_filters", reply, self.fl_ctx, job_filters, "exchange", "out")
        self.fl_ctx.set_prop(FLContextKey.TASK_RESULT, reply, private=True, sticky=False)
        SiteLastGate().handle_event(EventType.AFTER_TASK_RESULT_FILTER, self.fl_ctx)
        result: Any = reply
        return result

    def count_charges(self) -> int:
        """Return the number of answers in the site's ledger."""
        return len(read_ledger(self.folder / PRIVACY_FOLDER / "site-1" / LEDGER_FILE).entries)


def test_site_abstains_when_its_budget_over_all_jobs_is_spent(tmp_path: Path) -> None:
    kit = Kit(tmp_path)
    weights = kit.bench.weights
    assert kit.ask(1, weights).get_return_code() == ReturnCode.OK
    assert kit.ask(2, weights + 0.1).get_return_code() == ReturnCode.OK
    for number in (3, 4):
        reply = kit.ask(number, weights + 0.2)
        assert reply.get_return_code() != ReturnCode.OK
        assert get_refusal_code(reply) == reply.get_header(CODE_HEADER) == "E_BUDGET"
        assert "epsilon" not in str(reply)
        assert "over all jobs" in (tmp_path / "run" / "site_error.txt").read_text()
        # The site's process forgets nothing of its ledger.
        kit.start_site()
    assert kit.count_charges() == 2
    # A question that was answered has the same answer, at no charge, although the budget is spent.
    assert kit.ask(2, weights + 0.1).get_return_code() == ReturnCode.OK
    assert kit.count_charges() == 2
