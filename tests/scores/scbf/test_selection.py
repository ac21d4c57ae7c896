"""What a site reveals: ALGORITHMS 2.6, invariants 2 and 4 to 7, and the rule for budgets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flare_sparse.errors import SelectionError
from flare_sparse.mask import Mask
from flare_sparse.models import build
from flare_sparse.params import Layout
from flare_sparse.scores.scbf.groups import Biases, Groups, Selection
from flare_sparse.scores.scbf.selection import ChannelGroups, NeuronGroups, build_groups
from flare_sparse.structure import build_channel_graph

RATES = st.floats(0, 1)
SELECTIONS = st.sampled_from(["positive", "negative"])
CASES = settings(max_examples=60, deadline=None)


def draw() -> torch.Generator:
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
    "sampled": build_groups(LAYOUT, list_up_to=1, drawn=20_000),
    "layerwise": NeuronGroups(LAYOUT),
}


def change(seed: int, layout: Layout = LAYOUT) -> Tensor:
    return torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", GROUPS)
@CASES
@given(seed=st.integers(0, 2**20), rates=st.tuples(RATES, RATES))
def test_4_more_channels_reveal_more_and_negative_reveals_less(
    name: str, seed: int, rates: tuple[float, float]
) -> None:
    low, high = sorted(rates)
    known, moved = GROUPS[name], change(seed)
    for selection in ("positive", "negative"):
        assert known.select_by_rate(moved, low, selection, draw()) <= known.select_by_rate(
            moved, high, selection, draw()
        )
    assert known.select_by_rate(moved, low, "negative", draw()) <= known.select_by_rate(moved, low, "positive", draw())


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("selection", ["positive", "negative"])
def test_4_nothing_at_0_and_everything_at_1(name: str, selection: Selection) -> None:
    assert GROUPS[name].select_by_rate(change(1), 0.0, selection, draw()).count == 0
    assert GROUPS[name].select_by_rate(change(1), 1.0, selection, draw()).is_full


@CASES
@given(st.integers(0, 2**20))
def test_5_one_channel_reveals_one_row_and_one_connection_of_each_later_layer(seed: int) -> None:
    layout = Layout.from_module(build("mlp", features=9, hidden=(5, 4), outputs=3))
    on = build_groups(layout).select_by_rate(change(seed, layout), 1e-9, "positive", draw()).bits
    weights = {
        e.name: t for e, t in zip(layout.tensors, layout.unflatten(on).values(), strict=True) if e.role == "weight"
    }
    first, second, third = weights.values()
    assert first.all(1).sum() == first.any(1).sum() == 1
    assert (int(second.sum()), int(third.sum())) == (1, 1)
    biases = sum(
        int(t.sum()) for e, t in zip(layout.tensors, layout.unflatten(on).values(), strict=True) if e.role == "bias"
    )
    assert biases == 3


@pytest.mark.parametrize("name", GROUPS)
@CASES
@given(seed=st.integers(0, 2**20), rate=RATES, selection=SELECTIONS, factor=st.sampled_from([-1.0, 4.0, -0.5, 1024.0]))
def test_6_scale_and_sign_do_not_matter(name: str, seed: int, rate: float, selection: Selection, factor: float) -> None:
    moved = change(seed)
    assert GROUPS[name].select_by_rate(moved, rate, selection, draw()) == GROUPS[name].select_by_rate(
        factor * moved, rate, selection, draw()
    )


@CASES
@given(st.integers(0, 2**20), RATES, SELECTIONS)
def test_7_permuting_neurons_permutes_the_selection(seed: int, rate: float, selection: Selection) -> None:
    moved = change(seed)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))

    def permuted(vector: Tensor) -> Tensor:
        tensors = {name: t.clone() for name, t in LAYOUT.unflatten(vector).items()}
        for name in tensors:
            if name.startswith(("0.", "1.")):
                tensors[name] = tensors[name][order]
        tensors["5.weight"] = tensors["5.weight"].view(6, 4, 9)[:, order].reshape(6, 36)
        return LAYOUT.flatten(tensors)

    on = GROUPS["listed"].select_by_rate(moved, rate, selection, draw()).bits
    assert torch.equal(permuted(on), GROUPS["listed"].select_by_rate(permuted(moved), rate, selection, draw()).bits)


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("biases", ["selected", "all", "never"])
@CASES
@given(seed=st.integers(0, 2**20), fraction=st.floats(0, 0.9))
def test_a_budget_is_met_to_the_last_parameter(name: str, biases: Biases, seed: int, fraction: float) -> None:
    if isinstance(GROUPS[name], NeuronGroups):
        known: Groups = NeuronGroups(LAYOUT, biases)
    else:
        known = ChannelGroups(LAYOUT, build_channel_graph(LAYOUT), biases)
    on = known.select_by_budget(change(seed), fraction)
    always = 8 if isinstance(known, NeuronGroups) else 0  # scale and shift of the normalisation belong to no unit there
    if biases == "all":
        always = sum(e.size for e in LAYOUT.tensors if e.role in ("bias", "norm"))
    wanted = int(fraction * LAYOUT.trainable_size + 1e-9)
    assert int(on.bits[: LAYOUT.trainable_size].sum()) == max(wanted, always)


@CASES
@given(st.integers(0, 2**20), st.floats(0.02, 0.98))
def test_a_budget_takes_the_best_channels_first(seed: int, rate: float) -> None:
    """A budget of just what a rate reveals is what the rate reveals, biases aside."""
    known = ChannelGroups(LAYOUT, build_channel_graph(LAYOUT), "never")
    moved = change(seed)
    by_rate = known.select_by_rate(moved, rate, "positive", draw())
    parameters = by_rate.bits[: LAYOUT.trainable_size]
    by_budget = known.select_by_budget(moved, int(parameters.sum()) / LAYOUT.trainable_size)
    assert torch.equal(by_budget.bits[: LAYOUT.trainable_size], parameters)


def test_the_group_that_a_budget_ends_in_gives_its_largest_changes() -> None:
    layout = Layout.from_module(nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 1)))
    moved = layout.flatten(
        {
            "0.weight": torch.tensor([[1.0, 2, 3, 4], [0.1, 0.1, 0.1, 0.1]]),
            "0.bias": torch.zeros(2),
            "2.weight": torch.tensor([[1.0, 1.0]]),
            "2.bias": torch.zeros(1),
        }
    )
    on = layout.unflatten(
        ChannelGroups(layout, build_channel_graph(layout), "never").select_by_budget(moved, 2 / 13).bits
    )
    assert on["0.weight"].tolist() == [[False, False, True, True], [False] * 4]


@pytest.mark.parametrize("biases", ["selected", "never", "all"])
def test_biases_follow_their_rule_and_statistics_their_unit(biases: Biases) -> None:
    known = ChannelGroups(LAYOUT, build_channel_graph(LAYOUT), biases)
    on = LAYOUT.unflatten(known.select_by_rate(change(2), 0.02, "positive", draw()).bits)
    units = on["0.weight"].flatten(1).any(1)
    assert 0 < int(units.sum()) < 4
    expected = {"selected": units, "never": torch.zeros(4, dtype=torch.bool), "all": torch.ones(4, dtype=torch.bool)}
    for name in ("0.bias", "1.weight", "1.bias"):
        assert torch.equal(on[name], expected[biases])
    assert torch.equal(on["1.running_mean"], units)


def test_what_belongs_to_no_unit_always_travels() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.layers = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x * self.scale)

    layout = Layout.from_module(Scaled())
    known = build_groups(layout)
    assert isinstance(known, NeuronGroups)
    assert "layer by layer" in known.found
    on = layout.unflatten(known.select_by_rate(change(0, layout), 0.2, "positive", draw()).bits)
    assert bool(on["scale"].all())
    assert int(on["layers.0.weight"].all(1).sum()) == int(on["layers.0.weight"].any(1).sum()) == 1


@pytest.mark.parametrize("name", ["mlp", "image_cnn", "alexnet3d", "brain_age_cnn", "brain_age_cnn_3mm", "resnet32"])
def test_channels_of_the_ready_networks_can_be_followed(name: str) -> None:
    settings = {"features": 20} if name == "mlp" else {}
    assert isinstance(build_groups(Layout.from_module(build(name, **settings))), ChannelGroups)


@pytest.mark.parametrize("name", GROUPS)
def test_a_change_that_is_not_finite_is_refused(name: str) -> None:
    moved = change(1)
    moved[3] = float("nan")
    with pytest.raises(SelectionError, match=r"1 of \d+ changes are not finite"):
        GROUPS[name].select_by_rate(moved, 0.5, "positive", draw())
    with pytest.raises(SelectionError, match="not finite"):
        GROUPS[name].select_by_budget(moved, 0.5)


def test_a_budget_that_hidden_biases_make_impossible_is_refused() -> None:
    known = ChannelGroups(LAYOUT, build_channel_graph(LAYOUT), "never")
    with pytest.raises(SelectionError, match="may be revealed: lower it"):
        known.select_by_budget(change(1), 1.0)


def test_layer_mean_divides_each_layers_changes_by_their_mean() -> None:
    """A last layer that changes a hundred times more decides alone, unless layers are brought to one scale."""
    layout = Layout.from_module(build("mlp", features=30, hidden=(8, 8)))
    moved = change(3, layout)
    tensors = layout.unflatten(moved)
    next(t for n, t in tensors.items() if n.endswith("output.weight")).mul_(100)
    plain = build_groups(layout).select_by_rate(moved, 0.1, "negative", draw())
    scaled = build_groups(layout, layer_mean=True).select_by_rate(moved, 0.1, "negative", draw())
    assert plain != scaled
    assert Mask.empty(layout.size) <= scaled


def test_vector_5_channels_and_selected_channels_of_the_papers_network() -> None:
    layout = Layout.from_module(build("mlp", features=2917, hidden=(64, 32)))
    weights = sum(e.size for e in layout.tensors if e.role == "weight")
    assert (weights, sum(e.size for e in layout.tensors if e.role == "bias")) == (188_768, 97)
    known = build_groups(layout)
    assert isinstance(known, ChannelGroups)
    assert (round(known.channels), known.exact) == (2048, True)
    from flare_sparse.scores.scbf.paths import compute_energies, list_norms

    graph = build_channel_graph(layout)
    norms = list_norms(graph, compute_energies(graph, layout, change(0, layout)))
    assert norms.view(64, 32, 1).shape == (64, 32, 1)
    from flare_sparse.scores.scbf.selection import _top

    assert int(_top(norms, 0.3, norms > -1).sum()) == 615
