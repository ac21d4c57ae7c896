"""FedAvg-FT (Cheng et al. 2021; NeuroSFL's dense baseline): FedAvg, then every site fine-tunes for itself.

"Fine-tuning is Fine in Federated Learning", arXiv 2108.07313; docs/algorithms.md, section 7.2.
"""

from typing import final

from pydantic import Field

from .support.averaging import FedAvgConfig, FedAvgRounds
from .support.finetuning import FineTuning


class FedAvgFTConfig(FedAvgConfig):
    finetune: FineTuning = Field(
        default_factory=FineTuning, description="training at each site after the last round, whose model stays there"
    )


@final
class FedAvgFT(FedAvgRounds):
    """Rounds as in FedAvg; at the end every site reports the metrics of its fine-tuned model, which stays local."""

    name = "fedavg_ft"
    Config = FedAvgFTConfig
