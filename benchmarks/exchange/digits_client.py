"""A training script on FLARE's Client API for all its recipes; the argument names the algorithm."""

import copy
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import nvflare.client as flare
import torch
from digits_net import Net, load_images
from nvflare.app_opt.pt.fedproxloss import PTFedProxLoss
from nvflare.app_opt.pt.scaffold import PTScaffoldHelper

ALGORITHM = sys.argv[1] if len(sys.argv) > 1 else "fedavg"
LEARNING_RATE = 0.05


def train(
    net: Net,
    x: torch.Tensor,
    y: torch.Tensor,
    seed: int,
    proximal: PTFedProxLoss | None = None,
    reference: Net | None = None,
    after_step: Callable[[], None] | None = None,
) -> int:
    """Train for one epoch; return the number of steps."""
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    batches = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).split(20)
    for rows in batches:
        if len(rows) == 1:
            continue
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x[rows]), y[rows])
        if proximal is not None:
            loss = loss + proximal(net, reference)
        loss.backward()
        optimizer.step()
        if after_step is not None:
            after_step()
    return len(batches)


def main() -> None:
    torch.set_num_threads(1)
    flare.init()
    x, y = load_images(flare.get_site_name())
    net, personal, helper = Net(), Net(), PTScaffoldHelper()
    helper.init(net)
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        net.load_state_dict({name: torch.as_tensor(value) for name, value in received.params.items()})
        reference = copy.deepcopy(net)
        seed, meta = received.current_round or 0, {}
        extra: dict[str, Any] = {}
        if ALGORITHM == "fedprox":
            extra = {"proximal": PTFedProxLoss(mu=received.meta["fedprox_mu"]), "reference": reference}
        elif ALGORITHM == "ditto":
            train(personal, x, y, seed, PTFedProxLoss(mu=0.1), reference)
        elif ALGORITHM == "scaffold":
            helper.load_global_controls(received.meta["scaffold_c_global"])
            terms = helper.get_params()
            extra = {"after_step": lambda terms=terms: helper.model_update(net, LEARNING_RATE, *terms)}
        steps = train(net, x, y, seed, **extra)
        if ALGORITHM == "scaffold":
            helper.terms_update(net, LEARNING_RATE, *terms, reference)
            meta["scaffold_c_diff"] = helper.get_delta_controls()
        meta["NUM_STEPS_CURRENT_ROUND"] = steps
        flare.send(flare.FLModel(params=net.state_dict(), meta=meta))


if __name__ == "__main__":
    # FLARE ends a script that waits for its next model with an exception.
    with suppress(SystemExit):
        main()
