"""Helpers of a training script: the optimiser stays inside the mask, and scores are exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nvflare.client as flare
import pytest
import torch
from torch import nn
from toy import Embedded, Plain, Toy, ToyBench

from flare_sparse import client as sparse
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout
from flare_sparse.core.seeds import make_generator
from flare_sparse.methods.scores.snip import compute_saliency
from flare_sparse.tasks.data.source import DATA_VARIABLE
from flare_sparse.tasks.task import Task
from flare_sparse.training import Site, TrainingConfig
from flare_sparse.training.local_task import iterate_pass
from flare_sparse.training.script_exchange import TRAINABLE, ScriptReply
from flare_sparse.training.script_trainer import ScriptTrainer


def receive(net: nn.Module, **meta: Any) -> flare.FLModel:
    params = {name: value.clone() for name, value in net.state_dict().items()}
    return flare.FLModel(params=params, meta=meta)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randn(16, 12, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_entries_that_are_off_do_not_move_while_the_block_trains(name: str) -> None:
    net = Plain().model()
    optimizer = OPTIMIZERS[name](net.parameters())
    # Moments of an earlier round, when all entries trained, must not move them either.
    train(net, optimizer)
    live = {key: torch.rand(value.shape) < 0.5 for key, value in net.named_parameters()}
    received = receive(net, **{TRAINABLE: live})
    with sparse.masked(net, optimizer, received):
        train(net, optimizer)
        assert all(bool((p.grad[~live[key]] == 0).all()) for key, p in net.named_parameters())  # type: ignore[index]
    for key, value in net.state_dict().items():
        assert torch.equal(value[~live[key]], received.params[key][~live[key]])
        assert bool((value[live[key]] != received.params[key][live[key]]).any())
    train(net, optimizer, steps=1)
    assert any(
        bool((value[~live[key]] != received.params[key][~live[key]]).any()) for key, value in net.named_parameters()
    )


def test_sparse_gradient_of_an_embedding_trains_in_the_block() -> None:
    net = Embedded(nn.Embedding, sparse=True).model()
    live = {key: torch.rand(value.shape) < 0.5 for key, value in net.named_parameters()}
    received = receive(net, **{TRAINABLE: live})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with sparse.masked(net, optimizer, received):
        train(net, optimizer)
    for key, value in net.state_dict().items():
        assert torch.equal(value[~live[key]], received.params[key][~live[key]])
        assert bool((value[live[key]] != received.params[key][live[key]]).any())


def test_masked_block_trains_as_the_loop_of_a_task_does() -> None:
    """SGD inside the block and the package's own loop end in the same bits."""
    bench = ToyBench(Plain())
    site = bench.sites(1)["site-1"]
    layout, start = site.layout, torch.randn(site.layout.size, generator=torch.Generator().manual_seed(1))
    mask = Mask(torch.rand(layout.size, generator=torch.Generator().manual_seed(2)) < 0.4)
    config = TrainingConfig(optimizer="sgd", lr=0.05, momentum=0.9, weight_decay=0.01, batch_size=8)
    expected = site.train(start, mask, config, 1)
    net = Plain().model()
    net.load_state_dict(layout.unflatten(start))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    with sparse.masked(net, optimizer, receive(net, **{TRAINABLE: layout.unflatten(mask.bits)})):
        for batch in batches_of_round(site, 8):
            optimizer.zero_grad()
            Plain().loss(net, batch).backward()
            optimizer.step()
    assert torch.equal(layout.flatten(dict(net.named_parameters())), expected)


def batches_of_round(site: Any, size: int) -> Iterator[Any]:
    return iterate_pass(site.trainer.examples.train, size, make_generator(1, "order", site.name, 1), joins_last=False)


def test_block_masks_a_wrapped_network_whose_class_overrides_state_dict() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Plain().model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return self.module.state_dict()

    net = Wrapper()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    off = {key: torch.zeros_like(value, dtype=torch.bool) for key, value in net.state_dict().items()}
    received = receive(net, **{TRAINABLE: off})
    with sparse.masked(nn.DataParallel(net), optimizer, received):
        train(net, optimizer)
    assert all(torch.equal(value, received.params[key]) for key, value in net.state_dict().items())


def test_unmasked_block_changes_nothing() -> None:
    nets = [Plain().model() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    with sparse.masked(nets[0], optimizers[0], receive(nets[0])):
        train(nets[0], optimizers[0])
    train(nets[1], optimizers[1])
    assert all(torch.equal(a, b) for a, b in zip(*(net.state_dict().values() for net in nets), strict=True))


class ScoringScript:
    """Answers a score request with ``send_scores`` on the minibatches of a task."""

    def __init__(self, task: Task, batches: list[Any], sent: list[flare.FLModel]):
        self.task, self.batches, self.sent = task, batches, sent

    def run(self, request: Any) -> ScriptReply:
        net = self.task.model()
        net.load_state_dict(dict(request.params))
        assert request.kind == "score"
        sparse.send_scores(net, self.batches, self.task.loss, {"NUM_STEPS_CURRENT_ROUND": 4})
        assert all(torch.equal(value, request.params[name]) for name, value in net.state_dict().items())
        return ScriptReply(self.sent[-1].params, meta=self.sent[-1].meta)


@pytest.mark.parametrize("task", [Toy(), Embedded(nn.Embedding, sparse=True)], ids=["linear", "embedding"])
@pytest.mark.parametrize("count", [1, 3])
def test_scores_of_a_script_are_exactly_those_of_a_task(
    count: int, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[flare.FLModel] = []
    monkeypatch.setattr(flare, "send", sent.append)
    monkeypatch.setattr(flare, "receive", lambda: receive(task.model(), flare_sparse_request="score"))
    task_site = ToyBench(task).sites(1)["site-1"]
    weights = torch.randn(task_site.layout.size, generator=torch.Generator().manual_seed(5)).abs()
    expected = compute_saliency(task_site.trainer.compute_gradients(weights, 8, count, 0), weights)
    order = make_generator(1, "gradients", "site-1", 0)
    batches = list(iterate_pass(task_site.trainer.examples.train, 8, order, joins_last=False))[:count]
    script = ScoringScript(task, batches, sent)
    layout = Layout.from_module(task.model())
    site = Site("site-1", ScriptTrainer("site-1", task, layout, 0, script, range(1), "steps"))
    assert torch.equal(compute_saliency(site.trainer.compute_gradients(weights, 8, count, 0), weights), expected)
    assert site.num_examples == 4


@pytest.mark.parametrize("function", [sparse.send_scores, sparse.compute_scores])
def test_scores_need_a_minibatch(function: Any) -> None:
    with pytest.raises(ConfigError, match="there is no minibatch"):
        function(Plain().model(), [], Plain().loss)


def test_gradients_do_not_leave_in_a_job_that_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[flare.FLModel] = []
    monkeypatch.setattr(flare, "send", sent.append)
    monkeypatch.setattr(flare, "receive", lambda: receive(Plain().model()))
    with pytest.raises(ConfigError, match=r"this job asks for no gradients.*send what compute_scores returns"):
        sparse.send_scores(Plain().model(), [[torch.ones(4, 12), torch.ones(4, 1)]], Plain().loss)
    assert sent == []


@pytest.mark.parametrize("count", [1, 3])
def test_computed_scores_are_exactly_those_of_a_task_and_leave_the_network_as_it_is(count: int) -> None:
    task = Toy()
    site = ToyBench(task).sites(1)["site-1"]
    net = task.model().eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    weights = site.layout.flatten({**dict(net.named_parameters()), **dict(net.named_buffers())})
    expected = compute_saliency(site.trainer.compute_gradients(weights, 8, count, 0), weights)
    order = make_generator(1, "gradients", "site-1", 0)
    batches = list(iterate_pass(site.trainer.examples.train, 8, order, joins_last=False))[:count]
    scores = sparse.compute_scores(net, batches, task.loss)
    assert torch.equal(site.layout.flatten(scores), expected)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not any(module.training for module in net.modules())


def test_scores_are_wanted_only_where_the_method_asks_for_them() -> None:
    net = Plain().model()
    assert sparse.wants_scores(receive(net, flare_sparse_request="score"))
    assert not sparse.wants_scores(receive(net, flare_sparse_request="train"))
    assert not sparse.wants_scores(receive(net))


def test_site_data_is_where_the_site_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert sparse.site_data("site-1").path == tmp_path
