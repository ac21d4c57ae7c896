"""Selection by rate and by budget (docs/algorithms.md, section 3.11, invariants 2 and 4 to 7; section 3.6)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import count_cases
from torch import Tensor, nn

from flare_sparse.compute.structure.graph import build_channel_graph
from flare_sparse.core.errors import SelectionError
from flare_sparse.core.params import Layout
from flare_sparse.methods.scores.scbf.groups import Biases, Groups, Selection
from flare_sparse.methods.scores.scbf.paths import compute_energies, list_norms
from flare_sparse.methods.scores.scbf.selection import ChannelGroups, NeuronGroups, _select_top, build_groups
from flare_sparse.tasks.models import build_model

RATES = st.floats(0, 1)
SELECTIONS = st.sampled_from(["positive", "negative"])
CASES = settings(max_examples=count_cases(60), deadline=None)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 6),
        nn.ReLU(),
        nn.Linear(6, 2),
    )


LAYOUT = Layout.from_module(network())
GROUPS: dict[str, Groups] = {
    "listed": build_groups(LAYOUT),
    "sampled": build_groups(LAYOUT, max_listed=1, sample_size=20_000),
    "layerwise": NeuronGroups(LAYOUT),
}


def random_delta(seed: int, layout: Layout = LAYOUT) -> Tensor:
    return torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
@CASES
@given(seed=st.integers(0, 2**20), rates=st.tuples(RATES, RATES))
def test_higher_rate_reveals_more_and_negative_selection_less(name: str, seed: int, rates: tuple[float, float]) -> None:
    low, high = sorted(rates)
    groups, delta = GROUPS[name], random_delta(seed)
    for selection in ("positive", "negative"):
        assert groups.select_by_rate(delta, low, selection, generator()) <= groups.select_by_rate(
            delta, high, selection, generator()
        )
    assert groups.select_by_rate(delta, low, "negative", generator()) <= groups.select_by_rate(
        delta, low, "positive", generator()
    )


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("selection", ["positive", "negative"])
def test_rate_1_reveals_everything(name: str, selection: Selection) -> None:
    assert GROUPS[name].select_by_rate(random_delta(1), 1.0, selection, generator()).is_full


@CASES
@given(st.integers(0, 2**20))
def test_one_path_reveals_one_row_and_one_connection_of_each_later_layer(seed: int) -> None:
    layout = Layout.from_module(build_model("mlp", features=9, hidden=(5, 4), outputs=3))
    revealed = build_groups(layout).select_by_rate(random_delta(seed, layout), 1e-9, "positive", generator()).bits
    weights = {
        e.name: t
        for e, t in zip(layout.tensors, layout.unflatten(revealed).values(), strict=True)
        if e.role == "weight"
    }
    first, second, third = weights.values()
    assert first.all(1).sum() == first.any(1).sum() == 1
    assert (int(second.sum()), int(third.sum())) == (1, 1)
    biases = sum(
        int(t.sum())
        for e, t in zip(layout.tensors, layout.unflatten(revealed).values(), strict=True)
        if e.role == "bias"
    )
    assert biases == 3


@pytest.mark.parametrize("name", GROUPS)
@CASES
@given(seed=st.integers(0, 2**20), rate=RATES, selection=SELECTIONS, factor=st.sampled_from([-1.0, 4.0, -0.5, 1024.0]))
def test_scale_and_sign_of_the_delta_do_not_change_the_selection(
    name: str, seed: int, rate: float, selection: Selection, factor: float
) -> None:
    delta = random_delta(seed)
    assert GROUPS[name].select_by_rate(delta, rate, selection, generator()) == GROUPS[name].select_by_rate(
        factor * delta, rate, selection, generator()
    )


@CASES
@given(st.integers(0, 2**20), RATES, SELECTIONS)
def test_permuting_neurons_permutes_the_selection(seed: int, rate: float, selection: Selection) -> None:
    delta = random_delta(seed)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))

    def permuted(vector: Tensor) -> Tensor:
        tensors = {name: t.clone() for name, t in LAYOUT.unflatten(vector).items()}
        for name in tensors:
            if name.startswith(("0.", "1.")):
                tensors[name] = tensors[name][order]
        tensors["5.weight"] = tensors["5.weight"].view(6, 4, 9)[:, order].reshape(6, 36)
        return LAYOUT.flatten(tensors)

    revealed = GROUPS["listed"].select_by_rate(delta, rate, selection, generator()).bits
    assert torch.equal(
        permuted(revealed), GROUPS["listed"].select_by_rate(permuted(delta), rate, selection, generator()).bits
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("biases", ["selected", "all", "never"])
@CASES
@given(seed=st.integers(0, 2**20), fraction=st.floats(0, 0.9))
def test_budget_is_met_exactly(name: str, biases: Biases, seed: int, fraction: float) -> None:
    if isinstance(GROUPS[name], NeuronGroups):
        groups: Groups = NeuronGroups(LAYOUT, biases)
    else:
        groups = ChannelGroups(LAYOUT, build_channel_graph(LAYOUT), biases)
    revealed = groups.select_by_budget(random_delta(seed), fraction)
    always = 8 if isinstance(groups, NeuronGroups) else 0  # there, the norm's scale and shift belong to no unit
    if biases == "all":
        always = sum(e.size for e in LAYOUT.tensors if e.role in ("bias", "norm"))
    budget = int(fraction * LAYOUT.num_parameters + 1e-9)
    assert int(revealed.bits[: LAYOUT.num_parameters].sum()) == max(budget, always)


@CASES
@given(st.integers(0, 2**20), st.floats(0.02, 0.98))
def test_budget_takes_the_most_active_paths_first(seed: int, rate: float) -> None:
    """A budget of as many parameters as a rate reveals selects the same parameters, biases aside."""
    groups = ChannelGroups(LAYOUT, build_channel_graph(LAYOUT), "never")
    delta = random_delta(seed)
    by_rate = groups.select_by_rate(delta, rate, "positive", generator())
    parameters = by_rate.bits[: LAYOUT.num_parameters]
    by_budget = groups.select_by_budget(delta, int(parameters.sum()) / LAYOUT.num_parameters)
    assert torch.equal(by_budget.bits[: LAYOUT.num_parameters], parameters)


def test_last_group_of_a_budget_reveals_its_largest_deltas() -> None:
    layout = Layout.from_module(nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 1)))
    delta = layout.flatten(
        {
            "0.weight": torch.tensor([[1.0, 2, 3, 4], [0.1, 0.1, 0.1, 0.1]]),
            "0.bias": torch.zeros(2),
            "2.weight": torch.tensor([[1.0, 1.0]]),
            "2.bias": torch.zeros(1),
        }
    )
    revealed = layout.unflatten(
        ChannelGroups(layout, build_channel_graph(layout), "never").select_by_budget(delta, 2 / 13).bits
    )
    assert revealed["0.weight"].tolist() == [[False, False, True, True], [False] * 4]


@pytest.mark.parametrize("biases", ["selected", "never", "all"])
def test_biases_follow_the_setting_and_statistics_their_unit(biases: Biases) -> None:
    groups = ChannelGroups(LAYOUT, build_channel_graph(LAYOUT), biases)
    revealed = LAYOUT.unflatten(groups.select_by_rate(random_delta(2), 0.02, "positive", generator()).bits)
    units = revealed["0.weight"].flatten(1).any(1)
    assert 0 < int(units.sum()) < 4
    expected = {"selected": units, "never": torch.zeros(4, dtype=torch.bool), "all": torch.ones(4, dtype=torch.bool)}
    for name in ("0.bias", "1.weight", "1.bias"):
        assert torch.equal(revealed[name], expected[biases])
    assert torch.equal(revealed["1.running_mean"], units)


def test_entries_of_no_unit_are_always_revealed() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.layers = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x * self.scale)

    layout = Layout.from_module(Scaled())
    groups = build_groups(layout)
    assert isinstance(groups, NeuronGroups)
    assert "layer by layer" in groups.description
    revealed = layout.unflatten(groups.select_by_rate(random_delta(0, layout), 0.2, "positive", generator()).bits)
    assert bool(revealed["scale"].all())
    assert int(revealed["layers.0.weight"].all(1).sum()) == int(revealed["layers.0.weight"].any(1).sum()) == 1


@pytest.mark.parametrize("name", ["mlp", "image_cnn", "alexnet3d", "brain_age_cnn", "brain_age_cnn_3mm", "resnet32"])
def test_channels_of_ready_made_networks_can_be_traced(name: str) -> None:
    settings = {"features": 20} if name == "mlp" else {}
    assert isinstance(build_groups(Layout.from_module(build_model(name, **settings))), ChannelGroups)


class DeepBranch(nn.Module):
    """A network with a branch that ends, of more paths than a list can have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.branch = nn.Sequential(nn.Linear(8, 512), *(nn.Linear(512, 512) for _ in range(8)))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        self.branch(hidden)
        return self.last(hidden)


def test_branch_that_ends_is_not_revealed_however_many_paths_it_has() -> None:
    layout = Layout.from_module(DeepBranch())
    groups = build_groups(layout, sample_size=1000)
    assert isinstance(groups, ChannelGroups)
    assert (round(groups.num_paths), groups.is_exact) == (16, False)
    revealed = groups.select_by_rate(random_delta(3, layout), 0.5, "positive", generator())
    branch = layout.select(lambda spec: spec.name.startswith("branch"))
    assert revealed.count > 0
    assert not bool((revealed.bits & branch).any())


@pytest.mark.parametrize("name", GROUPS)
def test_delta_that_is_not_finite_raises(name: str) -> None:
    delta = random_delta(1)
    delta[3] = float("nan")
    with pytest.raises(SelectionError, match=r"1 of \d+ entries of the delta are not finite"):
        GROUPS[name].select_by_rate(delta, 0.5, "positive", generator())
    with pytest.raises(SelectionError, match="not finite"):
        GROUPS[name].select_by_budget(delta, 0.5)


def test_budget_beyond_the_parameters_without_biases_raises() -> None:
    groups = ChannelGroups(LAYOUT, build_channel_graph(LAYOUT), "never")
    with pytest.raises(SelectionError, match="may be revealed: lower the budget"):
        groups.select_by_budget(random_delta(1), 1.0)


def test_number_of_paths_and_selected_paths_of_the_papers_network() -> None:
    """docs/algorithms.md, section 8, vector 5."""
    layout = Layout.from_module(build_model("mlp", features=2917, hidden=(64, 32)))
    weights = sum(e.size for e in layout.tensors if e.role == "weight")
    assert (weights, sum(e.size for e in layout.tensors if e.role == "bias")) == (188_768, 97)
    groups = build_groups(layout)
    assert isinstance(groups, ChannelGroups)
    assert (round(groups.num_paths), groups.is_exact) == (2048, True)
    graph = build_channel_graph(layout)
    norms = list_norms(graph, compute_energies(graph, layout, random_delta(0, layout)))[-1]
    assert norms.view(64, 32, 1).shape == (64, 32, 1)
    assert int(_select_top(norms, 0.3, norms > -1).sum()) == 615


@pytest.mark.parametrize("blocks", [1, 2])
def test_layerwise_groups_of_a_transposed_convolution_are_its_output_channels(blocks: int) -> None:
    """Its weight is (in, out / groups, ...): the gradient of one output channel scores that channel and its bias."""
    module = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=blocks))
    layout = Layout.from_module(module)
    groups = build_groups(layout)
    assert isinstance(groups, NeuronGroups)
    for channel in range(6):
        module.zero_grad()
        module(torch.randn(2, 4, 5, 5))[:, channel].square().sum().backward()
        delta = layout.flatten({name: p.grad for name, p in module.named_parameters() if p.grad is not None})
        mask = groups.select_by_rate(delta, 0.1, "positive", generator())
        selected = layout.unflatten(mask.bits)
        assert torch.equal(selected["0.bias"], torch.arange(6) == channel)
        assert int(selected["0.weight"].sum()) == 4 // blocks * 9
        assert bool((selected["0.weight"] == (layout.unflatten(delta)["0.weight"] != 0)).all())
