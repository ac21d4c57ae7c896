"""Processor time of a round of LoRA-A2 against FL+LoRA: training, trial, selection, messages and sum.

One site adapts the pre-trained all-MiniLM-L6-v2 with E = 5. FL+LoRA trains both factors of rank 8; LoRA-A2 trains one
factor of 16 slots for 1 + 5 epochs and sends 8 N slots. The rounds of both alternate. Medians of processor time are
compared, which other programs on the machine do not change. The paper reports a ratio of 1.17.

    export FLARE_SPARSE_MODELS=/models
    python benchmarks/performance/lora_round.py --data /data/banking77.csv.gz [--examples 64] [--repeats 5]

Exits with 1 if LoRA-A2 takes more than 1.25 of FL+LoRA's time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from flare_sparse.config.assemble import build_initial_model
from flare_sparse.methods.registry import METHODS
from flare_sparse.rounds.endpoints.server import ServerEndpoint
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.tasks.registry import TASKS
from flare_sparse.tasks.task import Examples, SiteData
from flare_sparse.training import LocalTask, build_site
from flare_sparse.wire.ledger import Ledger

BOUND = 1.25
RUN = "0" * 16


class Rounds:
    """A method at one site, round by round; the site has no test examples, so nothing is evaluated."""

    def __init__(self, name: str, rank: int, settings: dict[str, Any], options: argparse.Namespace):
        adapter = {"rank": rank}
        task = TASKS["text_classification"]({"base": options.base, "adapter": adapter, "max_length": 32})
        layout, weights = build_initial_model(task, 1)
        rows = task.cohort(options.data).ids
        rows = rows[:: len(rows) // (2 * options.examples)]
        examples = task.load(SiteData("site-1", options.data, rows), 1)
        train = torch.utils.data.Subset(examples.train, range(options.examples))
        site = build_site(
            LocalTask.open("site-1", task, Examples(train, torch.utils.data.Subset(examples.test, [])), layout, 1)
        )
        training = {"epochs": 5, "batch_size": 32, "optimizer": "adamw", "lr": 5e-4, "weight_decay": 0.01}
        config = {"rounds": 1000, "training": training, **settings}
        self.method = METHODS[name](METHODS[name].Config.model_validate(config), layout, 1)
        self.server = ServerEndpoint(layout, RUN, "float32", Ledger())
        self.site = SiteEndpoint(site, self.method, RUN, "float32")
        self.state = self.method.init(weights, ["site-1"])

    def time_next(self) -> float:
        """Run one round and return its processor seconds."""
        began = time.process_time()
        attempt = self.server.encode_requests(self.method.ask(self.state, ["site-1"]) or {})
        request = self.site.receive(attempt.messages["site-1"])
        update = self.site.answer(request)
        data = self.site.encode(request, update).data
        contribution = self.server.decode("site-1", data, update.num_examples, update.metrics)
        self.state = self.method.learn(self.state, [contribution])
        return time.process_time() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--base", default="all-MiniLM-L6-v2")
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    fl_lora = Rounds("fedavg", 8, {}, options)
    lora_a2 = Rounds("lora_a2", 16, {"rank": 8}, options)
    spent: dict[str, list[float]] = {"FL+LoRA": [], "LoRA-A2, B": [], "LoRA-A2, A": []}
    for _ in range(options.repeats):
        spent["LoRA-A2, B"].append(lora_a2.time_next())
        spent["FL+LoRA"].append(fl_lora.time_next())
        spent["LoRA-A2, A"].append(lora_a2.time_next())
    median = {name: statistics.median(seconds) for name, seconds in spent.items()}
    for name, seconds in median.items():
        print(f"{name}: {seconds:.2f} s ({min(spent[name]):.2f} to {max(spent[name]):.2f})")
    ratio = (median["LoRA-A2, B"] + median["LoRA-A2, A"]) / 2 / median["FL+LoRA"]
    print(f"LoRA-A2 / FL+LoRA: {ratio:.3f}, bound {BOUND}, paper 1.17")
    return int(ratio > BOUND)


if __name__ == "__main__":
    sys.exit(main())
