"""Sites that compute on a device of their own end with the bits of the CPU, whose kernels that device has.

``test_other_device.py`` runs these tests in a process of their own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from other_device import open_other_device
from small_data import CONFIGS, list_overrides
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy import Plain, ToyBench

from flare_sparse.config.assemble import open_site
from flare_sparse.config.study import Study
from flare_sparse.core.mask import Mask
from flare_sparse.methods.method import Method
from flare_sparse.methods.registry import METHODS
from flare_sparse.methods.scores.snip import compute_saliency
from flare_sparse.methods.support.lora import LoRAMethod
from flare_sparse.rounds.local.run import run_locally
from flare_sparse.tasks.models.adapters import AdapterConfig, add_adapters
from flare_sparse.training.config import Hardware, TrainingConfig

# Kernels of the CPU write into outputs that torch has allocated on the other device, of any shape.
pytestmark = pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")


class HostCopies(TorchDispatchMode):
    """Records the size of every tensor that is copied to the CPU; scalars, such as the loss, are read otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        copies = {
            torch.ops.aten._to_copy.default: (args[:1], result),
            torch.ops.aten.copy_.default: (args[1:2], result),
        }
        (source,), target = copies.get(func, ((None,), None))
        if target is not None and source.device != target.device == torch.device("cpu"):
            self.sizes.append(target.numel())
        return result


class Convolved(Plain):
    """The same task by a convolution. The fallback of torch loses the running statistics of batch normalisation."""

    def model(self) -> nn.Module:
        body = nn.Sequential(nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten())
        return nn.Sequential(nn.Unflatten(1, (1, 3, 4)), body, nn.Linear(24, 1))


class AdaptedPlain(Plain):
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 1))
        return add_adapters(network, AdapterConfig(rank=4, head="trained"))


def compute_digests(name: str, **options: Any) -> list[str]:
    """Return the digest of a method's final model, of sites on the CPU and on the other device."""
    task = AdaptedPlain() if issubclass(METHODS.get(name, Method), LoRAMethod) else Plain()
    hardware = [Hardware(), Hardware(open_other_device())]
    settings = options.pop("settings", {})
    return [ToyBench(task, hardware=own, **options).compute_digest(name, **settings) for own in hardware]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_ends_with_the_bits_of_the_cpu(name: str) -> None:
    own, other = compute_digests(name)
    assert own == other


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "novograd"])
def test_optimizers_with_accumulation_and_clipping_do(optimizer: str) -> None:
    training = {"optimizer": optimizer, "accumulate": 2, "clip_norm": 1.0, "proximal": 0.1, "batch_size": 4}
    own, other = compute_digests("neurosfl", settings={"sparsity": 0.5, "training": training})
    assert own == other


def test_tensors_that_stay_at_the_site_and_validation_do() -> None:
    own, other = compute_digests("fedavg", personal=("0.*",), validation=4)
    assert own == other


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", ["fedavg", "scbf"])
def test_convolutions_end_within_their_rounding(name: str, channels_last: bool) -> None:
    own, other = (
        ToyBench(Convolved(), hardware=hardware).run(name)[0].weights
        for hardware in (Hardware(), Hardware(open_other_device(), channels_last))
    )
    torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["neurosfl_bundle", "metagater_cifar10", "lora_a2_brain_age"])
def test_no_tensor_of_a_configuration_stays_behind(name: str, tmp_path: Path) -> None:
    file = CONFIGS / f"{name}.yaml"
    study = Study.load(file, overrides=list_overrides(file, tmp_path, 1))
    sites = {
        site: open_site(study.assembly, replace(data, device=str(open_other_device())))
        for site, data in study.prepare_sites(tmp_path).items()
    }
    outcome, _ = run_locally(study.assembly.method, study.assembly.weights, sites, study.assembly.task.metric)
    # Every site that was asked answered; not every method asks all of them.
    assert [record.rejected for record in outcome.rounds] == [{}] * len(outcome.rounds)
    assert set() < outcome.evaluation.sites.keys() <= sites.keys()


def test_one_copy_of_the_live_values_reaches_the_host_for_a_message() -> None:
    bench = ToyBench(Plain(), hardware=Hardware(open_other_device()))
    site, config = bench.site(1), TrainingConfig(batch_size=4, epochs=2, clip_norm=1.0)
    mask = Mask(torch.rand(bench.layout.size, generator=torch.Generator().manual_seed(1)) < 0.3)
    with HostCopies() as trained:
        site.train_entries(bench.weights, mask, config, 1)
    with HostCopies() as scored:
        compute_saliency(site, bench.weights, batch_size=4, batches=None, t=1)
    assert (trained.sizes, scored.sizes) == ([mask.count], [bench.layout.size])
