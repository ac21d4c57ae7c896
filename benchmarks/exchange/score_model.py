"""Accuracy of a model on CIFAR-10 test images, or mean Dice on a bundle's test volumes.

    python benchmarks/exchange/score_model.py model.Net model.safetensors cifar10.npz|bundle

``model`` and the stand-in for torchvision are on the path.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import torch
from torch import nn


def load_network(name: str, file: str) -> nn.Module:
    """Return the network with the weights of a run's folder or of FLARE's checkpoint."""
    module, _, attribute = name.rpartition(".")
    net: nn.Module = getattr(importlib.import_module(module), attribute)()
    if file.endswith("safetensors"):
        from flare_sparse import load_model

        state = load_model(Path(file).parent).state_dict()
    else:
        # FLARE's checkpoint has objects beside the tensors; the benchmark has just written it.
        state = torch.load(file, weights_only=False)["model"]
    net.load_state_dict({key: torch.as_tensor(value) for key, value in state.items()}, strict=False)
    return net.eval()


def score_images(net: nn.Module, file: Path) -> float:
    """Return the share of test images with the right class."""
    from torchvision.datasets import CIFAR10
    from torchvision.transforms import Compose, Normalize, ToTensor

    data = CIFAR10(str(file), False, transform=Compose([ToTensor(), Normalize((0.5,) * 3, (0.5,) * 3)]))
    x = torch.stack([data[i][0] for i in range(len(data))])
    return float((net(x).argmax(1) == torch.tensor(data.targets)).float().mean())


def score_volumes(net: nn.Module, bundle: Path) -> float:
    """Return the mean over the test volumes of all sites of the Dice coefficient of the foreground."""
    from monai.bundle import ConfigParser
    from monai.transforms import Compose

    parser = ConfigParser(json.loads((bundle / "configs" / "train.json").read_text()))
    transform: Compose = parser.get_parsed_content("validate#dataset#transform")
    scores = []
    for file in sorted(bundle.glob("site-*.json")):
        for case in json.loads(file.read_text())["test"]:
            item = transform(case)
            predicted, label = net(item["image"][None].as_tensor()).argmax(1)[0] > 0, item["label"][0].as_tensor() > 0
            scores.append(2 * float((predicted & label).sum()) / float(predicted.sum() + label.sum()))
    return sum(scores) / len(scores)


def main() -> None:
    data = Path(sys.argv[3])
    net = load_network(sys.argv[1], sys.argv[2])
    with torch.no_grad():
        print(score_volumes(net, data) if data.is_dir() else score_images(net, data))


if __name__ == "__main__":
    main()
