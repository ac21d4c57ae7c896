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
from flare_sparse.core.exchange import Patch
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import compute_digest
from flare_sparse.methods.method import TRAIN, Method
from flare_sparse.methods.registry import METHODS
from flare_sparse.methods.scores.snip import compute_saliency
from flare_sparse.methods.support.lora import LoRAMethod
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.rounds.local.run import LocalSites, Transport, run_locally
from flare_sparse.tasks.models.adapters import AdapterConfig, add_adapters
from flare_sparse.training.config import Hardware
from flare_sparse.wire.formats import ValueType

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


MESSAGES = {
    "fedavg": ({}, False),
    "neurosfl": ({"sparsity": 0.5}, False),
    "topk_ef": ({"fraction": 0.2}, True),
    "dssgd": ({"rate": 0.3}, True),
}
"""Settings of a method, and whether a site chooses the entries that it sends."""


@pytest.mark.parametrize("values", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", MESSAGES)
def test_what_a_message_sends_is_copied_to_the_host_and_nothing_else(
    name: str, values: ValueType, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, chooses = MESSAGES[name]
    bench, found = ToyBench(Plain(), hardware=Hardware(open_other_device())), []

    def answer(self: Any, name: str, endpoint: SiteEndpoint, message: Any, counted: Any) -> tuple[Any, Any, Any]:
        request = endpoint.receive(message, counted)
        with HostCopies() as copies:
            update = endpoint.answer(request)
            encoded = endpoint.encode(request, update)
        if request.kind == TRAIN and request.round > 1:
            found.append((copies.sizes, update.patch.mask.count, encoded.values_bytes))
        return update, encoded.data, []

    monkeypatch.setattr(LocalSites, "_answer", answer)
    method = bench.method(name, evaluate_every=9, training={"batch_size": 4, "clip_norm": 1.0}, **settings)
    run_locally(method, bench.weights, bench.sites(), bench.task.metric, transport=Transport(values))
    assert len(found) == 6
    for sizes, count, values_bytes in found:
        # Of rounded blocks the bytes, which are those of the section; of the selected entries their places.
        assert sizes == [count] * chooses + [values_bytes if values == "int8" else count]


def test_scores_stay_where_they_were_computed_until_their_message_copies_those_that_it_sends() -> None:
    bench = ToyBench(Plain(), hardware=Hardware(open_other_device()))
    site, scored = bench.site(1), Mask.from_preset(bench.layout, "conv_linear_weights")
    with HostCopies() as copies:
        scores = compute_saliency(site.trainer.compute_gradients(bench.weights, 4, None, 1), bench.weights)
        Patch.from_vector(scores, scored).copy_to_host()
    assert copies.sizes == [scored.count]


@pytest.mark.parametrize("name", ["neurosfl", "topk_ef", "dispfl"])
@pytest.mark.parametrize("values", ["bfloat16", "int4"])
def test_rounded_messages_have_the_bits_of_the_cpu(name: str, values: ValueType) -> None:
    digests = []
    for hardware in (Hardware(), Hardware(open_other_device())):
        bench = ToyBench(Plain(), hardware=hardware)
        method, transport = bench.method(name), Transport(values)
        outcome, _ = run_locally(method, bench.weights, bench.sites(), bench.task.metric, transport=transport)
        digests.append(compute_digest(outcome.weights))
    assert digests[0] == digests[1]
