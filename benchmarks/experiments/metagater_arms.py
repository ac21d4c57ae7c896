"""Arms of ``metagater.py``: the lines of its tables, with their sites and networks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LAMBDA = 0.2
LASSO = 2e-5


@dataclass(frozen=True)
class Arm:
    """One row of a table.

    Attributes:
        method: its name.
        settings: settings of the method.
        steps: settings of training to choose among, each with its name in the table.
        gated: whether the network has gates.
    """

    method: str
    settings: dict[str, Any]
    steps: dict[str, dict[str, Any]] = field(default_factory=lambda: {"": {}})
    gated: bool = False


@dataclass(frozen=True)
class Setting:
    """One table: sites, network and arms.

    Attributes:
        task: name of the task.
        task_settings: its settings.
        layers: layers with gates.
        arms: the rows, by label.
        sites: numbers of sites and of their examples.
        validation_sites: number of training sites that choose the steps, drawn by the seed; None: all.
    """

    task: str
    task_settings: dict[str, Any]
    layers: tuple[str, ...]
    arms: dict[str, Arm]
    sites: dict[str, int]
    validation_sites: int | None = None


def build_cifar_arms(batch: int, alphas: tuple[float, ...]) -> dict[str, Arm]:
    """Return the arms on CIFAR-10. MetaGater's step is lambda times its learning rate.

    Args:
        batch: size of the minibatches.
        alphas: inner steps of Per-FedAvg to choose among.
    """
    plain = {"training": {"optimizer": "sgd", "batch_size": batch, "lr": 0.1}}
    proximal = {"training": {**plain["training"], "lr": 0.1 / LAMBDA}, "momentum_cap": 0.9, "lasso": 0}
    # The inner step of Per-FedAvg is a setting of its training.
    inner = {f"alpha {alpha:g}": {"adapt_lr": alpha} for alpha in alphas}
    return {
        "FedAvg + one step": Arm("fedavg_one_step", plain),
        "Per-FedAvg (FO)": Arm("per_fedavg", plain, inner),
        "MetaGater with gates": Arm("metagater", {**proximal, "lasso": LASSO}, gated=True),
        "MetaGater without gates": Arm("metagater", proximal),
        "MetaSNIP": Arm("metasnip", {**proximal, "layers": ["2.0.conv"]}),
    }


def build_brain_arms() -> dict[str, Arm]:
    """Return the arms on scan sites. The network is an MLP without channels, so no arm has gates."""
    plain = {"optimizer": "sgd", "batch_size": 32, "clip_norm": 1.0}
    rates = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
    by_rate = {f"lr {rate:g}": {"training": {**plain, "lr": rate}} for rate in rates}
    pairs = [(0.1, 0.05), (0.2, 0.02), (0.2, 0.05), (0.2, 0.1), (0.4, 0.05), (0.4, 0.1), (0.8, 0.05)]
    inner = {f"lr {lr:g}, alpha {alpha:g}": {**by_rate[f"lr {lr:g}"], "adapt_lr": alpha} for lr, alpha in pairs}
    proximal = {f"lr {rate:g}": {"training": {**plain, "lr": rate / LAMBDA}} for rate in rates}
    few = {"local_steps": 2}
    return {
        "FedAvg + one step": Arm("fedavg_one_step", few, by_rate),
        "FedAvg, an epoch a round, + one step": Arm("fedavg_one_step", {"local_steps": None}, by_rate),
        "Per-FedAvg (FO)": Arm("per_fedavg", few, inner),
        "MetaGater without gates": Arm("metagater", {**few, "momentum_cap": 0.9}, proximal),
    }


CIFAR = {"image": (3, 32, 32), "classes": 10, "model": {"name": "image_cnn", "channels": [32, 64, 128]}}
BRAIN = {
    "kind": "regression",
    "target": "age",
    "target_scale": (45, 15),
    "unit": "years",
    "features": ["destrieux"],
    "id": "subject",
    "scaling": "freesurfer",
}
SETTINGS = {
    "cifar_small": Setting(
        "image_classification",
        CIFAR,
        ("2",),
        build_cifar_arms(1000, (0.01, 0.03, 0.1)),
        {"sites": 20, "targets": 10, "min_examples": 30, "max_examples": 100},
    ),
    "cifar_main": Setting(
        "image_classification",
        CIFAR,
        ("2",),
        # The inner step that validation on the small sites chose for every seed: a second one takes two runs of FedAvg.
        build_cifar_arms(64, (0.01,)),
        {"sites": 40, "targets": 10, "min_examples": 221, "max_examples": 2792},
        validation_sites=10,
    ),
    "brain": Setting("table", BRAIN, (), build_brain_arms(), {"targets": 10, "smallest_target": 20}),
}
