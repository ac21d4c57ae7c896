"""What a training script may use beside FLARE's Client API: ``from flare_sparse import client as sparse``.

Every function also works in a job of FLARE's own recipes, where no entry is masked and no scores are asked for, so one
script serves both.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .core.errors import ConfigError, require_extra
from .core.mask import Mask
from .core.params import Layout, match_state_dict
from .privacy.dp.scripts import ScriptBudget
from .tasks.data.source import find_site_data
from .tasks.task import SiteData
from .training.loop import disable_dropout
from .training.private import check_private_network
from .training.script_exchange import GRADIENTS, REQUEST_KIND, TRAINABLE

__all__ = ["compute_scores", "keep_ranks", "make_private", "masked", "send_scores", "site_data", "wants_scores"]

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def site_data(site: str = "") -> SiteData:
    """Return the location of this site's data, which the site itself has set (docs/hospital.md).

    Args:
        site: name of the site; empty: the one of the running job, after ``flare.init()``.

    Raises:
        DataError: the site has set no location.

    Examples:
        >>> os.environ["FLARE_SPARSE_DATA"] = "patients.csv"
        >>> site_data("site-1").path.name
        'patients.csv'
    """
    if not site:
        import nvflare.client as flare

        site = flare.get_site_name()
    return find_site_data(site, None, os.environ)


def make_private(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], *, epochs: int = 1
) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """Return network, optimiser and loader of a loop that trains with differential privacy (docs/own-script.md).

    The loop stays as it is: one step for each minibatch of the returned loader, with the mean loss of the minibatch.
    Opacus clips the gradient of each record; the noise comes from the site's secret, and each epoch is charged to the
    site's ledger before its first minibatch. Call it once, before the first round.

    Args:
        model: the network; it is changed in place and returned.
        optimizer: optimiser of its parameters.
        loader: loader of the training records, each of one subject, over a dataset with a length.
        epochs: passes over the loader in each round, from which the noise of ``privacy.epsilon`` is computed.

    Raises:
        ConfigError: the job has no budget, the network mixes the records of a minibatch, or Opacus is not installed.
        BudgetSpent: later, from the loader: another epoch would exceed the job's budget or the site's own.

    Examples:
        In a job the site names the budget to the script; here the example does.

        >>> from pathlib import Path
        >>> from torch.utils.data import TensorDataset
        >>> from flare_sparse.privacy.dp.account import PrivacyAccount
        >>> from flare_sparse.privacy.dp.config import PrivacyConfig
        >>> settings = PrivacyConfig(noise_multiplier=2.0, unit="record")
        >>> budget = ScriptBudget(settings, PrivacyAccount(Path("account")), trainings=1, run="run", job="job")
        >>> os.environ["FLARE_SPARSE_PRIVACY"] = budget.write(Path("budget.json"))
        >>> net, records = nn.Linear(2, 1), TensorDataset(torch.ones(8, 2), torch.zeros(8, 1))
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> net, optimizer, loader = make_private(net, optimizer, DataLoader(records, batch_size=4))
        >>> for inputs, targets in loader:
        ...     optimizer.zero_grad()
        ...     nn.functional.mse_loss(net(inputs), targets).backward()
        ...     optimizer.step()
        >>> budget.count_charges()
        1
    """
    check_private_network(model)
    budget = ScriptBudget.read()
    with require_extra("make_private", "privacy"):
        from .privacy.dp import engine
    private, charged = engine.make_private(budget, model, optimizer, loader, epochs)
    return model, private, charged


@contextmanager
def masked(net: nn.Module, optimizer: torch.optim.Optimizer, received: Any) -> Iterator[None]:
    """Keep the entries of ``net`` that are off at their received values while the block trains.

    Gradients of these entries are zero, so that they enter no norm and no moment of the optimiser, and every step of
    the optimiser restores them: momentum and weight decay cannot move them. Without this block the entries that are off
    are discarded after training, and the others were trained beside them.

    Args:
        net: the network that trains, also wrapped by ``DistributedDataParallel``; its ``state_dict()`` has the names
            of the received tensors.
        optimizer: its optimiser.
        received: model that ``flare.receive()`` returned.

    Examples:
        >>> from types import SimpleNamespace
        >>> net = nn.Linear(2, 1, bias=False)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        >>> start = torch.tensor([[1.0, 2.0]])
        >>> _ = net.load_state_dict({"weight": start})
        >>> trainable = {TRAINABLE: {"weight": torch.tensor([[True, False]])}}
        >>> with masked(net, optimizer, SimpleNamespace(params={"weight": start}, meta=trainable)):
        ...     net(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        >>> net.weight.tolist()
        [[0.0, 2.0]]
    """
    # The optimiser of make_private wraps the one that takes the step.
    optimizer = getattr(optimizer, "original_optimizer", optimizer)
    trainable: Mapping[str, Any] = (received.meta or {}).get(TRAINABLE) or {}
    frozen: list[tuple[nn.Parameter, Tensor, Tensor]] = []
    for name, parameter in _name_parameters(net).items():
        live = _read_live(trainable[name], parameter) if name in trainable else None
        if live is not None and not bool(live.all()):
            start = torch.as_tensor(received.params[name]).to(parameter)
            frozen.append((parameter, ~live.to(parameter.device), start))

    def restore(*_: Any) -> None:
        with torch.no_grad():
            for parameter, off, start in frozen:
                torch.where(off, start, parameter, out=parameter)

    hooks = [
        parameter.register_hook(_build_gradient_mask(off)) for parameter, off, _ in frozen if parameter.requires_grad
    ]
    hooks.append(optimizer.register_step_post_hook(restore))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def wants_scores(received: Any) -> bool:
    """Return whether the method asks for scores of the received model; answer with :func:`send_scores`.

    Examples:
        >>> from types import SimpleNamespace
        >>> wants_scores(SimpleNamespace(meta={REQUEST_KIND: "score"}))
        True
    """
    return (received.meta or {}).get(REQUEST_KIND) == "score"


def send_scores(
    net: nn.Module,
    batches: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    meta: Mapping[str, Any] | None = None,
) -> None:
    """Send the gradients of the loss on some minibatches, from which the site computes exact SNIP scores.

    Dropout is off and normalisation uses the statistics of the minibatch (docs/algorithms.md, section 1.9). The network
    keeps its values. Only scores leave the site, never the gradients of a single minibatch.

    Args:
        net: network with the received values.
        batches: minibatches; one is SNIP, several are averaged (docs/algorithms.md, section 5.4). All of their
            gradients are in memory at once.
        loss: returns the mean loss of a minibatch, a scalar.
        meta: meta as in ``flare.FLModel``, with the number that weighs the site, such as ``NUM_STEPS_CURRENT_ROUND``.

    Raises:
        ConfigError: there is no minibatch.

    Examples:
        >>> send_scores(nn.Linear(2, 1), [], lambda net, batch: net(batch).mean())
        Traceback (most recent call last):
        ...
        flare_sparse.core.errors.ConfigError: send_scores: there is no minibatch; give at least one
    """
    import nvflare.client as flare

    exact = list(_iterate_gradients(net, batches, loss))
    if not exact:
        raise ConfigError("send_scores: there is no minibatch; give at least one")
    # FLARE returns the same model again until something is sent, and None in the other processes of torchrun.
    received = flare.receive()
    if received is not None and not wants_scores(received):
        raise ConfigError(
            "send_scores: this job asks for no gradients, and they would leave the site as they are; send what "
            "compute_scores returns"
        )
    params = {name: torch.stack([gradients[name] for gradients, _ in exact]) for name in exact[0][0]}
    flare.send(flare.FLModel(params=params, meta={**(meta or {}), GRADIENTS: [size for _, size in exact]}))


def compute_scores(
    net: nn.Module, batches: Iterable[Any], loss: Callable[[nn.Module, Any], Tensor]
) -> dict[str, Tensor]:
    """Return SNIP's score ``|w * dL/dw|`` of each entry of a network, by tensor name.

    For the task ``score`` of a job with ``NeuroSFLController``:

        if flare.get_task_name() == "score":
            scores = compute_scores(net, batches, loss)
            flare.send(flare.FLModel(params=scores, params_type=ParamsType.DIFF))

    ``ParamsType.DIFF`` keeps FLARE from subtracting the model from them. Dropout is off and normalisation uses the
    statistics of the minibatch, whose running statistics stay as they are (docs/algorithms.md, section 1.9).

    Args:
        net: network with the received values, which it keeps.
        batches: minibatches; one is SNIP, several are averaged (docs/algorithms.md, section 5.4).
        loss: returns the mean loss of a minibatch, a scalar.

    Raises:
        ConfigError: there is no minibatch.

    Examples:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> _ = net.load_state_dict({"weight": torch.tensor([[1.0, -2.0]])})
        >>> compute_scores(net, [torch.ones(4, 2)], lambda net, batch: net(batch).mean())
        {'weight': tensor([[1., 2.]])}
    """
    from .methods.neurosfl import NeuroSFL
    from .methods.scores.snip import compute_saliency

    batches = list(batches)
    if not batches:
        raise ConfigError("compute_scores: there is no minibatch; give at least one")
    network = net.module if isinstance(net, _WRAPPERS) else net
    layout = Layout.from_module(network)
    largest = max(map(_count_examples, batches))

    def iterate_vectors() -> Iterator[tuple[Tensor, float]]:
        for gradients, size in _iterate_gradients(network, batches, loss):
            rest = {spec.name: torch.zeros(spec.shape) for spec in layout.tensors if spec.name not in gradients}
            yield layout.flatten({**gradients, **rest}), size / largest

    factors = NeuroSFL(NeuroSFL.Config(rounds=1, sparsity=0), layout).get_score_factors(_read_vector(network, layout))
    return layout.unflatten(compute_saliency(iterate_vectors(), factors))


def keep_ranks(received: Any, net: nn.Module, rank: int) -> None:
    """Narrow the mask of a LoRA-A2 task to the slots that a trial moved most; ``masked`` trains just these then.

    For jobs with ``RankUpload``, which lets no other entry leave (docs/algorithms.md, sections 4.3 and 4.4).

    Args:
        received: model that ``flare.receive()`` returned; the mask in its meta is replaced.
        net: the network after the trial.
        rank: r_k, number of slots by adapted module.

    Raises:
        ConfigError: the network has no adapters.

    Examples:
        >>> from types import SimpleNamespace
        >>> from flare_sparse.tasks.models.adapters import AdapterConfig, add_adapters
        >>> net = add_adapters(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)), AdapterConfig(rank=2))
        >>> params = {spec.name: torch.zeros(spec.shape) for spec in Layout.from_module(net).tensors}
        >>> received = SimpleNamespace(params=params, meta={}, current_round=0)
        >>> keep_ranks(received, net, 1)
        >>> [int(bits.sum()) for bits in received.meta[TRAINABLE].values()]
        [0, 3]
    """
    from .methods.lora_a2 import LoRAA2
    from .methods.scores.ranks import compute_slot_scores, select_slots

    network = net.module if isinstance(net, _WRAPPERS) else net
    layout = Layout.from_module(network)
    method = LoRAA2(LoRAA2.Config(rank=rank), layout)
    start = layout.flatten({spec.name: torch.as_tensor(received.params[spec.name]) for spec in layout.tensors})
    active, slots = method.get_active_factor(received.current_round + 1), method.slots
    scores = compute_slot_scores(slots, _read_vector(network, layout) - start, start, active)
    mask = select_slots(slots, scores, rank, active) | slots.other_entries
    received.meta[TRAINABLE] = {**(received.meta.get(TRAINABLE) or {}), **layout.unflatten(mask.bits)}


def _read_vector(network: nn.Module, layout: Layout) -> Tensor:
    """Return the network's values as a vector ``(P,)``."""
    return layout.flatten({n: v.detach().cpu() for n, v in [*network.named_parameters(), *network.named_buffers()]})


def _iterate_gradients(
    net: nn.Module, batches: Iterable[Any], loss: Callable[[nn.Module, Any], Tensor]
) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Yield the gradients by name and the size of each minibatch; mode and running statistics are restored after."""
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    was_training = {module: module.training for module in net.modules()}
    net.train()
    disable_dropout(net)
    parameters = _name_parameters(net)
    try:
        for batch in batches:
            net.zero_grad(set_to_none=True)
            loss(net, batch).backward()
            gradients = {}
            for name, parameter in parameters.items():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradients[name] = gradient.detach().to_dense().cpu()
            # The forward pass has updated the running statistics, which the next minibatch must not see.
            for name, value in net.named_buffers():
                value.copy_(buffers[name])
            yield gradients, _count_examples(batch)
    finally:
        net.zero_grad(set_to_none=True)
        for module, training in was_training.items():
            module.training = training


def _read_live(bits: Any, parameter: nn.Parameter) -> Tensor:
    """Return the live entries of a parameter; components of FLARE's own jobs send eight of them in a byte."""
    if isinstance(bits, Tensor):
        return bits
    return Mask.from_packed(np.frombuffer(bits, np.uint8), parameter.numel()).bits.view(parameter.shape)


def _name_parameters(net: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names in the ``state_dict()`` of the network inside a wrapper."""
    net = net.module if isinstance(net, _WRAPPERS) else net
    named = dict(net.named_parameters())
    return {sent: named[own] for sent, own in match_state_dict(net).items() if own in named}


def _build_gradient_mask(off: Tensor) -> Callable[[Tensor], Tensor]:
    def mask_gradient(gradient: Tensor) -> Tensor:
        if not gradient.is_sparse:
            return gradient.masked_fill(off, 0)
        # An embedding with sparse=True: a hook must return a gradient of the same layout.
        return gradient.to_dense().masked_fill(off, 0).to_sparse(gradient.sparse_dim())

    return mask_gradient


def _count_examples(batch: Any) -> int:
    """Return the number of examples of a minibatch: the length of its first tensor, 1 without one."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 1
    values = list(batch.values()) if isinstance(batch, Mapping) else batch
    return next((_count_examples(value) for value in values if isinstance(value, Tensor)), 1)
