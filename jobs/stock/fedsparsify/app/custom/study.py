"""Malignant or benign: 569 biopsies of the breast (Wisconsin Diagnostic, in scikit-learn), dealt out to three sites.

Ten features of the cell nuclei, each as mean, standard error and worst, are three channels of ten numbers in a row.
"""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

SITES = 3


def load(site):
    """Return training examples, their labels, test examples and their labels; a fifth of the rows tests."""
    table = load_breast_cancer()
    x = torch.tensor(table.data, dtype=torch.float32)
    x = ((x - x.mean(0)) / x.std(0)).view(-1, 3, 10, 1)
    y = torch.tensor(table.target, dtype=torch.float32)[:, None]
    own = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[
        int(site.rpartition("-")[2]) % SITES :: SITES
    ]
    test, train = own[: len(own) // 5], own[len(own) // 5 :]
    return x[train], y[train], x[test], y[test]


def loss(network, batch):
    """Return the mean cross-entropy of a minibatch."""
    return nn.functional.binary_cross_entropy_with_logits(network(batch[0]), batch[1])


def measure(network, x, y):
    """Return the share of right answers."""
    network.eval()
    with torch.no_grad():
        return {"accuracy": float(((network(x) > 0) == (y > 0.5)).float().mean()), "test_examples": len(y)}


class Scored:
    """What ``ScoreExecutor`` asks for: the site's examples as one minibatch, and the loss."""

    def batches(self, site):
        x, y, _, _ = load(site)
        return [(x, y)]

    def loss(self, network, batch):
        return loss(network, batch)


class Net(nn.Sequential):
    """Two convolutions along the features. FLARE builds the network at the server, so the class draws the weights."""

    def __init__(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            super().__init__(
                nn.Conv2d(3, 16, (3, 1), padding=(1, 0)),
                nn.ReLU(),
                nn.Conv2d(16, 16, (3, 1), padding=(1, 0)),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(160, 1),
            )


class GatedNet(nn.Module):
    """The same with channel gates on its second convolution (MetaGater)."""

    def __init__(self):
        from flare_sparse.tasks.models.gates import GateConfig, add_gates

        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = add_gates(Net(), GateConfig(layers=("2",)))

    def forward(self, x):
        return self.body(x)


class AdaptedNet(nn.Module):
    """A frozen network with LoRA adapters of rank 4 on two layers, and a trained head."""

    def __init__(self):
        from peft import LoraConfig, inject_adapter_in_model

        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            body = nn.Sequential(nn.Flatten(), nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
            config = LoraConfig(r=4, lora_alpha=8, target_modules=["1", "3"])
            self.body, self.head = inject_adapter_in_model(config, body), nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.body(x))
