"""Memory for the updates of a round: those that do not fit into it wait in files until the server aggregates them."""

import logging
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ...core.exchange import Patch
from ...core.mask import Mask

_LOG = logging.getLogger(__name__)

WINDOW_BYTES = 2**30
"""Bytes of the updates of a round that stay in memory."""


class UpdateStore:
    """Keeps the updates of a round, whose number grows with the sites, in bounded memory.

    The sum over the sites cannot start before the last update has arrived: the weight of the first site is n_k over the
    sum of n_k of all sites that contribute, and an update is rejected by its norm against those of all others. Updates
    added with other weights, or subtracted again, would end in other bits. So the server keeps each update until the
    round is decided, and then reads one after the other, in the order of names.

    Each site that is asked has an equal part of the window. A larger update is written to a file without a name, which
    is mapped into memory: the pages belong to the file, so the system takes them back whenever memory is short, and
    the file's space is freed with the update, or with the process.

    Args:
        window_bytes: bytes of the updates of a round that stay in memory.
        folder: folder of the files, on a disk; None: the system's folder for temporary files.
    """

    def __init__(self, window_bytes: int = WINDOW_BYTES, folder: Path | None = None):
        self.window_bytes, self.folder = window_bytes, folder
        self._num_sites = 1
        self._empty: Patch | None = None

    def set_num_sites(self, num_sites: int, *, is_retry: bool) -> None:
        """Divide the window among the sites of a request; a retry asks some of them again."""
        # The updates of the first attempt may still be held, so a retry must not give the same memory out twice.
        self._num_sites = max(num_sites, self._num_sites) if is_retry else num_sites

    def keep(self, patch: Patch, mask: Mask | None) -> Patch:
        """Return the patch of an update, in memory or in a file.

        Args:
            patch: decoded and validated update.
            mask: mask that the update had to have, which all of them then share; None: each update has its own.
        """
        if not patch.mask.count:
            # An update of metrics alone would hold a byte per entry of the model to say that it selects none.
            self._empty = self._empty if self._empty and self._empty.mask.size == patch.mask.size else patch
            return self._empty
        # A selection of its own has a byte per entry of the model, and its indices have eight per selected one.
        own_bytes = patch.mask.size + 8 * patch.mask.count if mask is None else 0
        if own_bytes + 4 * patch.mask.count <= self.window_bytes // self._num_sites:
            return replace(patch, mask=mask or patch.mask)
        try:
            own = Mask.from_indices(self._map(patch.mask.bits), self._map(patch.mask.indices)) if mask is None else mask
            return Patch(self._map(patch.values), own, patch.base)
        except (OSError, RuntimeError) as error:
            # A full disk must not cost a site its update while there is memory.
            _LOG.warning("an update stays in memory, it cannot be written to %s: %s", self.folder or "disk", error)
            return patch

    def _map(self, tensor: Tensor) -> Tensor:
        """Return the tensor, mapped from a file without a name.

        Raises:
            OSError: it cannot be written.
            RuntimeError: it cannot be mapped.
        """
        with tempfile.TemporaryFile(dir=self.folder) as file:
            file.write(tensor.detach().contiguous().numpy().data)
            file.flush()
            # torch closes its descriptor after mapping, so many updates do not use up those of the process.
            return torch.from_file(f"/dev/fd/{file.fileno()}", shared=False, size=tensor.numel(), dtype=tensor.dtype)
