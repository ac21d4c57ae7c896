"""A training script on FLARE's Client API: a small CNN on a site's share of CIFAR-10 (docs/own-script.md).

Five lines differ from a script for FLARE's FedAvgRecipe; each ends with a comment that begins with "sparse:".
"""

import argparse

import nvflare.client as flare
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flare_sparse import client as sparse  # sparse: the helpers below
from flare_sparse.tasks.images import read_images


class Net(nn.Sequential):
    """Three convolutions and two linear layers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(
            nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * width, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip


def load(path, split, numbers):
    """Return some images of a split, scaled to [-1, 1], and their labels."""
    images, labels = read_images(path, [f"{split}/{number}" for number in numbers])
    return TensorDataset(torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1, torch.from_numpy(labels))


def evaluate(net, loader):
    """Return the share of images that are classified correctly."""
    net.eval()
    with torch.no_grad():
        return sum(float((net(x).argmax(1) == y).sum()) for x, y in loader) / len(loader.dataset)


def main():
    """Train for one pass in each round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--images", type=int, default=20000, help="training images of all sites together")
    args = parser.parse_args()
    flare.init()
    path = sparse.site_data().path  # sparse: where the site says that its data is
    share = range(int(flare.get_site_name().removeprefix("site-")) - 1, args.images, args.sites)
    train = DataLoader(load(path, "train", share), batch_size=32, shuffle=True)
    test = DataLoader(load(path, "test", range(1000)), batch_size=256)
    net, loss = Net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    while flare.is_running():
        received = flare.receive()
        net.load_state_dict(received.params)
        meta = {"NUM_STEPS_CURRENT_ROUND": len(train), "num_examples": len(train.dataset)}
        if sparse.wants_scores(received):  # sparse: methods such as neurosfl score the entries first
            sparse.send_scores(net, [next(iter(train))], lambda net, batch: loss(net(batch[0]), batch[1]), meta)
            continue
        metrics = {"accuracy": evaluate(net, test), "test_examples": len(test.dataset)}
        if flare.is_evaluate():
            flare.send(flare.FLModel(metrics=metrics))
            continue
        net.train()
        with sparse.masked(net, optimizer, received):  # sparse: entries that are off stay off in every step
            for x, y in train:
                optimizer.zero_grad()
                loss(net(x), y).backward()
                optimizer.step()
        flare.send(flare.FLModel(params=net.state_dict(), metrics=metrics, meta=meta))


if __name__ == "__main__":
    main()
