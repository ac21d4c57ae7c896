"""The budget of a job of FLARE's recipes: its script charges the site's ledger, and nothing leaves without a charge."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ProcessType, ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.private.aux_runner import AuxRunner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flare_sparse.client import make_private
from flare_sparse.core.errors import ConfigError, PolicyRefusal
from flare_sparse.flare.payload import get_refusal_code
from flare_sparse.flare.recipe_budget import RecipeBudget
from flare_sparse.flare.site.guards import SiteLastGate
from flare_sparse.privacy.dp.scripts import PRIVACY_VARIABLE

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")


class RecipeSite:
    """A site whose policy has a budget, while it runs a job of one of FLARE's recipes."""

    def __init__(self, kit: Path, job: str):
        (kit / "local").mkdir(parents=True, exist_ok=True)
        (kit / "local" / "flare_sparse_policy.yaml").write_text("epsilon: 2.0\nforeign_jobs: true\n")
        self.kit, self.run_folder = kit, kit / job
        workspace = SimpleNamespace(
            get_root_dir=lambda: str(kit),
            get_site_config_dir=lambda: str(kit / "local"),
            get_run_dir=lambda job: str(kit / job),
            get_app_config_dir=lambda job: str(kit / job),
        )
        engine = SimpleNamespace(
            get_workspace=lambda: workspace,
            handlers=[],
            add_handler=lambda handler: None,
            aux_runner=AuxRunner(None),
            fire_event=lambda *event: None,
        )
        self.fl_ctx: FLContext = FLContextManager(engine=engine, identity_name="site-1", job_id=job).new_context()
        self.fl_ctx.set_prop(FLContextKey.PROCESS_TYPE, ProcessType.CLIENT_JOB, private=True, sticky=False)
        self.gate, self.filter = SiteLastGate(), RecipeBudget("study", trainings=20, noise_multiplier=2.0)
        for event in (EventType.ABOUT_TO_START_RUN, EventType.START_RUN):
            for handler in (self.gate, self.filter):
                handler.handle_event(event, self.fl_ctx)
        self.net = nn.Linear(3, 1)
        loader = DataLoader(TensorDataset(torch.ones(40, 3), torch.ones(40, 1)), batch_size=8)
        self.loop = make_private(self.net, torch.optim.SGD(self.net.parameters(), lr=0.1), loader)

    def train(self) -> None:
        """Take an epoch, as a script does."""
        _, optimizer, loader = self.loop
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(self.net(inputs), targets).backward()
            optimizer.step()

    def send(self, result: Shareable, *, filtered: bool = True) -> Shareable:
        """Return what leaves behind the job's filter and the site's gate."""
        result = self.filter.process(result, self.fl_ctx) if filtered else result
        self.fl_ctx.set_prop(FLContextKey.TASK_RESULT, result, private=True, sticky=False)
        self.gate.handle_event(EventType.AFTER_TASK_RESULT_FILTER, self.fl_ctx)
        return result

    def send_weights(self, *, filtered: bool = True) -> Shareable:
        weights = {name: value.numpy() for name, value in self.net.state_dict().items()}
        return self.send(DXO(DataKind.WEIGHTS, data=weights).to_shareable(), filtered=filtered)


@pytest.fixture(autouse=True)
def keep_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRIVACY_VARIABLE, "")


@pytest.mark.slow
def test_update_leaves_once_for_a_charge_and_metrics_leave_without(tmp_path: Path) -> None:
    site = RecipeSite(tmp_path, "job")
    site.train()
    assert "DXO" in site.send_weights()
    metrics = DXO(DataKind.METRICS, data={"accuracy": 0.5}).to_shareable()
    for result in (metrics, make_reply(ReturnCode.OK), make_reply(ReturnCode.EXECUTION_EXCEPTION)):
        assert site.send(result) is result
    assert "DXO" in metrics
    with pytest.raises(PolicyRefusal, match="nothing was charged"):
        site.send_weights()
    # A job without the filter: the site's gate refuses by itself.
    for result in (site.send_weights(filtered=False), site.send(Shareable({"stolen": "sub-01"}), filtered=False)):
        assert get_refusal_code(result) == "E_POLICY"
        assert not {"DXO", "stolen"} & set(result)


def test_budget_is_named_to_the_script_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    site = RecipeSite(tmp_path, "job")
    assert os.environ[PRIVACY_VARIABLE] == str(site.run_folder / "privacy" / "budget.json")
    with pytest.raises(ConfigError, match="privacy: set either epsilon"):
        RecipeBudget("study", trainings=2)
    with pytest.raises(ConfigError, match=r"privacy\.delta: "):
        RecipeBudget("study", trainings=2, epsilon=1.0, delta=2.0)
