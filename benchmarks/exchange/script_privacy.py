r"""The privacy budget of FLARE's example scripts: what is charged, what canaries show, and FLARE's own ``SVTPrivacy``.

    python benchmarks/exchange/script_privacy.py [--shared ../shared] [--parts hello-pt hello-lightning lightning svt]

Each script trains at one site with ``make_private``, whose lines are shown as a patch. Canaries are images of CIFAR-10
with labels of others, half of them among the training images. By how much the loss of each fell bounds epsilon from
below (Steinke et al. 2023). It must stay below the epsilon that the site's ledger states, which must be the one of
Opacus for the same steps. A second run with hardly any noise shows whether the canaries would be found. Part
``lightning`` trains a linear model by Lightning's trainer, in which each canary has a weight of its own. Part ``svt``
gives the update of one epoch of hello-pt to FLARE's filter, and repeats the epoch with budgets: the cosine to the
update. Both parts of Lightning need ``pip install pytorch-lightning``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from examples import EXAMPLES, write_example, write_images
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.filters.svt_privacy import SVTPrivacy
from opacus.accountants import PRVAccountant
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flare_sparse.client import make_private
from flare_sparse.flare.script_process import ScriptProcess
from flare_sparse.privacy.dp.account import PrivacyAccount
from flare_sparse.privacy.dp.config import PrivacyConfig
from flare_sparse.privacy.dp.scripts import PRIVACY_VARIABLE, ScriptBudget
from flare_sparse.tasks.task import SiteData
from flare_sparse.training.script_exchange import ScriptRequest

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER.parent / "experiments"))

from canary_bound import bound_epsilon  # noqa: E402

DELTA = 1e-5
CANARIES, OTHERS, ROUNDS, EPOCHS = 300, 100, 2, 30
IMPORT = "    from flare_sparse import client as sparse"
LOOP = "model, optimizer, train_loader = sparse.make_private(model, optimizer, train_loader, epochs=epochs)"
PARTS = 'model, model.configure_optimizers()["optimizer"], cifar10_dm.train_dataloader()'
LIGHTNING = f"""
    cifar10_dm.setup("fit")
    _, optimizer, loader = sparse.make_private({PARTS})
    model.configure_optimizers = lambda: optimizer"""
PATCH, FIT = "    flare.patch(trainer)", "        trainer.fit(model, datamodule=cifar10_dm)"
PRIVATE = {
    "hello-pt": (("    last_params = None", f"    last_params = None\n{IMPORT}\n    {LOOP}"),),
    "hello-lightning": (
        (PATCH, f"{PATCH}\n{IMPORT}{LIGHTNING}"),
        (FIT, "        trainer.fit(model, train_dataloaders=loader)"),
    ),
}
"""What make_private needs in each script."""
# All images train, so that the canaries that do are those of the file.
SPLIT = (
    "            self.cifar_train, self.cifar_val = random_split(cifar_full, [0.8, 0.2])",
    "            self.cifar_train = self.cifar_val = cifar_full",
)


def write_canaries(shared: Path, file: Path) -> tuple[list[int], np.ndarray]:
    """Write training images with half of the canaries; return the labels of all canaries, and which of them train.

    The test part of the file has all canaries.
    """
    write_images(shared / "data", file, OTHERS + CANARIES, 1)
    with np.load(file) as stored:
        arrays = dict(stored)
    random = np.random.default_rng(3)
    is_included = random.random(CANARIES) < 0.5
    ends = np.concatenate([[0], arrays["train_ends"]])
    pieces = [arrays["train_blob"][start:end] for start, end in pairwise(ends)]
    labels = arrays["train_labels"].astype(int).copy()
    labels[:CANARIES] = (labels[:CANARIES] + random.integers(1, 10, CANARIES)) % 10
    kept = [*np.flatnonzero(is_included), *range(CANARIES, OTHERS + CANARIES)]
    for part, rows in (("train", kept), ("test", range(CANARIES))):
        arrays[f"{part}_labels"] = labels[list(rows)]
        arrays[f"{part}_ends"] = np.cumsum([len(pieces[row]) for row in rows])
        arrays[f"{part}_blob"] = np.concatenate([pieces[row] for row in rows])
    with file.open("wb") as stream:
        np.savez(stream, **arrays)
    return labels[:CANARIES].tolist(), is_included


def open_script(
    shared: Path, script: str, folder: Path, data: Path, budget: ScriptBudget | None, *, epochs: int = 1
) -> tuple[ScriptProcess, nn.Module]:
    """Write a script to a folder, with the patch of privacy if it has a budget; return its process and its network."""
    example = EXAMPLES[script]
    changes = (*example.replacements, *(PRIVATE[script] if budget is not None else ()))
    changes += (SPLIT,) if script == "hello-lightning" else ()
    patch = write_example(shared / "flare_examples" / script, replace(example, replacements=changes), folder, data)
    network = folder / "model.py"
    # The learning rate of hello-pt, ten times that of hello-lightning.
    network.write_text(network.read_text().replace("lr=0.001", "lr=0.01"))
    print(patch.replace(str(data), "DATA"), flush=True)
    sys.path[:0] = [str(folder), str(FOLDER / "stand_in")]
    sys.modules.pop("model", None)
    torch.manual_seed(1)
    net: nn.Module = getattr(importlib.import_module("model"), example.model.split(".")[1])()
    args = example.args.replace("--batch_size 4", "--batch_size 24").format(data=data)
    args = args.replace("--epochs 1", f"--epochs {epochs}")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER / "stand_in"), os.environ.get("PYTHONPATH", "")])
    site = SiteData("site-1", folder)
    process = ScriptProcess(folder / "client.py", args, site, folder / "work", [FOLDER / "stand_in"], budget=budget)
    return process, net


def train(process: ScriptProcess, net: nn.Module, rounds: int) -> None:
    """Let a script train a network for some rounds, in place."""
    for number in range(rounds):
        params = {name: value.clone() for name, value in net.state_dict().items()}
        reply = process.run(ScriptRequest("train", params, number, rounds, {}, 1))
        assert reply.params is not None, "a training sends a model"
        net.load_state_dict({name: torch.as_tensor(value) for name, value in reply.params.items()})
    process.close()


def compute_losses(net: nn.Module, data: Path, labels: list[int]) -> np.ndarray:
    """Return the loss of each canary."""
    images = importlib.import_module("torchvision.datasets").CIFAR10(str(data), train=False).images
    inputs = (torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
    with torch.no_grad():
        losses = nn.functional.cross_entropy(net.eval()(inputs), torch.tensor(labels), reduction="none")
    return np.asarray(losses.numpy())


def measure_canaries(shared: Path, script: str, **privacy: float) -> dict[str, Any]:
    """Return what a script was charged, Opacus' epsilon for the same steps, and the lower bound of the canaries."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        labels, is_included = write_canaries(shared, folder / "data.npz")
        # A round of hello-lightning is one epoch.
        rounds = ROUNDS * EPOCHS if script == "hello-lightning" else ROUNDS
        config = PrivacyConfig.model_validate({"unit": "record", "delta": DELTA, **privacy})
        budget = ScriptBudget(config, PrivacyAccount(folder / "kit"), rounds, "run", script)
        process, net = open_script(shared, script, folder, folder / "data.npz", budget, epochs=EPOCHS)
        before = compute_losses(net, folder / "data.npz", labels)
        train(process, net, rounds)
        fallen = before - compute_losses(net, folder / "data.npz", labels)
        return describe_budget(script, budget, bound_epsilon(fallen, is_included, DELTA).epsilon)


def describe_budget(script: str, budget: ScriptBudget, lower_bound: float) -> dict[str, Any]:
    """Return what a script was charged, Opacus' epsilon for the same steps, and the lower bound of its canaries."""
    charges = [entry.charge for entry in budget.account.read().entries]
    accountant = PRVAccountant()
    accountant.history = [(c.noise_multiplier, c.sample_rate, c.steps) for c in charges]
    found = {"script": script, "noise": charges[0].noise_multiplier, "steps": sum(c.steps for c in charges)}
    # With hardly any noise the accountant has no answer.
    if charges[0].noise_multiplier > 0.3:
        found |= {"epsilon": budget.compute_spent(), "opacus": float(accountant.get_epsilon(DELTA))}
    return {**found, "lower_bound": lower_bound}


def measure_lightning(noise: float) -> dict[str, Any]:
    """Return the figures of a linear model that Lightning's trainer trains on canaries."""
    from pytorch_lightning import LightningModule, Trainer

    class Linear(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(CANARIES, 1, bias=False)
            nn.init.zeros_(self.net.weight)
            self.step = torch.optim.SGD(self.parameters(), lr=1.0)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return self.step

    with tempfile.TemporaryDirectory() as name:
        config = PrivacyConfig(unit="record", delta=DELTA, noise_multiplier=noise)
        budget = ScriptBudget(config, PrivacyAccount(Path(name) / "kit"), 1, "run", "lightning")
        os.environ[PRIVACY_VARIABLE] = budget.write(Path(name) / "budget.json")
        is_included = np.random.default_rng(1).random(CANARIES) < 0.5
        rows, module = torch.eye(CANARIES)[torch.from_numpy(is_included)], Linear()
        loader = DataLoader(TensorDataset(rows, torch.ones(len(rows), 1)), batch_size=len(rows) // 2)
        _, module.step, loader = make_private(module, module.step, loader, epochs=4)
        trainer = Trainer(max_epochs=4, logger=False, enable_checkpointing=False, enable_progress_bar=False)
        trainer.fit(module, train_dataloaders=loader)
        bound = bound_epsilon(module.net.weight.detach()[0].numpy(), is_included, DELTA)
        return describe_budget("lightning", budget, bound.epsilon)


def compute_update(shared: Path, epsilon: float | None) -> Tensor:
    """Return the change of hello-pt's weights in one epoch on 4,000 images."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(shared / "data", folder / "data.npz", 4000, 100)
        budget = None
        if epsilon is not None:
            config = PrivacyConfig(unit="record", delta=DELTA, epsilon=epsilon)
            budget = ScriptBudget(config, PrivacyAccount(folder / "kit"), 1, "run", "job")
        process, net = open_script(shared, "hello-pt", folder, folder / "data.npz", budget)
        start = nn.utils.parameters_to_vector(net.parameters()).detach()
        train(process, net, 1)
        return nn.utils.parameters_to_vector(net.parameters()).detach() - start


def compare_with_svt(shared: Path) -> None:
    """Print epsilon and cosine to the update of FLARE's filter, and of the same epoch with a budget."""
    update = compute_update(shared, None)
    np.random.seed(1)  # noqa: NPY002 - FLARE's filter draws from it
    svt = SVTPrivacy()
    change = DXO(DataKind.WEIGHT_DIFF, data={"w": update.numpy().copy()})
    dxo = svt.process_dxo(change, change.to_shareable(), FLContext())
    noised = torch.as_tensor(dxo.data["w"])
    cosine = float(nn.functional.cosine_similarity(noised, update, 0))
    print({"svt": svt.get_privacy_spent(), "entries": update.numel(), "cosine": cosine}, flush=True)
    for epsilon in (3.0, 8.0):
        private = compute_update(shared, epsilon)
        print({"epsilon": epsilon, "cosine": float(nn.functional.cosine_similarity(private, update, 0))}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument(
        "--parts", nargs="+", default=[*PRIVATE, "lightning", "svt"], choices=[*PRIVATE, "lightning", "svt"]
    )
    options = parser.parse_args()
    shared = options.shared.resolve()
    torch.set_num_threads(1)
    for part in options.parts:
        if part == "svt":
            compare_with_svt(shared)
        for noise in (1.0, 0.02) if part == "lightning" else ():
            print(measure_lightning(noise), flush=True)
        for privacy in ({"epsilon": 8.0}, {"noise_multiplier": 0.01}) if part in PRIVATE else ():
            print(measure_canaries(shared, part, **privacy), flush=True)


if __name__ == "__main__":
    main()
