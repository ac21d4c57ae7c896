"""Small tasks on random numbers, and a test bench that runs methods on them; any test may import this module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from flare_sparse.config.assemble import Assembly, build_initial_model
from flare_sparse.config.schema import JobConfig
from flare_sparse.core.exchange import Contribution, Patch, Update
from flare_sparse.core.params import compute_digest
from flare_sparse.core.seeds import seed_torch
from flare_sparse.methods.pooled_statistics import pool_statistics
from flare_sparse.methods.registry import METHODS
from flare_sparse.results.runs.record import RecordWriter
from flare_sparse.rounds.federation.records import Outcome
from flare_sparse.rounds.local.dry_run import DryTrainer, dry_run
from flare_sparse.rounds.local.run import Transport, run_locally
from flare_sparse.tasks.models.adapters import AdapterConfig, add_adapters
from flare_sparse.tasks.task import Examples, Metric, SiteData, Task
from flare_sparse.training import LocalTask, Site, build_site
from flare_sparse.training.config import CPU, Hardware
from flare_sparse.training.personal import Personal, select_personal
from flare_sparse.wire.ledger import Ledger


class Toy(Task):
    """Predict the sum of three of twelve numbers by a network with batch normalization and dropout."""

    metric = Metric("mse", "", "min")

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Dropout(0.2), nn.Linear(10, 1))

    def load(self, data: SiteData, seed: int) -> Examples:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def predict(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch[0]), batch[1]

    def metrics(self, predictions: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        return {"mse": float((predictions - targets).square().mean())}


class Plain(Toy):
    """The same task, by a network without batch normalization and dropout."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 1))


class Lookup(nn.Module):
    """Embeds the rounded numbers of an example ``(n, k)`` and returns their sum ``(n, width)``.

    Args:
        kind: ``nn.Embedding`` or ``nn.EmbeddingBag``.
        width: values of an embedding.
        sparse: whether its gradient is a sparse tensor.
    """

    def __init__(self, kind: Any, width: int, sparse: bool):
        super().__init__()
        self.table = kind(8, width, sparse=sparse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table((2 * x).long().remainder(8))
        return rows.sum(1) if rows.dim() == 3 else rows


class Embedded(Plain):
    """The same task, by an embedding of the rounded numbers.

    Args:
        kind, sparse: those of :class:`Lookup`.
    """

    def __init__(self, kind: Any, sparse: bool):
        super().__init__()
        self.kind, self.sparse = kind, sparse

    def model(self) -> nn.Module:
        return nn.Sequential(Lookup(self.kind, 10, self.sparse), nn.ReLU(), nn.Linear(10, 1))


class Adapted(Toy):
    """The same task, by two adapted layers of equal size over a random frozen base; the head trains."""

    def model(self) -> nn.Module:
        with seed_torch(0):
            body = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Dropout(0.2))
            network = nn.Sequential(body, nn.Linear(12, 1))
        return add_adapters(network, AdapterConfig(rank=4, head="trained"))


class ToyBench:
    """A task with its initial model, from which a test builds sites, methods and runs.

    Attributes:
        task: task of all sites.
        seed: seed of the initial model, the sites and the methods.
        validation: number of validation examples of a site.
        personal: which tensors stay at the sites.
        hardware: what the sites compute on.
        layout, weights: layout and initial model, ``(P,)``, of the other tensors.
        kept: initial values of the tensors that stay, by name.
    """

    def __init__(
        self,
        task: Task | None = None,
        seed: int = 1,
        validation: int = 0,
        personal: Personal = (),
        hardware: Hardware = CPU,
    ):
        self.task, self.seed, self.validation, self.personal = task or Toy(), seed, validation, personal
        self.hardware = hardware
        network, initial = build_initial_model(self.task, seed)
        tensors = network.unflatten(initial)
        self.kept = {name: tensors[name].clone() for name in select_personal(network, personal)}
        self.layout = network.drop(self.kept)
        self.weights = self.layout.flatten(tensors)

    def open_task(self, index: int, examples: int = 24, data: int | None = None) -> LocalTask:
        """Return the task at ``site-{index}``; its examples and 8 test examples are drawn from the seed ``data``."""
        generator = torch.Generator().manual_seed(index if data is None else data)
        x = torch.randn(examples + 8 + self.validation, 12, generator=generator)
        parts = [TensorDataset(part, part[:, :3].sum(1, keepdim=True)) for part in x.tensor_split([8, 8 + examples])]
        split = Examples(parts[1], parts[0], validation=parts[2] if self.validation else None)
        return LocalTask.open(f"site-{index}", self.task, split, self.layout, self.seed, self.hardware)

    def site(self, index: int, examples: int = 24, data: int | None = None, **options: Any) -> Site:
        """Return ``site-{index}``, with the options of ``build_site``."""
        return build_site(self.open_task(index, examples, data), personal=self.kept, **options)

    def sites(self, count: int = 3) -> dict[str, Site]:
        """Return sites by name; the first has 24 training examples, each next one 8 more."""
        return {f"site-{i}": self.site(i, 16 + 8 * i) for i in range(1, count + 1)}

    def method(self, name: str, *, short: bool = False, **settings: Any) -> Any:
        """Return a method of the registry, by default over 3 rounds; ``short``: statistics travel without rests."""
        kind = METHODS[name]
        settings = {"rounds": 3, "personal": self.personal, **settings}
        return pool_statistics(kind(kind.Config.model_validate(settings), self.layout, self.seed), short=short)

    def run(self, name: str, sites: dict[str, Site] | None = None, **settings: Any) -> tuple[Outcome, Ledger]:
        """Return outcome and ledger of a local run."""
        return run_locally(self.method(name, **settings), self.weights, sites or self.sites(), self.task.metric)

    def open_record(self, folder: Path, method: Any, ledger: Ledger, privacy: Any = None) -> RecordWriter:
        """Return the writer of the record of a run of ``method``."""
        settings = {"name": "toy", "method": {"name": method.name}, "task": {"name": "brain_age"}}
        config = JobConfig.model_validate(settings).model_copy(update={"privacy": privacy})
        assembly = Assembly(self.task, method, self.layout, self.weights, "a" * 16, self.layout, {})
        return RecordWriter(folder, config, assembly, ledger)

    def compute_digest(self, name: str, sites: dict[str, Site] | None = None, **settings: Any) -> str:
        """Return the digest of the final model of a local run."""
        return compute_digest(self.run(name, sites, **settings)[0].weights)

    def scores(self, values: torch.Tensor, mask: Any, site: str, examples: int = 1) -> Contribution:
        """Return a contribution of scores at the entries of ``mask``."""
        return Contribution(site, Patch.from_vector(values, mask), "scores", examples)


def contribute(site: str, update: Update) -> Contribution:
    """Return the update of a site as the server counts it, weighted by its number of examples."""
    return Contribution(site, update.patch, update.content, update.num_examples, update.metrics)


def estimate_traffic(method: Any, weights: torch.Tensor, sites: int, values: Any) -> tuple[Outcome, Ledger]:
    """Return the outcome and the ledger of a dry run of sites ``site-1``, ``site-2``, ...; every message is encoded."""
    names = (f"site-{i}" for i in range(1, sites + 1))
    return dry_run(
        method, weights, {name: Site(name, DryTrainer(name, method.layout)) for name in names}, Transport(values)
    )
