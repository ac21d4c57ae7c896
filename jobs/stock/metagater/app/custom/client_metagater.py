"""MetaGater's site: a proximal problem in each round, and one step of adaptation at the end (Lin et al. 2021)."""

import nvflare.client as flare
import torch
from study import GatedNet, load, loss, measure

from flare_sparse import client as sparse

STEPS, LR, ADAPT_LR = 3, 0.1, 0.1

torch.set_num_threads(1)
flare.init()
x, y, x_test, y_test = load(flare.get_site_name())
net = GatedNet()
while flare.is_running():
    received = flare.receive()
    net.load_state_dict({name: torch.as_tensor(value) for name, value in received.params.items()})
    metrics = measure(net, x_test, y_test)
    net.train()
    if flare.get_task_name() == "adapt":
        optimizer = torch.optim.SGD(net.parameters(), lr=ADAPT_LR)
        optimizer.zero_grad()
        loss(net, (x, y)).backward()
        optimizer.step()
        flare.send(flare.FLModel(metrics={**measure(net, x_test, y_test), "accuracy_before": metrics["accuracy"]}))
        continue
    start, optimizer = [p.detach().clone() for p in net.parameters()], torch.optim.SGD(net.parameters(), lr=LR)
    with sparse.masked(net, optimizer, received):
        for _ in range(STEPS):
            optimizer.zero_grad()
            distance = sum((p - s).square().sum() for p, s in zip(net.parameters(), start, strict=True))
            (loss(net, (x, y)) + received.meta["fedprox_mu"] / 2 * distance).backward()
            optimizer.step()
    meta = {"NUM_STEPS_CURRENT_ROUND": STEPS}
    flare.send(flare.FLModel(params=net.state_dict(), metrics=metrics, meta=meta))
