"""FLARE's FedAvg with components of SCBF: of each update only the channels that changed most leave a site.

Run it: python job.py. What it saved: flare-sparse report workspace. Other components: docs/components.md.
"""

from model import Net
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv

from flare_sparse.components import ChannelUpload, SelectiveSum, SparseExchange, add_components


def main():
    """Run two sites in FLARE's simulator; recipe.export("jobs") writes the job for a federation instead."""
    recipe = FedAvgRecipe(
        name="study",
        min_clients=2,
        num_rounds=3,
        model=Net(),
        train_script="client.py",
        aggregator=SelectiveSum(aggregation="mean", min_sites=2),
    )
    add_components(recipe, exchange=SparseExchange(), client_output=[ChannelUpload(budget=0.3, model=Net())])
    recipe.execute(SimEnv(num_clients=2, workspace_root="workspace"))


if __name__ == "__main__":
    main()
