"""A training script on FLARE's Client API; it knows nothing of the method of its job."""

import nvflare.client as flare
import torch
from study import Net, load, loss, measure

from flare_sparse import client as sparse

STEPS = 5

torch.set_num_threads(1)
flare.init()
x, y, x_test, y_test = load(flare.get_site_name())
net = Net()
while flare.is_running():
    received = flare.receive()
    net.load_state_dict({name: torch.as_tensor(value) for name, value in received.params.items()})
    meta = {"NUM_STEPS_CURRENT_ROUND": STEPS}
    # In a job of FLARE's own controllers, ScoreExecutor answers instead.
    if sparse.wants_scores(received):
        sparse.send_scores(net, [(x, y)], loss, meta)
        continue
    metrics = measure(net, x_test, y_test)
    if flare.is_evaluate():
        flare.send(flare.FLModel(metrics=metrics))
        continue
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with sparse.masked(net, optimizer, received):
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss(net, (x, y)).backward()
            optimizer.step()
    flare.send(flare.FLModel(params=net.state_dict(), metrics=metrics, meta=meta))
