"""Updates that a run keeps for an audit are read back as the server decoded them."""

from __future__ import annotations

from pathlib import Path

import torch

from flare_sparse.core.exchange import Contribution, Patch
from flare_sparse.core.mask import Mask
from flare_sparse.results.runs.record import read_updates, write_updates


def test_sparse_updates_are_read_back_in_the_order_of_rounds(tmp_path: Path) -> None:
    bits = torch.arange(11) % 3 == 0
    patch = Patch(torch.tensor([1.5, -2, 3, 4]), Mask(bits))
    for number in (2, 10):
        write_updates(tmp_path / "updates", number, [Contribution("site-1", patch, "delta", 5)])
    metrics = Contribution("site-2", Patch(torch.zeros(0), Mask(torch.zeros(11, dtype=torch.bool))), "metrics", 5)
    write_updates(tmp_path / "updates", 3, [metrics])
    updates = list(read_updates(tmp_path / "updates"))
    assert [(u.round, u.site, u.content) for u in updates] == [(2, "site-1", "delta"), (10, "site-1", "delta")]
    assert updates[0].values.tolist() == [1.5, 0, 0, -2, 0, 0, 3, 0, 0, 4, 0]


def test_run_without_a_record_has_no_updates(tmp_path: Path) -> None:
    assert list(read_updates(tmp_path / "updates")) == []
