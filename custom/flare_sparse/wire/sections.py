"""The values section in every format."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..core.exchange import Content, Patch
from ..core.mask import Mask
from ..core.params import Layout
from .formats import FORMATS, ValueType, is_quantized
from .plan import Plan
from .quantized import find_exact_values, measure_quantized, read_quantized, write_quantized
from .shuffled import measure_shuffled, pack_shuffled, unpack_shuffled
from .values import add_residual, read_values, require_finite, write_values

WITHOUT_BASE: ValueType = "int8"
"""Format of weights in a quantized message whose receiver holds no vector: fewer bits lose too much of whole weights,
and the next message sends what this one rounds off."""


@dataclass(frozen=True)
class CodedValues:
    """A values section.

    Attributes:
        section: uint8 ``(n,)``; None: it was written in place.
        residual: ``(P,)`` what the message loses to rounding, with what earlier ones lost elsewhere; None: nothing.
        received: ``(k,)`` the values that the receiver reads, if the format rounds; else None.
    """

    section: np.ndarray | None
    residual: Tensor | None
    received: Tensor | None = None


def code_values(
    patch: Patch,
    plan: Plan,
    content: Content,
    values: ValueType,
    residual: Tensor | None,
    generator: torch.Generator | None,
) -> CodedValues | None:
    """Return the section of a format that is not plain; None for a plain one, which is written in place.

    The arguments are those of :func:`~flare_sparse.wire.codec.encode`.
    """
    if patch.encrypted is not None:
        return CodedValues(patch.encrypted.data.numpy(), residual)
    dtype = FORMATS[values].dtype
    if dtype is None:
        base_vector = plan.base_vector if content == "weights" else None
        return _code_quantized(patch, plan.layout, values, residual, base_vector, generator)
    return _code_compressed(patch, dtype, residual) if FORMATS[values].is_compressed else None


def _code_quantized(
    patch: Patch,
    layout: Layout,
    value_type: ValueType,
    residual: Tensor | None,
    base_vector: Tensor | None,
    generator: torch.Generator | None,
) -> CodedValues:
    """Return the section of a patch with few bits a value.

    Args:
        patch: the patch.
        layout: layout of the model; entries of its buffers are not rounded.
        value_type: a quantized format.
        residual: ``(P,)`` what earlier messages lost to rounding; None: nothing.
        base_vector: ``(P,)`` the receiver's vector, to which the section has the differences; None: the section has the
            values themselves.
        generator: source of the rounding.

    Raises:
        RejectedMessage: a value is not finite, or too large for the format.
        ValueError: there is no generator.
    """
    if generator is None:
        raise ValueError(f"generator: {value_type} rounds at random; give a generator that every attempt seeds alike")
    mask, is_exact = patch.mask, find_exact_values(patch.mask, layout)
    reference = _take_reference(mask, base_vector)
    # Error feedback, as in the plain formats; buffers have no residual, because they are not rounded.
    new_residual, with_residual = add_residual(patch, residual)
    target = with_residual.detach().numpy()
    written = write_quantized(patch.values.detach().numpy(), target, reference, is_exact, value_type, generator)
    received = torch.from_numpy(written.values)
    with_residual -= received
    if is_exact.any():
        with_residual[torch.from_numpy(is_exact)] = 0
    return CodedValues(written.section, mask.put(with_residual, new_residual), received)


def _code_compressed(patch: Patch, dtype: torch.dtype, residual: Tensor | None) -> CodedValues:
    """Return the section of a patch whose values are rounded to a type, compressed without loss.

    Raises:
        RejectedMessage: a value is not finite in this type.
    """
    plain = np.empty(dtype.itemsize * patch.mask.count, np.uint8)
    new_residual, received = write_values(patch, dtype, residual, plain)
    return CodedValues(pack_shuffled(plain, dtype.itemsize), new_residual, received)


def write_section(patch: Patch, layout: Layout, value_type: ValueType, generator: torch.Generator) -> np.ndarray:
    """Return the section of values that no receiver has a base or a residual for, uint8 ``(n,)``.

    Raises:
        RejectedMessage: a value is not finite in this format.
    """
    dtype, width = FORMATS[value_type].dtype, FORMATS[value_type].width
    if dtype is None:
        return write_quantized(
            patch.values.detach().numpy(), patch.values.detach().numpy(), _take_reference(patch.mask, None),
            find_exact_values(patch.mask, layout), value_type, generator,
        ).section  # fmt: skip
    plain = np.empty(width * patch.mask.count, np.uint8)
    write_values(patch, dtype, None, plain)
    return pack_shuffled(plain, width) if FORMATS[value_type].is_compressed else plain


def measure_section(buffer: np.ndarray, scalars: int, value_type: ValueType) -> int:
    """Return the length in bytes of the section of ``scalars`` values at the start of ``buffer``, which may be longer.

    Raises:
        RejectedMessage: the buffer is too short for the section's own length, or that is larger than possible.
    """
    if is_quantized(value_type):
        return measure_quantized(buffer, scalars, value_type)
    width = FORMATS[value_type].width
    return measure_shuffled(buffer, scalars, width) if FORMATS[value_type].is_compressed else width * scalars


def read_section(
    section: np.ndarray, value_type: ValueType, mask: Mask, layout: Layout, base_vector: Tensor | None
) -> Tensor:
    """Return the values, float32 ``(k,)``, of a section whose length :func:`measure_section` has checked.

    Args:
        section: uint8 ``(n,)``, not trusted.
        value_type: format of the section.
        mask: entries of the values.
        layout: the receiver's own layout.
        base_vector: ``(P,)`` the receiver's vector, to which the section has the differences; None: the section has the
            values themselves.

    Raises:
        RejectedMessage: a value is not finite, or the section is not one that a sender writes.
    """
    dtype = FORMATS[value_type].dtype
    if dtype is None:
        reference = _take_reference(mask, base_vector)
        values = read_quantized(section, reference, find_exact_values(mask, layout), value_type)
        require_finite(values, "values")
        return torch.from_numpy(values)
    plain = unpack_shuffled(section, mask.count, dtype.itemsize) if FORMATS[value_type].is_compressed else section
    return read_values(plain, dtype)


def _take_reference(mask: Mask, base_vector: Tensor | None) -> np.ndarray:
    if base_vector is None:
        return np.zeros(mask.count, np.float32)
    reference = mask.take(base_vector)
    return (reference.clone() if reference is base_vector else reference).detach().numpy()
