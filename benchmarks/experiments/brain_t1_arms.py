"""Arms of ``brain_t1.py``: the lines of its tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Arm:
    """One line of a table.

    Attributes:
        label: its name.
        config: configuration file.
        overrides: settings that differ from it.
        sites: which sites train together: ``all``; each of them ``alone``; or one that holds all data, ``pooled``.
        table: the table, if it is one of those with one fold a seed.
        is_linear: whether the line stands for the linear models instead.
    """

    label: str
    config: str = "fedavg_voxels"
    overrides: tuple[str, ...] = ()
    sites: str = "all"
    table: str = ""
    is_linear: bool = False

    @property
    def file_name(self) -> str:
        name = f"{self.table} {self.label}".strip()
        return name.replace(" ", "_").replace("%", "").replace(",", "").replace("'", "")


def build_masked(label: str, percent: int, *settings: str, table: str = "") -> Arm:
    overrides = (f"method.sparsity={percent / 100:g}", *settings)
    return Arm(f"{label} {percent} %", "neurosfl_voxels", overrides, table=table)


def build_pruned(percent: int, *settings: str, table: str = "") -> Arm:
    overrides = (f"method.sparsity={percent / 100:g}", *settings)
    return Arm(f"FedSparsify {percent} %", "fedsparsify_voxels", overrides, table=table)


LINEAR = Arm("baselines", is_linear=True)
ALONE = ("method.training.lr=0.01",)
MAIN = (
    Arm("FedAvg"),
    Arm("local only", overrides=ALONE, sites="alone"),
    *(build_masked("NeuroSFL", percent) for percent in (90, 95)),
    *(build_pruned(percent) for percent in (90, 95)),
    Arm("pooled", sites="pooled"),
)
RANDOM = ("method.scores=random", "method.training.lr=0.01")
SHUFFLED = ("method.scores=shuffled_snip", "method.training.lr=0.01")
LADDER = (
    *(build_masked("NeuroSFL", percent) for percent in (98, 99)),
    *(build_masked("shuffled SNIP", percent, *SHUFFLED) for percent in (90, 95, 98, 99)),
    *(build_masked("random mask", percent, *RANDOM) for percent in (90, 95, 98, 99)),
)

METHODS, UNIFORM, SKEWED, SEX = "methods", "uniform", "skewed", "sex"
TRAINING = "{epochs: 1, batch_size: 16, optimizer: adamw, lr: 0.003, weight_decay: 1.0, schedule: {kind: cosine}}"


def list_methods(percent: int) -> Iterator[Arm]:
    """Yield variants of SNIP and other sparse methods. Their settings are NeuroSFL's: none was tuned."""
    scores = {
        "SNIP, progressive": ("method.scores=iter_snip", "method.iter_snip=progressive"),
        "SNIP, 10 minibatches": ("method.scores=iter_snip", "method.saliency_batches=1"),
        "SNIP, weighted by examples": ("method.scores=weighted_snip",),
        "SNIP of one site": ("method.scores=individual_snip", "method.random_site=true"),
        "IndividualSNIP": ("method.scores=individual_snip",),
        "random mask, ERK": (*RANDOM, "method.random_layers=erk"),
    }
    yield from (build_masked(label, percent, *settings, table=METHODS) for label, settings in scores.items())
    others = {
        "DisPFL": f"name: dispfl, sparsity: {percent / 100:g}",
        "top-k, error feedback": f"name: topk_ef, fraction: {1 - percent / 100:.2f}",
    }
    for label, text in others.items():
        yield Arm(
            f"{label} {percent} %",
            overrides=(f"method={{{text}, rounds: 30, training: {TRAINING}}}",),
            table=METHODS,
        )


def list_eight(table: str, partition: str) -> Iterator[Arm]:
    """Yield the arms of one of FedSparsify's environments: eight sites of the pooled subjects."""
    overrides = ("simulator.sites=8", f"simulator.data.partition={partition}")
    yield Arm("FedAvg", overrides=overrides, table=table)
    yield from (build_pruned(percent, *overrides, table=table) for percent in (85, 90, 95, 99))
    yield Arm("local only", overrides=(*overrides, *ALONE), sites="alone", table=table)


def list_sex() -> Iterator[Arm]:
    """Yield the arms that predict sex, with the settings that were found for age."""
    model = "model: {name: voxel_mlp, hidden: [64]}, downsample: 3, normalization: brain_first"
    task = f"task={{name: sex_classification, {model}}}"
    yield Arm("baselines", overrides=(task,), table=SEX, is_linear=True)
    yield Arm("FedAvg", overrides=(task,), table=SEX)
    yield Arm("local only", overrides=(task, *ALONE), sites="alone", table=SEX)
    yield Arm("pooled", overrides=(task,), sites="pooled", table=SEX)
    for percent in (90, 98):
        yield build_masked("NeuroSFL", percent, task, table=SEX)
        yield build_masked("random mask", percent, task, *RANDOM, table=SEX)
        yield build_pruned(percent, task, table=SEX)


MORE = {
    METHODS: (
        Arm(
            "FedAvg, fine-tuned",
            overrides=(f"method={{name: fedavg_ft, rounds: 30, training: {TRAINING.replace('0.003', '0.001')}}}",),
            table=METHODS,
        ),
        *list_methods(90),
        *list_methods(98),
    ),
    UNIFORM: tuple(list_eight(UNIFORM, "{kind: iid, sizes: uniform, seed: 1}")),
    SKEWED: tuple(list_eight(SKEWED, "{kind: age, sizes: skewed}")),
    SEX: tuple(list_sex()),
}
"""Tables with one fold a seed."""
