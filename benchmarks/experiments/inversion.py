r"""Inversion of the message of one brain scan: without protection, under a site policy, with differential privacy.

    python benchmarks/experiments/inversion.py ../shared/data [--steps 300] [--picture docs/images/inversion.png]

A server inverts one step of plain SGD and saliency scores of the initial model. ``perceptron``: scans at 6 mm,
flattened into a linear layer, whose gradient reveals its input exactly. ``convolutions``: the published network at
12 mm, whose input is optimised. Under the policy also the smallest numbers of examples that it lets leave. Prints the
table and draws a slice of each rebuilt scan.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import torch
from inversion_attack import Inversion, ServerAttacks
from torch import nn

from flare_sparse.config.assemble import Assembly, assemble, build_initial_model, open_site
from flare_sparse.config.loading import load_config
from flare_sparse.config.policy.policy import PRESETS, read_policy
from flare_sparse.config.study import prepare_site_data
from flare_sparse.config.user_classes import load_task

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "app_configs" / "fedavg_brain_base.yaml"
PROTECTIONS = ("none", "careful", "epsilon 3")
SIZES = {"none": (1,), "careful": (1, 20, 64), "epsilon 3": (1,)}
NETWORKS = {
    "perceptron": "{name: brain_age, downsample: 2}",
    "convolutions": "{name: brain_age, downsample: 4, model: {name: brain_age_cnn_3mm, pooled: 2}}",
}
UNITS, VOXELS = 16, 26 * 32 * 26


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with brain_t1/")
    parser.add_argument("--steps", type=int, default=300, help="steps of the optimisation")
    parser.add_argument("--picture", type=Path, help="PNG of the rebuilt scans")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        (network, protection, inversion)
        for network in NETWORKS
        for protection in PROTECTIONS
        for inversion in invert(network, protection, arguments)
    ]
    print(format_table(rows))
    if arguments.picture:
        draw(rows, arguments.picture)
    return 0


def invert(network: str, protection: str, arguments: argparse.Namespace) -> list[Inversion]:
    """Return the inversions of an update and of scores."""
    privacy = "{epsilon: 3, delta: 1e-5}" if protection == "epsilon 3" else "null"
    data = (arguments.data / "brain_t1" / "IXI-HH").resolve()
    settings = [f"task={NETWORKS[network]}", f"simulator.data.path={data}", "simulator.sites=2", f"privacy={privacy}"]
    config = load_config(CONFIG, settings)
    assembly = assemble(config, load_task(config, CONFIG.parent))
    if network == "perceptron":
        assembly = replace_network(assembly)
    examples = prepare_site_data(config, assembly.task, Path())
    site = open_site(assembly, examples[min(examples)])
    policy = read_policy(PRESETS[protection]) if protection in PRESETS else None
    steps = 0 if network == "perceptron" else arguments.steps
    attacks = ServerAttacks(assembly, site, site.trainer.examples.test, policy, steps)
    return list(attacks.invert_messages(lambda line: print(f"{network}, {protection}: {line}"), SIZES[protection]))


def replace_network(assembly: Assembly) -> Assembly:
    """Return the parts of a job whose network starts with a linear layer."""
    task: Any = assembly.task
    task.model = lambda: nn.Sequential(nn.Flatten(), nn.Linear(VOXELS, UNITS), nn.ReLU(), nn.Linear(UNITS, 1))
    layout, weights = build_initial_model(task, assembly.method.seed)
    return dataclasses.replace(assembly, layout=layout, network=layout, weights=weights)


def format_table(rows: list[tuple[str, str, Inversion]]) -> str:
    lines = [
        "| network | protection | message | examples | PSNR | SSIM | PSNR of the mean scan |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for network, protection, found in rows:
        best = found.best
        figures = (
            f"{min(best.psnr, 200):.1f} dB | {best.ssim:.3f} | {best.guess_psnr:.1f} dB"
            if best is not None and best.ssim is not None
            else f"{found.reason.removeprefix('this site')[:60]} | | "
        )
        lines.append(f"| {network} | {protection} | {found.message} | {found.batch_size} | {figures} |")
    return "\n".join(lines)


def draw(rows: list[tuple[str, str, Inversion]], file: Path) -> None:
    """Draw the middle slice of the true and the rebuilt scans; a message that does not leave is an empty square."""
    columns = [
        ("none", "update"),
        ("none", "scores"),
        ("careful", "update"),
        ("careful", "scores"),
        ("epsilon 3", "update"),
    ]
    titles = ["true scan", *(f"{protection}:\n{message}" for protection, message in columns)]
    plt.style.use("flare_sparse.results.report.plots")
    figure, axes = plt.subplots(len(NETWORKS), len(titles), figsize=(1.6 * len(titles), 2.1 * len(NETWORKS)))
    for line, network in zip(axes, NETWORKS, strict=True):
        single = {(p, i.message): i.best for n, p, i in rows if n == network and i.batch_size == 1}
        pictures = [single["none", "update"].true, *(b.rebuilt if (b := single[key]) else None for key in columns)]
        low, high = float(pictures[0].min()), float(pictures[0].max())
        for axis, picture, title in zip(line, pictures, titles, strict=True):
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_title(title.replace("none:", "no policy:"), fontsize=13)
            if picture is None:
                axis.text(0.5, 0.5, "refused", ha="center", va="center", fontsize=13)
            else:
                volume = picture[0].detach()
                axis.imshow(volume[:, :, volume.shape[2] // 2].T, cmap="gray", vmin=low, vmax=high, origin="lower")
        line[0].set_ylabel(network, fontsize=13)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
