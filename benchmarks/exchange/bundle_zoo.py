"""Check and train every bundle of MONAI's model zoo, as it is, on synthetic cases of two sites.

    python benchmarks/exchange/bundle_zoo.py ZOO/models OUT [--bundle NAME ...] [--tiny]

A bundle that is read gets ``flare-sparse check`` and two rounds of NeuroSFL (90 %) with two cases a site, in a process
of its own, and MONAI's parser loads what comes out. ``--tiny``: after ``check`` one step on a crop of 64 voxels a side,
for networks that take hours. DiNTS gets an architecture drawn at random where the bundle's folder has
none. Writes OUT/NAME.json and OUT/bundle_zoo.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import yaml
from scipy.ndimage import gaussian_filter

SITES, ROUNDS = 2, 2
COMMAND = str(Path(sys.executable).parent / "flare-sparse")
DINTS: dict[str, Any] = {
    "arch_ckpt": "$torch.load(@arch_ckpt_path, map_location='cpu', weights_only=False)",
    # Functions, which no job carries: a dilated copy of the label map, from which patches are drawn.
    **{f"train::deterministic_transforms::{index}::_disabled_": True for index in (7, 8)},
    "train::deterministic_transforms::11::keys": ["image", "label"],
    "train::deterministic_transforms::11::mode": ["reflect", "constant"],
    "train::random_transforms::0::label_key": "label",
    "train::random_transforms::1::_disabled_": True,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "multi_organ_segmentation": DINTS,
    "pancreas_ct_dints_segmentation": DINTS,
    "ventricular_short_axis_3label": {"im_shape": [64, 64]},
    # Eight patches, and four or two of two cases, need more memory than this test may take.
    "pediatric_abdominal_ct_segmentation": {
        "train::random_transforms::0::num_samples": 1,
        # It divides the prediction for further metrics by names of labels, which no case carries to the metrics.
        "train::postprocessing::transforms::2::_disabled_": True,
    },
    "renalStructures_UNEST_segmentation": {"train::random_transforms::0::num_samples": 1},
    "swin_unetr_btcv_segmentation": {"train::random_transforms::0::num_samples": 1},
}
"""Items that the job sets instead of a bundle's (``task.override``)."""
COLUMNS = ("bundle", "verdict", "code", "kilobytes", "dense_kilobytes", "losses", "seconds", "monai", "sentence")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("zoo", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bundle", nargs="*", default=[])
    parser.add_argument("--one", action="store_true", help="try the one bundle in this process")
    parser.add_argument("--tiny", action="store_true", help="one step on a crop instead")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    names = args.bundle or sorted(folder.name for folder in args.zoo.iterdir() if (folder / "configs").is_dir())
    for name in names:
        file = args.out / f"{name}.json"
        if args.one:
            file.write_text(json.dumps(try_bundle(args.zoo / name, args.out / name, tiny=args.tiny)))
        elif not file.exists():
            command = [sys.executable, __file__, str(args.zoo), str(args.out), "--one", "--bundle", name]
            command += ["--tiny"] * args.tiny
            if row := explain_refusal(args.zoo / name):
                file.write_text(json.dumps(row))
            elif (done := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
                file.write_text(json.dumps({"verdict": "fails", "sentence": done.stderr.strip().splitlines()[-1]}))
            print(name, file.read_text(), flush=True)
    rows = [{"bundle": file.stem, **json.loads(file.read_text())} for file in sorted(args.out.glob("*.json"))]
    with (args.out / "bundle_zoo.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def describe_bundle(bundle: Path) -> dict[str, Any]:
    """Return the section ``task`` that names a bundle."""
    return {"bundle": str(bundle.resolve()), "override": OVERRIDES.get(bundle.name, {})}


def explain_refusal(bundle: Path) -> dict[str, Any] | None:
    """Return the row of a bundle that is not read; None: it is read."""
    from flare_sparse.config.bundles import insert_bundle
    from flare_sparse.core.errors import ConfigError

    if bundle.name in ("multi_organ_segmentation", "pancreas_ct_dints_segmentation"):
        write_architecture(bundle)
    try:
        insert_bundle({"task": describe_bundle(bundle), "method": {"name": "neurosfl"}})
    except ConfigError as error:
        text = str(error).replace(f"{bundle.resolve()}/", "").replace("\n ", "")
        is_other = "neither segments" in text or "nothing to train" in text
        return {"verdict": "another purpose" if is_other else "refused", "sentence": text}
    return None


def write_architecture(bundle: Path) -> None:
    """Write an architecture of DiNTS drawn at random, in the format of a search, where a bundle lacks it."""
    import torch
    from monai.networks.nets import TopologySearch

    file = bundle / "models" / "search_code_18590.pt"
    if not file.exists():
        torch.manual_seed(1)
        space = TopologySearch(channel_mul=1, num_blocks=12, num_depths=4, use_downsample=True)
        torch.nn.init.normal_(space.log_alpha_a)
        torch.nn.init.normal_(space.log_alpha_c)
        node_a, arch_code_a, arch_code_c, _ = space.decode()
        file.parent.mkdir(exist_ok=True)
        torch.save({"node_a": node_a, "arch_code_a": arch_code_a, "arch_code_c": arch_code_c}, file)


def try_bundle(bundle: Path, out: Path, *, tiny: bool) -> dict[str, Any]:
    """Return the row of a bundle that is read: what a run of it gives."""
    from flare_sparse.config.bundles import insert_bundle
    from flare_sparse.tasks.bundles.declaration import read_declaration

    task: dict[str, Any] = {**describe_bundle(bundle), "split": {"test": 0.5}}
    settings = insert_bundle({"task": task})["task"]
    own = dict.fromkeys(settings.get("code", ()))
    declaration = read_declaration(settings["declaration"], bundle.name, own)
    for number in range(1, SITES + 1):
        folder = out / "data" / f"site-{number}"
        if declaration.purpose == "classification":
            write_classes(declaration, folder, number)
        else:
            task["pairs"] = {"images": write_site(declaration, folder, number), "labels": "label_{case}.nii.gz"}
    study = {
        "name": bundle.name,
        "seed": 1,
        "method": {"name": "neurosfl", "sparsity": 0.9, "rounds": ROUNDS},
        "task": task,
        "simulator": {"sites": SITES, "data": {"path": str((out / "data").resolve()) + "/{site}"}},
        "federation": {"threads": 2},
    }
    config = out / "study.yaml"
    config.write_text(yaml.safe_dump(study))
    start = time.perf_counter()
    checked = subprocess.run([COMMAND, "check", str(config)], capture_output=True, text=True, check=False)
    (out / "check.txt").write_text(checked.stdout + checked.stderr)
    if checked.returncode:
        failed = [line.strip() for line in checked.stdout.splitlines() if "FAIL" in line]
        return {"verdict": "check fails", "sentence": " ".join(failed)[:600]}
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    cost = f"check {time.perf_counter() - start:.0f} s, {peak:.1f} GiB"
    row = take_step(config, out) if tiny else train(config, out)
    return {**row, "code": " ".join(own), "sentence": f"{cost}; {row['sentence']}"}


def take_step(config: Path, out: Path) -> dict[str, Any]:
    """Return the loss of a crop before and after a step with the bundle's transforms, loss and optimiser."""
    import torch

    from flare_sparse.config.loading import load_config
    from flare_sparse.config.study import Study
    from flare_sparse.tasks.task import SiteData

    start = time.perf_counter()
    loaded = load_config(config)
    assembly = Study(loaded, config).assembly
    task, training = assembly.task, loaded.method.config.training
    examples = task.load(SiteData("site-1", out / "data" / "site-1"), seed=1)
    images, labels = task.augment(task.collate([examples.train[0]]), torch.Generator().manual_seed(1))
    middle = [slice((side - min(side, 64)) // 2, (side + min(side, 64)) // 2) for side in images.shape[2:]]
    batch = images[:1, :, *middle], labels[:1, :, *middle]
    torch.manual_seed(1)
    model = task.model()
    parameters = list(model.parameters())
    vector = torch.nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
    optimizer, losses = training.build_optimizer(vector, 1, [p.numel() for p in parameters]), []
    for _ in range(2):
        model.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        losses.append(float(loss.detach()))
        # Cells that an architecture of DiNTS leaves out get no gradient.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        vector.grad = torch.cat([gradient.flatten() for gradient in gradients])
        optimizer.step()
        for parameter, piece in zip(parameters, vector.detach().split([p.numel() for p in parameters]), strict=True):
            parameter.data.copy_(piece.view(parameter.shape))
    task.save(model, out / "trained")
    return {
        "verdict": "one step",
        "losses": " ".join(f"{value:.4f}" for value in losses),
        "seconds": round(time.perf_counter() - start),
        "monai": load_with_monai(out / "trained"),
        "sentence": f"{vector.numel():,} parameters, a crop of {tuple(batch[0].shape[1:])}",
    }


def write_site(declaration: Any, folder: Path, seed: int, cases: int = 2) -> list[str]:
    """Write cases that fit the network and the transforms of a bundle; return the pattern of each channel's file."""
    rng = np.random.default_rng(seed)
    network, transforms = declaration.network, declaration.preprocessing
    axes = 2 if network.find_argument("spatial_dims") == 2 else 3
    channels, classes = int(network.find_argument("in_channels")), declaration.num_outputs
    arguments = {c.path.rpartition(".")[2]: c.args for c in transforms}
    spacing = arguments.get("Spacingd", {}).get("pixdim", [1.0] * 3)
    patches = [args.get("spatial_size", args.get("roi_size")) for args in arguments.values()]
    # Larger than any crop, except those that a smaller image is allowed for.
    side = max((max(p) for p in patches if isinstance(p, list) and max(p) <= 128), default=32)
    shape = tuple([side] * axes) if "Resized" not in arguments else (96,) * axes
    if "ConvertToMultiChannelBasedOnBratsClassesd" in arguments:
        values, shape = [0, 1, 2, 4], (48, 48, 48)
    else:
        values = list(range(max(classes, 2)))
    # The outer third stays background, so that a crop of the foreground plus a margin is no larger than the patch.
    inside = np.zeros(shape)
    inside[tuple(slice(length // 6, -(length // 6)) for length in shape)] = 1
    folder.mkdir(parents=True, exist_ok=True)
    # Volumes have a file for each channel; plane images are photographs.
    count = channels if axes == 3 else 1
    for case in range(cases):
        field = gaussian_filter(rng.random(shape), 4) * inside
        edges = np.quantile(field[inside > 0], np.linspace(0, 1, len(values) + 1)[1:-1])
        labels = np.array(values)[np.digitize(field, edges)] * (inside > 0)
        noise = rng.normal(0, 0.1, (*shape, channels))
        image = (labels[..., None] / max(values) * 2 - 0.5 + noise) * 100 * inside[..., None]
        volumes = [image[..., c] for c in range(channels)] if count > 1 or channels == 1 else [image]
        for name, array, dtype in (
            ("label", labels, np.uint8),
            *((f"image{channel}", volume, np.float32) for channel, volume in enumerate(volumes)),
        ):
            nifti = nib.Nifti1Image(array.astype(dtype), np.diag([*map(float, spacing), 1.0]))
            nib.save(nifti, folder / f"{name}_{case}.nii.gz")
    return [f"image{channel}_{{case}}.nii.gz" for channel in range(count)]


def write_classes(declaration: Any, folder: Path, seed: int, cases: int = 8) -> None:
    """Write plane images whose brightness is their class, and the list of them; the channels come last."""
    rng, channels = np.random.default_rng(seed), int(declaration.network.find_argument("in_channels"))
    shape = (64, 64) if channels == 1 else (64, 64, channels)
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for case in range(cases):
        label = case % declaration.num_outputs
        image = np.float32(rng.normal(label, 0.1, shape))
        nib.save(nib.Nifti1Image(image, np.eye(4)), folder / f"{case}.nii.gz")
        entries.append({"image": f"{case}.nii.gz", "label": label})
    (folder / "dataset.json").write_text(json.dumps(entries))


def train(config: Path, out: Path) -> dict[str, Any]:
    """Return what ``check`` and a run of a bundle give."""
    from flare_sparse.api.local import run
    from flare_sparse.config.loading import load_config
    from flare_sparse.config.study import Study
    from flare_sparse.core.observer import Observer
    from flare_sparse.results.runs.folder import RunFolder
    from flare_sparse.tasks.bundles.task import BundleTask

    start = time.perf_counter()
    losses: list[list[float]] = [[]]
    original = BundleTask.loss

    def record(self: Any, model: Any, batch: Any) -> Any:
        loss = original(self, model, batch)
        losses[-1].append(float(loss.detach()))
        return loss

    class Rounds(Observer):
        def see_round(self, *args: Any, **kwargs: Any) -> None:
            losses.append([])

    BundleTask.loss = record  # type: ignore[method-assign]
    study = Study(load_config(config), config)
    summary = run(study, RunFolder(out / "run"), Rounds()).summary
    # The scores come before the rounds, an evaluation after them.
    means = [float(np.mean(part)) for part in losses[1 : ROUNDS + 1]]
    command = [COMMAND, "--trust-code", "save", str(out / "run"), "--out", str(out / "trained")]
    subprocess.run(command, check=True, capture_output=True)
    (out / "summary.json").write_text(json.dumps(summary, default=str))
    return {
        "verdict": "runs",
        "losses": " ".join(f"{value:.4f}" for value in means),
        "seconds": round(time.perf_counter() - start),
        "monai": load_with_monai(out / "trained"),
        **describe_traffic(summary),
        "sentence": ", ".join(f"{name} {value:.3f}" for name, value in summary["final"]["metrics"].items()),
    }


def load_with_monai(bundle: Path) -> str:
    """Return what MONAI's own parser makes of the network and the weights of a trained bundle."""
    import torch
    from monai.bundle import ConfigParser

    try:
        parser = ConfigParser()
        parser.read_config(str(next((bundle / "configs").glob("train.*"))))
        network = parser.get_parsed_content("network_def")
        network.load_state_dict(torch.load(bundle / "models/model.pt", weights_only=True))
    # MONAI's errors are of many classes.
    except Exception as error:  # noqa: BLE001
        cause = error.__cause__ or error
        return f"{type(cause).__name__}: {cause}"[:200]
    return "loads"


def describe_traffic(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the kilobytes of a run in both directions, and those of dense models."""
    both = summary["traffic"].values()
    return {
        "kilobytes": round(sum(part["payload_bytes"] for part in both) / 1000),
        "dense_kilobytes": round(sum(part["dense_bytes"] for part in both) / 1000),
    }


if __name__ == "__main__":
    main()
