"""Per-FedAvg, FedAvg + one step and MetaSNIP (docs/algorithms.md, section 6.10), against direct computations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.utils.data import TensorDataset
from toy import Toy

from flare_sparse.config.assemble import build_initial_model
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import compute_digest
from flare_sparse.methods.registry import METHODS
from flare_sparse.rounds.local.run import run_locally
from flare_sparse.tasks.models import build_model
from flare_sparse.tasks.task import Examples
from flare_sparse.training import LocalTask, Site, build_site

SGD = {"optimizer": "sgd", "lr": 0.2, "batch_size": 1000}


class Quadratic(Toy):
    """``mean_k (a_k . w - b_k)^2 / 2``, so the Hessian is ``mean_k a_k a_k^T``."""

    def model(self) -> nn.Module:
        return nn.Linear(3, 1, bias=False)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return 0.5 * (model(batch[0]) - batch[1]).square().mean()


class Picture(Quadratic):
    def model(self) -> nn.Module:
        return build_model("image_cnn", image=(1, 8, 8), outputs=1, channels=(4, 6))


def build_quadratic_site() -> tuple[Site, torch.Tensor, torch.Tensor, torch.Tensor]:
    task = Quadratic()
    layout, weights = build_initial_model(task, 1)
    a, b = torch.randn(12, 3), torch.randn(12, 1)
    return (
        build_site(LocalTask.open("site-1", task, Examples(TensorDataset(a, b), TensorDataset(a, b)), layout, 1)),
        weights,
        a,
        b,
    )


def build_image_site() -> tuple[Site, torch.Tensor]:
    task = Picture()
    layout, weights = build_initial_model(task, 1)
    x = torch.randn(12, 1, 8, 8)
    data = TensorDataset(x, x.mean((1, 2, 3)).unsqueeze(1))
    site = build_site(LocalTask.open("site-1", task, Examples(data, data), layout, 1))
    site.weights = weights.clone()
    return site, weights


def build_method(name: str, site: Site, **settings: Any) -> Any:
    return METHODS[name](METHODS[name].Config.model_validate({"training": SGD, **settings}), site.layout, 1)


def test_meta_gradient_on_a_quadratic_is_exact() -> None:
    """Grad f(w) = H w - c."""
    site, w, a, b = build_quadratic_site()
    hessian, c = a.T @ a / 12, (a.T @ b / 12).squeeze()
    expected = hessian @ (w - 0.1 * (hessian @ w - c)) - c
    gradient = build_method("per_fedavg", site, adapt_lr=0.1).compute_meta_gradient(site, w, 0)
    assert torch.allclose(gradient, expected, atol=1e-5)


def test_per_fedavg_improves_the_adapted_model() -> None:
    site, w, _, _ = build_quadratic_site()
    federated = build_method("per_fedavg", site, rounds=5, local_steps=2, adapt_lr=0.1)
    outcome, _ = run_locally(federated, w, {"site-1": site}, site.trainer.task.metric)
    site.weights = w.clone()
    started = site.evaluate(federated.adapt(site, Mask.full(3)))["mse"]
    assert outcome.evaluation.sites["site-1"]["mse"] < started
    assert outcome.evaluation.sites["site-1"]["mse"] < outcome.evaluation.sites["site-1"]["mse_before"]


def test_per_fedavg_clips_its_inner_step_and_the_adaptation() -> None:
    site, w, _, _ = build_quadratic_site()
    clipped = build_method("per_fedavg", site, adapt_lr=0.1, training={**SGD, "clip_norm": 0.01})
    site.weights = w
    assert float((clipped.adapt(site, Mask.full(3)) - w).norm()) == pytest.approx(0.1 * 0.01, rel=1e-4)
    assert float(clipped.compute_meta_gradient(site, w, 0).norm()) == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimizer", "adamw"),
        ("accumulate", 4),
        ("momentum", 0.9),
        ("weight_decay", 0.1),
        ("proximal", 1.0),
    ],
)
def test_per_fedavg_refuses_settings_of_training_that_its_steps_do_not_read(name: str, value: Any) -> None:
    config = METHODS["per_fedavg"].Config
    with pytest.raises(ValidationError, match=f"training.{name} {value} has no effect on a meta-step"):
        config.model_validate({"training": {name: value}})
    assert config.model_validate({"training": SGD}).training.optimizer == "sgd"


def test_per_fedavg_uses_new_batches_in_every_step() -> None:
    site, w, _, _ = build_quadratic_site()
    small = build_method("per_fedavg", site, training={**SGD, "batch_size": 2})
    assert len({compute_digest(small.compute_meta_gradient(site, w, stream)) for stream in (0, 3, 6)}) == 3
    assert compute_digest(small.compute_meta_gradient(site, w, 3)) == compute_digest(
        small.compute_meta_gradient(site, w, 3)
    )


def test_per_fedavg_updates_running_statistics_and_no_other_entry_twice(bench: Any) -> None:
    """Without them, an evaluation would normalise by the initial mean 0 and variance 1."""
    method, site = bench.method("per_fedavg", local_steps=50, training={**SGD, "lr": 1e-6}), bench.site(1)
    site.weights = bench.weights
    request = method.ask(method.init(bench.weights, ["site-1"]), ["site-1"])["site-1"].request
    after = bench.layout.unflatten(method.answer(request, site).patch.to_vector())
    x = site.trainer.examples.train.tensors[0]
    before = bench.layout.unflatten(bench.weights)
    hidden = torch.nn.functional.linear(x, before["0.weight"], before["0.bias"])
    torch.testing.assert_close(after["1.running_mean"], hidden.mean(0), rtol=0.02, atol=0.01)
    torch.testing.assert_close(after["1.running_var"], hidden.var(0), rtol=0.02, atol=0.01)
    torch.testing.assert_close(after["0.weight"], before["0.weight"], rtol=1e-3, atol=1e-3)


def test_fedavg_one_step_trains_as_fedavg(bench: Any) -> None:
    plain, _ = bench.run("fedavg")
    stepped, ledger = bench.run("fedavg_one_step", local_steps=None, adapt_lr=0.05)
    assert compute_digest(plain.weights) == compute_digest(stepped.weights)
    assert [line.scalars_sent for line in ledger.lines if line.kind == "adapt" and line.direction == "up"] == [0, 0, 0]


def test_adaptation_step_uses_all_examples() -> None:
    site, w, a, b = build_quadratic_site()
    site.weights = w
    adapted = build_method("fedavg_one_step", site, adapt_lr=0.3).adapt(site, Mask.full(3))
    gradient = (a.T @ (a @ w.unsqueeze(1) - b) / 12).squeeze()
    assert torch.allclose(adapted, w - 0.3 * gradient, atol=1e-6)


def test_metasnip_prunes_the_channels_of_lowest_saliency() -> None:
    """Score of a filter: sum of |w * grad| over filter and bias; 34 % of 6 channels are 2."""
    site, weights = build_image_site()
    snip = build_method("metasnip", site, sparsity=0.34, layers=["1.0.conv"], adapt_lr=0.1)
    gradient, _ = next(site.trainer.compute_gradients(weights, 1000, 1, 0))
    named = {k: (weights * gradient).abs()[v] for k, v in list_indices(site).items()}
    scores = named["1.0.conv.weight"].reshape(6, -1).sum(1) + named["1.0.conv.bias"]
    expected = sorted(scores.argsort()[:2].tolist())
    adapted = site.layout.unflatten(snip.adapt(site, Mask.full(site.layout.size)))
    zero = [c for c in range(6) if not adapted["1.0.conv.weight"][c].any() and adapted["1.0.conv.bias"][c] == 0]
    assert zero == expected
    assert adapted["0.0.conv.weight"].all()
    assert snip.answer(build_adapt_request(snip, site), site).metrics["pruned"] == pytest.approx(2 / 6)


@pytest.mark.parametrize("name", ["metagater", "metasnip", "fedavg_one_step", "per_fedavg"])
def test_epochs_that_have_no_effect_are_refused(name: str, bench: Any) -> None:
    with pytest.raises(ValueError, match=r"training\.epochs 5 has no effect with local_steps 2"):
        bench.method(name, local_steps=2, training={"epochs": 5})


def test_metagater_trains_whole_epochs_without_local_steps(bench: Any) -> None:
    """site-1 has 24 examples: two epochs of minibatches of 8 are six steps."""
    # The result is the model that round 2 sent.
    settings = {"rounds": 2, "training": {**SGD, "batch_size": 8}}
    site = {"site-1": bench.site(1)}
    epochs = {**settings, "training": {**settings["training"], "epochs": 2}, "local_steps": None}
    assert bench.compute_digest("metagater", site, **epochs) == bench.compute_digest(
        "metagater", site, **settings, local_steps=6
    )


def test_metasnip_prunes_nothing_at_sparsity_zero() -> None:
    site, _ = build_image_site()
    full_mask = Mask.full(site.layout.size)
    plain = build_method("metagater", site).adapt(site, full_mask)
    assert torch.equal(build_method("metasnip", site, sparsity=0.0).adapt(site, full_mask), plain)


def test_metasnip_trains_as_metagater_without_gates(bench: Any) -> None:
    assert bench.compute_digest("metasnip") == bench.compute_digest("metagater")


def test_unknown_layer_is_refused() -> None:
    site, _ = build_image_site()
    with pytest.raises(ConfigError, match=r"no convolution '1\.0\.conf'\. Did you mean '1\.0\.conv'\?"):
        build_method("metasnip", site, layers=["1.0.conf"])


def test_method_without_adaptation_raises(bench: Any) -> None:
    with pytest.raises(ConfigError, match="method 'fedavg' does not adapt"):
        bench.method("fedavg").adapt(bench.site(1), Mask.full(bench.layout.size))


def list_indices(site: Site) -> dict[str, torch.Tensor]:
    tensors = zip(site.layout.tensors, site.layout.offsets, strict=False)
    return {entry.name: torch.arange(start, start + entry.size) for entry, start in tensors}


def build_adapt_request(snip: Any, site: Site) -> Any:
    request = snip.ask_final(replace(snip.init(site.weights, ["site-1"]), round=99), ["site-1"])["site-1"].request
    assert request.kind == "adapt"
    return request
