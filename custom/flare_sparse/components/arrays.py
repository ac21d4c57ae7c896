"""Named arrays of FLARE's messages and vectors of this package: conversions and checks of all components.

Arrays may be of numpy or of torch. Masks travel by tensor name, one bit per entry: two ends need not order the tensors
of a model in the same way.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from nvflare.apis.controller_spec import ControllerSpec as Controller
from nvflare.apis.dxo import DXO, DataKind, MetaKey
from nvflare.apis.executor import Executor
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from torch import Tensor

from ..core.errors import FlareSparseError, list_first
from ..core.exchange import Patch
from ..core.mask import Mask
from ..core.params import Layout, Role, TensorSpec
from ..training.script_exchange import TRAINABLE

Arrays = Mapping[str, Any]
MODELS = (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF)

MASK = TRAINABLE
"""Key of a packed mask in the meta of a model or an update: the entries that train, or that a site reveals."""


class ComponentError(FlareSparseError, ValueError):
    """A component cannot serve a message. The text names component, problem, remedy, and the file of the job."""

    code = "E_COMPONENT"

    def __init__(self, component: object, problem: str, remedy: str):
        name = component if isinstance(component, str) else type(component).__name__
        text = f"{name}: {problem}; {remedy}"
        super().__init__(text if "config_fed_" in text else f"{text} ({_name_file(component)} of the job)")


def _name_file(component: object) -> str:
    """Return the file of a job that names a component; filters stand in both."""
    if isinstance(component, (ModelAggregator, Controller)):
        return "config_fed_server.json"
    return "config_fed_client.json" if isinstance(component, Executor) else "config_fed_client.json or _server.json"


def guess_layout(arrays: Arrays) -> Layout:
    """Return a layout of the float arrays by their names and shapes alone; it has no skeleton, so no channel paths."""

    def guess_role(name: str) -> Role:
        prefix, _, last = name.rpartition(".")
        is_weighted = np.ndim(arrays.get(f"{prefix}.weight" if prefix else "weight", 0)) > 1
        if last in ("running_mean", "running_var"):
            return "buffer"
        return ("bias" if last == "bias" else "weight" if last == "weight" else "other") if is_weighted else "norm"

    specs = [TensorSpec(n, tuple(a.shape), guess_role(n)) for n, a in arrays.items() if is_float(a)]
    return Layout(tuple(sorted(specs, key=lambda spec: spec.role == "buffer")))


def is_float(array: Any) -> bool:
    """Return whether a value is an array of floats."""
    if isinstance(array, Tensor):
        return array.is_floating_point()
    return isinstance(array, np.ndarray) and np.issubdtype(array.dtype, np.floating)


def check_plain(dxo: DXO, component: object) -> None:
    """Refuse values that another filter has processed, and values that are no arrays.

    Raises:
        ComponentError: they are encrypted, quantised, or of another type.
    """
    processed = dxo.get_meta_prop(MetaKey.PROCESSED_ALGORITHM)
    foreign = next((name for name, a in dxo.data.items() if not isinstance(a, (np.ndarray, Tensor, np.generic))), None)
    if processed is None and foreign is None:
        return
    found = f"another filter has processed the values ({processed})" if processed else (
        f"{foreign!r} is of type {type(dxo.data[foreign]).__name__}, no array"
    )  # fmt: skip
    raise ComponentError(
        component,
        f"{found}; a selection cannot be made from encrypted or quantised values",
        "put this filter before that one in config_fed_client.json, and behind it where messages arrive, or leave one "
        "of the two out",
    )


def to_vector(arrays: Arrays, layout: Layout, component: object, *, fills: bool = False) -> Tensor:
    """Return named arrays as one float32 vector ``(P,)``; arrays that the layout does not have are left out.

    With ``fills`` a missing tensor is one of zeros.

    Raises:
        ComponentError: a tensor is missing or has another shape: the arrays are of another network.
    """
    tensors = {spec.name: torch.zeros(spec.shape) for spec in layout.tensors if spec.name not in arrays}
    if tensors and not fills:
        raise ComponentError(
            component,
            f"the message lacks {list_first(tensors, 3)}; it has {list_first(map(str, arrays), 3)}",
            "name the network that the script trains, and leave out filters that remove tensors (ExcludeVars) before "
            "this one",
        )
    read = {
        spec.name: _read_array(arrays[spec.name], spec, component) for spec in layout.tensors if spec.name in arrays
    }
    return layout.flatten(tensors | read)


def _read_array(array: Any, spec: TensorSpec, component: object) -> Tensor:
    """Return an array as float32 on the CPU.

    Raises:
        ComponentError: it is no array of numbers, or has another shape than the tensor of the network.
    """
    try:
        value = torch.as_tensor(array).detach().cpu().float()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ComponentError(
            component, f"{spec.name} is of type {type(array).__name__}, no array of numbers", "send arrays"
        ) from error
    if tuple(value.shape) != spec.shape:
        found = f"{spec.name} has the shape {tuple(value.shape)}, expected {spec.shape}"
        raise ComponentError(component, found, "name the network of the script")
    return value


def to_arrays(vector: Tensor, layout: Layout, like: Arrays) -> dict[str, Any]:
    """Return a vector ``(P,)`` as arrays of the types of ``like``, of which arrays without a tensor are kept."""
    views = layout.unflatten(vector)
    return {name: old if name not in views else _convert(views[name].clone(), old) for name, old in like.items()}


def _convert(tensor: Tensor, like: Any) -> Any:
    """Return a tensor as an array of the type of ``like``."""
    if isinstance(like, Tensor):
        return tensor.to(like)
    return tensor.numpy().astype(like.dtype, copy=False)


def hold(sent: Arrays, live: Mapping[str, Tensor], received: Arrays | None) -> dict[str, Any]:
    """Return arrays whose entries outside ``live`` are those of ``received``, bit for bit; None: zeros.

    Args:
        sent: arrays of any dtype.
        live: bool tensors by name; an array without one has no live entry.
        received: arrays of the same names; None where ``sent`` are differences.
    """
    held = {}
    for name, array in sent.items():
        value = torch.as_tensor(array).detach()
        off = torch.zeros((), dtype=value.dtype) if received is None else torch.as_tensor(received[name]).to(value)
        bits = live.get(name)
        value = off.expand_as(value).clone() if bits is None else torch.where(bits.to(value.device), value, off)
        held[name] = value if isinstance(array, Tensor) else value.numpy()
    return held


def pack_mask(mask: Mask, layout: Layout) -> dict[str, bytes]:
    r"""Return a mask as bytes by tensor name, eight entries in each; full tensors are left out.

    Plain bytes, because torch loads a model that FLARE saved with its meta only if that holds no numpy arrays.

    Examples:
        >>> layout = Layout((TensorSpec("a", (2,)), TensorSpec("b", (3,))))
        >>> pack_mask(Mask(torch.tensor([True, True, True, False, True])), layout)
        {'b': b'\xa0'}
    """
    named = layout.unflatten(mask.bits)
    return {name: np.packbits(bits.numpy()).tobytes() for name, bits in named.items() if not bool(bits.all())}


def read_mask(packed: object, layout: Layout, component: object) -> Mask:
    """Return the mask of :func:`pack_mask`, which may be of anybody; full without an entry.

    Raises:
        ComponentError: it is no mask of this layout.
    """
    named = unpack_mask(packed, {spec.name: spec.shape for spec in layout.tensors}, component)
    full = {spec.name: torch.ones(spec.shape, dtype=torch.bool) for spec in layout.tensors}
    return Mask(layout.flatten(full | named))


def unpack_mask(packed: object, shapes: Mapping[str, tuple[int, ...]], component: object) -> dict[str, Tensor]:
    """Return the bool tensors of a packed mask by name; a tensor that it does not name is full.

    Raises:
        ComponentError: it is no mask of tensors of these shapes.
    """
    if not isinstance(packed, Mapping):
        raise ComponentError(component, f"the mask is of type {type(packed).__name__}", "send what pack_mask returns")
    if unknown := sorted(set(map(str, packed)) - set(shapes)):
        raise ComponentError(
            component, f"the mask has {list_first(unknown, 3)}, which the model has not", "it is of another network"
        )
    named = {}
    for name, bits in packed.items():
        shape = shapes[name]
        size = int(np.prod(shape, dtype=np.int64))
        if not isinstance(bits, bytes) or len(bits) != (size + 7) // 8:
            raise ComponentError(
                component, f"the mask of {name} has no {(size + 7) // 8} bytes", "it is of another network"
            )
        named[name] = Mask.from_packed(np.frombuffer(bits, np.uint8), size).bits.view(shape)
    return named


def patch_to_dxo(patch: Patch, layout: Layout, *, is_delta: bool = False, meta: Mapping[str, Any] | None = None) -> DXO:
    """Return a patch as named float32 arrays, zero outside it, with its mask in the meta.

    Examples:
        >>> import torch
        >>> layout = Layout.from_module(torch.nn.Linear(2, 1))
        >>> dxo = patch_to_dxo(Patch(torch.tensor([1.0, 3.0]), Mask(torch.tensor([True, False, True]))), layout)
        >>> dxo.data["weight"], dxo.data["bias"]
        (array([[1., 0.]], dtype=float32), array([3.], dtype=float32))
        >>> dxo_to_patch(dxo, layout).values
        tensor([1., 3.])
    """
    arrays = {name: view.numpy() for name, view in layout.unflatten(patch.to_vector()).items()}
    kind = DataKind.WEIGHT_DIFF if is_delta else DataKind.WEIGHTS
    return DXO(kind, data=arrays, meta={**(meta or {}), MASK: pack_mask(patch.mask, layout)})


def dxo_to_patch(dxo: DXO, layout: Layout) -> Patch:
    """Return the patch of a DXO's arrays and of the mask in its meta; without a mask, of all entries.

    Raises:
        ComponentError: it holds other values, or those of another network.
    """
    if dxo.data_kind not in MODELS:
        raise ComponentError("dxo_to_patch", f"the kind is {dxo.data_kind}", "give WEIGHTS or WEIGHT_DIFF")
    check_plain(dxo, "dxo_to_patch")
    packed = dxo.get_meta_prop(MASK)
    mask = Mask.full(layout.size) if packed is None else read_mask(packed, layout, "dxo_to_patch")
    return Patch.from_vector(to_vector(dxo.data, layout, "dxo_to_patch"), mask)
