"""SCBF (Shao et al. 2020), Algorithm 2: each site reveals only the channels that moved most; the server adds them up.

"Stochastic Channel-Based Federated Learning With Neural Network Pruning for Medical Data Privacy Preservation", JMIR
Form. Res. 4(12):e17265; docs/algorithms.md, section 3. A site reveals where its data moved the model most. The upload
has no noise and gives no formal privacy guarantee (section 3.12, deviation 12).
"""

from __future__ import annotations

from typing import final

from .support.channels import ChannelConfig, ChannelMethod


@final
class SCBF(ChannelMethod[ChannelConfig]):
    """Sites return the entries on their most changed channel paths; the server adds the deltas."""

    name = "scbf"
    Config = ChannelConfig
    trains_all_entries = True
