"""Training at a site, as for FLARE's FedAvg: receive a model, evaluate it, train it, send it."""

import argparse

import nvflare.client as flare
import torch
from model import Net


def load(name):
    """Return the data of a site; read your own here."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    x = torch.randn(200, 10, generator=generator)
    return x, x[:, :1] - 0.5 * x[:, 1:2] + 0.1 * torch.randn(200, 1, generator=generator)


def main():
    """Train for one pass in each round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    flare.init()
    x, y = load(flare.get_site_name())
    net = Net()
    while flare.is_running():
        received = flare.receive()
        net.load_state_dict(received.params)
        with torch.no_grad():
            metrics = {"mse": float(((net(x[150:]) - y[150:]) ** 2).mean()), "test_examples": 50}
        if flare.is_evaluate():
            flare.send(flare.FLModel(metrics=metrics))
            continue
        optimizer = torch.optim.SGD(net.parameters(), lr=args.lr)
        for rows in torch.arange(150).split(30):
            optimizer.zero_grad()
            ((net(x[rows]) - y[rows]) ** 2).mean().backward()
            optimizer.step()
        meta = {"NUM_STEPS_CURRENT_ROUND": 5, "num_examples": 150}
        flare.send(flare.FLModel(params=net.state_dict(), metrics=metrics, meta=meta))


if __name__ == "__main__":
    main()
