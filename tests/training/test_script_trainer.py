"""What a script sends becomes an update; what is off stays off, whatever it sends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from flare_sparse.config.assemble import Assembly
from flare_sparse.core.errors import ConfigError, MetricsError, PolicyRefusal
from flare_sparse.core.mask import Mask
from flare_sparse.core.needs import Need, find_need
from flare_sparse.core.params import Layout
from flare_sparse.methods.registry import METHODS
from flare_sparse.methods.scores.snip import compute_saliency
from flare_sparse.privacy.dp.account import PrivacyAccount, build_entry
from flare_sparse.privacy.dp.accounting import Charge
from flare_sparse.privacy.dp.config import PrivacyConfig
from flare_sparse.privacy.dp.scripts import ScriptBudget
from flare_sparse.rounds.local.run import Course, run_locally
from flare_sparse.tasks.script import ScriptTask
from flare_sparse.training import Site, TrainingConfig
from flare_sparse.training.script_exchange import (
    GRADIENTS,
    NUM_EXAMPLES,
    NUM_STEPS,
    ScriptFailed,
    ScriptReply,
    ScriptRequest,
)
from flare_sparse.training.script_trainer import ScriptTrainer, read_tensors


class Net(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 1)


class FakeScript:
    """Records requests and sends the received tensors plus 1, or what ``change`` makes of the reply."""

    def __init__(self, change: Callable[[ScriptRequest, ScriptReply], ScriptReply] = lambda request, reply: reply):
        self.requests: list[ScriptRequest] = []
        self._change = change

    def run(self, request: ScriptRequest) -> ScriptReply:
        self.requests.append(request)
        if request.kind == "evaluate":
            reply = ScriptReply(metrics={"accuracy": 0.25})
        else:
            trained = {name: value + 1 for name, value in request.params.items()}
            reply = ScriptReply(trained, metrics={"accuracy": 0.5}, meta={NUM_STEPS: 7, NUM_EXAMPLES: 70})
        return self._change(request, reply)


TASK = ScriptTask("client.py", {"model": "tests.Net", "weigh_by": "steps"}, Net())
LAYOUT = Layout.from_module(Net())
START = torch.arange(LAYOUT.size, dtype=torch.float32)


def site(script: FakeScript, weigh_by: Any = "steps") -> Site:
    return Site("site-1", ScriptTrainer("site-1", TASK, LAYOUT, 3, script, range(4), weigh_by=weigh_by))


def replying(**changes: Any) -> FakeScript:
    """Return a script whose training replies have these fields."""
    return FakeScript(lambda request, reply: ScriptReply(**{**vars(reply), **changes}))


def train(own_site: Site, mask: Mask | None = None, start: Tensor = START) -> Tensor:
    return own_site.train(start, mask or Mask.full(LAYOUT.size), TrainingConfig(), 2)


def test_script_receives_the_complete_state_dict_and_flares_round() -> None:
    script = FakeScript()
    train(site(script))
    request = script.requests[0]
    assert list(request.params) == list(Net().state_dict())
    assert torch.equal(LAYOUT.flatten(dict(request.params)), START)
    # FLARE counts rounds from 0.
    assert (request.kind, request.round, request.total_rounds, dict(request.trainable)) == ("train", 1, 4, {})


def test_scores_are_round_0_of_the_script_and_training_follows_it() -> None:
    script = FakeScript()
    own_site = Site("site-1", ScriptTrainer("site-1", TASK, LAYOUT, 3, script, range(1, 5), "steps"))
    compute_saliency(own_site.trainer.compute_gradients(START, 1, 1, 0), START)
    train(own_site)
    assert [(request.kind, request.round, request.total_rounds) for request in script.requests] == [
        ("score", 0, 5),
        ("train", 2, 5),
    ]


def test_entries_that_are_off_keep_their_bits_whatever_the_script_sends() -> None:
    bits = torch.rand(LAYOUT.size, generator=torch.Generator().manual_seed(0)) < 0.5
    script = FakeScript()
    trained = train(site(script), Mask(bits))
    assert torch.equal(trained, torch.where(bits, START + 1, START))
    assert torch.equal(LAYOUT.flatten({k: v.float() for k, v in script.requests[0].trainable.items()}) > 0, bits)


def test_delta_is_added_to_the_received_values() -> None:
    delta = {name: torch.full(value.shape, 0.5) for name, value in Net().named_parameters()}
    trained = train(site(replying(params=delta, is_delta=True)))
    expected = START.clone()
    expected[: LAYOUT.num_parameters] += 0.5
    assert torch.equal(trained, expected)


def test_tensors_that_are_not_sent_keep_their_values_and_numpy_arrays_are_read() -> None:
    trained = LAYOUT.unflatten(train(site(replying(params={"last.bias": torch.tensor([9.0]).numpy()}))))
    before = LAYOUT.unflatten(START)
    assert trained["last.bias"].tolist() == [9.0]
    assert all(torch.equal(trained[name], before[name]) for name in before if name != "last.bias")


def test_names_of_a_distributed_network_are_those_of_the_network() -> None:
    params = nn.DataParallel(Net()).state_dict()
    trained = LAYOUT.unflatten(train(site(replying(params=params))))
    assert all(torch.equal(trained[name], params[f"module.{name}"]) for name in trained)


def test_network_with_a_part_that_is_called_module_keeps_its_names() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 1)

    layout = Layout.from_module(Wrapped())
    task = ScriptTask("client.py", {"model": "tests.Net", "weigh_by": "steps"}, Wrapped())
    own_site = Site("site-1", ScriptTrainer("site-1", task, layout, 3, FakeScript(), range(4), weigh_by="steps"))
    assert own_site.train(torch.zeros(3), Mask.full(3), TrainingConfig(), 1).tolist() == [1.0, 1.0, 1.0]
    assert read_tensors(nn.DataParallel(Wrapped()).state_dict(), Wrapped()).keys() == Wrapped().state_dict().keys()


class Lightning(nn.Module):
    """As a LightningModule names its network."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.model = network


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "parallel": nn.DataParallel,
    "compiled": lambda network: torch.compile(network, backend="eager"),  # type: ignore[dict-item,return-value]
    "averaged": torch.optim.swa_utils.AveragedModel,
    "lightning": Lightning,
}


# torch.compile does not compile a compiled network.
NAMES = [*WRAPPERS, "none"]
PAIRS = [(inner, outer) for inner in NAMES for outer in NAMES if not inner == outer == "compiled"]


@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_names_of_nested_wrappers_are_read_as_those_of_the_network(inner: str, outer: str) -> None:
    """Also where two wrap each other: 24 pairs; the values are those of the network within."""
    network = wrapped = Net()
    for name in (inner, outer):
        wrapped = WRAPPERS[name](wrapped) if name != "none" else wrapped  # type: ignore[assignment]
    found = read_tensors(wrapped.state_dict(), Net())
    assert found.keys() == network.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in network.state_dict().items())


def test_part_of_a_compiled_network_is_read_and_another_network_is_refused_with_the_line_to_write() -> None:
    params = {name.replace("last.", "last._orig_mod."): value for name, value in Net().state_dict().items()}
    assert read_tensors(params, Net()).keys() == Net().state_dict().keys()
    for wrong in ({"_orig_mod.other": torch.zeros(1)}, {"a.last.bias": torch.zeros(1), "b.last.bias": torch.zeros(1)}):
        with pytest.raises(ScriptFailed, match=r"send the state_dict\(\) of the network inside it"):
            read_tensors(wrong, Net())


class Adapted(nn.Module):
    """A frozen bfloat16 base under adapters, as docs/lora.md writes one; its last layer is trained in full."""

    def __init__(self) -> None:
        super().__init__()
        base = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).bfloat16()
        settings = peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"])
        self.model = peft.get_peft_model(base, settings)
        self.model.base_model.model[2].float()


def test_names_that_peft_saves_are_those_of_the_adapters() -> None:
    network = Adapted()
    layout = Layout.from_module(network)
    start = "model.base_model.model"
    assert [spec.name for spec in layout.tensors] == [
        f"{start}.0.lora_A.default.weight",
        f"{start}.0.lora_B.default.weight",
        f"{start}.2.modules_to_save.default.weight",
        f"{start}.2.modules_to_save.default.bias",
    ]
    saved = peft.get_peft_model_state_dict(network.model)
    assert "base_model.model.0.lora_A.weight" in saved
    read, own = read_tensors(saved, network), dict(network.named_parameters())
    assert read.keys() == {spec.name for spec in layout.tensors}
    assert all(torch.equal(read[name], own[name]) for name in read)
    # PeftModel's own names, in a script whose network is not in a class of its own.
    assert read_tensors(network.model.state_dict(), network).keys() == {*own}
    with pytest.raises(ScriptFailed, match=r"'more', which the network Adapted of task\.model does not have"):
        read_tensors({**saved, "more": torch.zeros(1)}, network)
    network.model.add_adapter("site", peft.LoraConfig(r=2, target_modules=["0"]))
    with pytest.raises(ScriptFailed, match=r"lora_A\.weight', which the network Adapted of task\.model does not have"):
        read_tensors(saved, network)


def test_adapters_of_a_script_whose_network_has_none_are_refused_with_the_remedy() -> None:
    adapted = peft.get_peft_model(nn.Sequential(nn.Linear(2, 1)), peft.LoraConfig(r=2, target_modules=["0"]))
    with pytest.raises(ScriptFailed, match=r"call peft\.get_peft_model in its class \(docs/lora\.md\)"):
        read_tensors(adapted.state_dict(), nn.Sequential(nn.Linear(2, 1)))


class Renamed(nn.Module):
    """A wrapper with the names of its inner network, as peft's ``get_peft_model_state_dict`` has others."""

    def __init__(self, copies: bool = False) -> None:
        super().__init__()
        self.inner, self.copies = Net(), copies

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return {f"x.{name}": value.clone() if self.copies else value for name, value in self.inner.state_dict().items()}


def test_network_that_overrides_state_dict_trains_under_the_names_that_it_gives() -> None:
    layout = Layout.from_module(Renamed())
    task = ScriptTask("client.py", {"model": "tests.Renamed"}, Renamed())
    script, bits = FakeScript(), torch.arange(layout.size) % 2 == 0
    own_site = Site("site-1", ScriptTrainer("site-1", task, layout, 3, script, range(4), weigh_by="steps"))
    assert torch.equal(own_site.train(START, Mask(bits), TrainingConfig(), 1), torch.where(bits, START + 1, START))
    assert list(script.requests[0].params) == [f"x.{name}" for name in Net().state_dict()]
    assert torch.equal(script.requests[0].trainable["x.last.weight"], layout.unflatten(bits)["inner.last.weight"])


def test_model_of_a_run_is_loaded_into_a_network_that_overrides_load_state_dict() -> None:
    class Strict(Renamed):
        def load_state_dict(self, tensors: Any, strict: bool = True, assign: bool = False) -> Any:
            return self.inner.load_state_dict({name.removeprefix("x."): value for name, value in tensors.items()})

    layout, task = Layout.from_module(Strict()), ScriptTask("client.py", {"model": "tests.Strict"}, Strict())
    method = METHODS["fedavg"](METHODS["fedavg"].Config(), layout, 1)
    network = Assembly(task, method, layout, START, "0" * 16, layout, {}).build_network(START)
    assert torch.equal(layout.flatten(dict([*network.named_parameters(), *network.named_buffers()])), START)


def test_network_whose_state_dict_hides_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tests.Renamed.state_dict\(\) gives 6 .* such as 'inner.first.weight'"):
        ScriptTask("client.py", {"model": "tests.Renamed", "model_args": {"copies": True}}, Renamed(copies=True))


@pytest.mark.parametrize(
    ("weigh_by", "meta", "expected"),
    [("steps", {NUM_STEPS: 7}, 7), ("steps", {NUM_STEPS: torch.tensor(7)}, 7), ("examples", {NUM_EXAMPLES: 70.0}, 70),
     ("equal", {}, 1)],
)  # fmt: skip
def test_n_k_is_what_the_job_names(weigh_by: str, meta: dict[str, Any], expected: int) -> None:
    own_site = site(replying(meta=meta), weigh_by)
    assert own_site.num_examples == 0
    train(own_site)
    assert own_site.num_examples == expected


def test_n_k_survives_a_restart_in_the_memory_of_the_site() -> None:
    first = site(FakeScript())
    train(first)
    second = site(FakeScript())
    second.receive(first.memory)
    assert second.num_examples == 7


def test_usage_is_what_the_script_reports_for_the_update() -> None:
    own_site = site(FakeScript())
    own_site.trainer.reset_usage()
    train(own_site)
    assert (own_site.trainer.usage.examples, own_site.trainer.usage.batches) == (70, 7)
    own_site.trainer.reset_usage()
    assert (own_site.trainer.usage.examples, own_site.trainer.usage.batches) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"meta": {}}, "the script sent no NUM_STEPS_CURRENT_ROUND"),
        ({"meta": {NUM_STEPS: 2.5}}, "expected a whole number from 0"),
        ({"meta": {NUM_STEPS: "many"}}, "expected a whole number from 0"),
        ({"params": None}, "the script sent no params"),
        ({"params": {"head.bias": torch.zeros(1)}}, "params has 'head.bias', which the network Net"),
        ({"params": {"last.bias": torch.zeros(2)}}, r"params\['last.bias'\] has the shape \(2,\)"),
        # As many entries as the network's 3x2, in another order.
        (
            {"params": {"first.weight": torch.zeros(2, 3)}},
            r"params\['first.weight'\] has the shape \(2, 3\); the network's is \(3, 2\)",
        ),
        ({"params": {"last.bias": "x"}}, r"params\['last.bias'\] is str; expected a tensor or an array"),
        ({"params": {"last.bias": {"value": 1.0}}}, r"params\['last.bias'\] is dict; expected a tensor"),
        ({"params": {"last.bias": None}}, r"params\['last.bias'\] is NoneType; expected a tensor"),
        ({"params": {"module.other": torch.zeros(1)}}, "params has 'module.other', which the network Net"),
        (
            {"params": {"module.last.bias": torch.zeros(1), "last.weight": torch.zeros(1, 3)}},
            "params has 'module.last.bias', which the network Net",
        ),
    ],
)
def test_unusable_replies_are_refused_with_the_reason(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ScriptFailed, match=message):
        train(site(replying(**changes)))


def test_metrics_of_the_received_model_need_no_second_request() -> None:
    script = FakeScript()
    own_site = site(script)
    train(own_site)
    assert own_site.evaluate(START.clone()) == {"accuracy": 0.5}
    assert own_site.evaluate(START + 1) == {"accuracy": 0.25}
    assert [request.kind for request in script.requests] == ["train", "evaluate"]


def test_script_without_metrics_is_not_asked_twice() -> None:
    script = replying(metrics={})
    own_site = site(script)
    train(own_site)
    assert own_site.evaluate(START) == {}
    assert len(script.requests) == 1


def test_metrics_are_finite_numbers_and_the_main_one_may_be_in_the_meta() -> None:
    metrics = {"loss": torch.tensor(2.0), "broken": float("nan"), "text": "x"}
    own_site = site(replying(metrics=metrics, meta={NUM_STEPS: 1, "accuracy": 0.75}))
    train(own_site)
    assert own_site.evaluate(START) == {"loss": 2.0, "accuracy": 0.75}


def test_metrics_without_the_main_one_are_refused_by_name() -> None:
    with pytest.raises(MetricsError, match=r"no finite 'accuracy'.*they are auc"):
        train(site(replying(metrics={"auc": 0.7})))


def test_scores_of_a_script_that_knows_none_are_those_of_one_training() -> None:
    saliency = compute_saliency(site(FakeScript()).trainer.compute_gradients(START, 8, 1, 0), START)
    expected = START.clone()
    # Training moves every entry by 1, so |w * (w_before - w_after)| = |w|; running statistics have no score.
    expected[LAYOUT.num_parameters :] = 0
    assert torch.equal(saliency, expected)


def test_gradients_of_a_script_are_averaged_by_the_sizes_of_their_minibatches() -> None:
    gradients = {
        name: torch.stack([torch.ones(p.shape), -3 * torch.ones(p.shape)]) for name, p in Net().named_parameters()
    }
    script = replying(params=gradients, meta={NUM_STEPS: 1, GRADIENTS: [8, 4]})
    weights = torch.ones(LAYOUT.size)
    saliency = compute_saliency(site(script).trainer.compute_gradients(weights, 8, None, 0), weights)
    assert torch.allclose(saliency[: LAYOUT.num_parameters], torch.tensor((1.0 * 1 + 3.0 * 0.5) / 1.5))


def test_gradients_of_another_shape_are_refused() -> None:
    gradients = {"first.weight": torch.zeros(1, 2, 3)}
    script = replying(params=gradients, meta={NUM_STEPS: 1, GRADIENTS: [8]})
    with pytest.raises(ScriptFailed, match=r"has the shape \(1, 2, 3\); the network's is \(1, 3, 2\)"):
        compute_saliency(site(script).trainer.compute_gradients(START, 8, None, 0), START)


def test_prescribed_training_smaller_networks_and_examples_are_refused() -> None:
    own_site = site(FakeScript())
    with pytest.raises(ConfigError, match="which a training script decides itself"):
        own_site.train(START, Mask.full(LAYOUT.size), TrainingConfig(), 1, steps=3)
    with pytest.raises(ConfigError, match="smaller networks at each site, which ScriptTrainer does not compute"):
        own_site.narrow(Mask(START > 3))
    assert own_site.narrow(Mask.full(LAYOUT.size)) is own_site
    with pytest.raises(PolicyRefusal, match="withhold_isolated"):
        own_site.trainer.collect_inputs(START, torch.nn.Linear, 4)


SERVABLE = sorted(
    name
    for name, method in METHODS.items()
    if not find_need(method.Config().needs(), Need.PACKAGE_STEPS) and not name.endswith("lora")
)


def test_methods_that_ask_for_training_and_evaluation_serve_a_script() -> None:
    expected = ["dssgd", "fedavg", "fedavg_ft", "fedsparsify", "local_only", "neurosfl", "scbf", "topk_ef"]
    assert expected == SERVABLE


@pytest.mark.parametrize("name", SERVABLE)
def test_method_runs_over_scripts(name: str) -> None:
    settings = {"rounds": 2} | ({"sparsity": 0.5} if name == "neurosfl" else {})
    method = METHODS[name](METHODS[name].Config.model_validate(settings), LAYOUT, 1)
    scripts = {f"site-{i}": FakeScript() for i in (1, 2)}
    sites = {
        key: Site(key, ScriptTrainer(key, TASK, LAYOUT, 1, script, range(2), "steps"))
        for key, script in scripts.items()
    }
    outcome, _ = run_locally(method, START.clone(), sites, TASK.metric, course=Course(on_site_error=_raise))
    assert outcome.rounds[-1].evaluation.overall["accuracy"] in (0.25, 0.5)
    kinds = {request.kind for script in scripts.values() for request in script.requests}
    assert kinds == {"train", "evaluate"} | ({"score"} if name == "neurosfl" else set())
    # The record says that the scores are not SNIP's.
    events = [(event.event, event.site) for event in outcome.events if event.site in sites]
    expected = [("scores_by_training", site) for site in sites] if name == "neurosfl" else []
    assert events == expected


def _raise(site: str, error: Exception) -> None:
    raise error


@pytest.mark.slow
def test_training_that_its_engine_has_not_charged_is_refused(tmp_path: Path) -> None:
    config = PrivacyConfig(noise_multiplier=1.0, unit="record")
    budget = ScriptBudget(config, PrivacyAccount(tmp_path), 2, "run", "job")

    def charge(request: ScriptRequest, reply: ScriptReply) -> ScriptReply:
        budget.account.charge(build_entry("run", "job", 0, str(request.round), "", Charge(1.0, 0.1, 5)), None)
        return reply

    def open_site(script: FakeScript) -> Site:
        return Site("a", ScriptTrainer("a", TASK, LAYOUT, 1, script, range(2), "steps", budget))

    with pytest.raises(ScriptFailed, match="sent a trained model and charged nothing"):
        train(open_site(FakeScript()))
    private = open_site(FakeScript(charge))
    assert torch.equal(train(private), START + 1)
    assert private.trainer.mechanism is not None
    assert private.trainer.mechanism.compute_spent() == budget.account.compute_spent("run", 1e-5) > 0
    # Scores of a private training are computed from what it sends.
    scored = Mask.full(LAYOUT.size)
    gradient = private.trainer.compute_private_gradient(START, scored, TrainingConfig(), None)
    assert torch.equal(gradient, START - (START + 1))
