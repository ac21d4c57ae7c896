"""The arrays of an update as FLARE's filters read them: built only if a filter reads them."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from ..core.errors import RejectedMessage
from ..core.exchange import Patch
from ..core.params import Layout


# Before the first filter, FLARE walks through all that a result holds, in search of references to data that it has not
# downloaded yet (nvflare.apis.utils.task_utils.apply_filters). It passes over placeholders of loggers; without that
# base class the walk would build the arrays in every round.
class NamedArrays(dict[str, np.ndarray], logging.PlaceHolder):
    """Float32 arrays by tensor name, zero outside a patch.

    A site without filters of its own needs no array, and building them takes a pass over the whole vector. Any access
    to the dictionary builds all arrays first. Code that bypasses the methods, as C code can, finds an empty dictionary,
    which :func:`~flare_sparse.flare.payload.dxo_to_update` rejects.

    Args:
        patch: the values.
        layout: layout of the model.
    """

    def __init__(self, patch: Patch, layout: Layout):
        dict.__init__(self)
        self._patch, self._layout = patch, layout
        self._vector: Tensor | None = None

    @property
    def is_unread(self) -> bool:
        """Whether the arrays have never been read or written."""
        return self._vector is None and not dict.__len__(self)

    @property
    def vector(self) -> Tensor:
        """``(P,)`` memory of the arrays, as long as a filter does not replace one.

        Raises:
            RejectedMessage: code that bypasses the methods has written into the dictionary.
        """
        self.build()
        assert self._vector is not None, "it was built"
        return self._vector

    def build(self) -> None:
        """Build the arrays, unless they are there."""
        if self._vector is None:
            if dict.__len__(self):
                raise RejectedMessage("E_SHAPE", "arrays", "arrays written by the dictionary's methods", "others")
            self._vector = self._patch.to_vector()
            dict.update(self, to_named_arrays(self._vector, self._layout))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy is an ordinary dictionary.
        return dict, (dict(self.items()),)


def _read_first(name: str) -> Callable[..., Any]:
    """Return a method of ``dict`` that builds the arrays before it runs."""
    method = getattr(dict, name)

    def read(self: NamedArrays, *args: Any, **kwargs: Any) -> Any:
        # No assertion reads them: Python's -O would let a privacy filter see no arrays, and pass them on unfiltered.
        self.build()
        return method(self, *args, **kwargs)

    return read


_METHODS = (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__ne__", "__or__"),
    *("__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "copy", "get", "items", "keys", "pop", "popitem"),
    *("setdefault", "update", "values"),
)
for _name in _METHODS:
    setattr(NamedArrays, _name, _read_first(_name))


def to_named_arrays(vector: Tensor, layout: Layout) -> dict[str, np.ndarray]:
    """Return views of a vector ``(P,)`` by tensor name."""
    return {name: tensor.numpy() for name, tensor in layout.unflatten(vector).items()}
