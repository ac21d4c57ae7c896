"""LoRA-A2's site: a trial scores the slots, then these train from the received model (Koo et al. 2025, section 3)."""

import nvflare.client as flare
import torch
from study import AdaptedNet, load, loss, measure

from flare_sparse import client as sparse

RANK, EPOCHS, LR = 2, 3, 0.05

torch.set_num_threads(1)
flare.init()
x, y, x_test, y_test = load(flare.get_site_name())
net = AdaptedNet()


def train(received, epochs):
    """Train the entries of the task's mask from the received model."""
    net.load_state_dict({name: torch.as_tensor(value) for name, value in received.params.items()})
    net.train()
    # B learns five times faster than A and the head (LoRA+).
    is_b_round = received.current_round % 2 == 0
    groups = [
        {"params": [p], "lr": LR * 5 if "lora_" in name and is_b_round else LR}
        for name, p in net.named_parameters() if p.requires_grad
    ]  # fmt: skip
    optimizer = torch.optim.SGD(groups)
    with sparse.masked(net, optimizer, received):
        for _ in range(epochs):
            optimizer.zero_grad()
            loss(net, (x, y)).backward()
            optimizer.step()


while flare.is_running():
    received = flare.receive()
    net.load_state_dict({name: torch.as_tensor(value) for name, value in received.params.items()})
    metrics = measure(net, x_test, y_test)
    train(received, epochs=1)
    sparse.keep_ranks(received, net, RANK)
    train(received, EPOCHS)
    meta = {"NUM_STEPS_CURRENT_ROUND": EPOCHS}
    flare.send(flare.FLModel(params=net.state_dict(), metrics=metrics, meta=meta))
