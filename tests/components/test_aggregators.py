"""Aggregators in the rounds of FLARE's FedAvg: they end with the model of the method itself, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flare_ends import Job, to_numpy
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.filters.exclude_vars import ExcludeVars
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from torch import nn

from flare_sparse.components.aggregators import (
    FlexLoRAMean,
    MagnitudePruning,
    MetaStep,
    MethodAggregator,
    OrderedMean,
    RankMean,
    ScoredMask,
    SelectiveSum,
)
from flare_sparse.components.arrays import MASK, ComponentError, pack_mask
from flare_sparse.components.controllers import NeuroSFLController
from flare_sparse.components.csr import FromCSR, ToCSR
from flare_sparse.components.masking import KeepMask
from flare_sparse.components.uploads import ChannelUpload, RankUpload
from flare_sparse.core.errors import RoundFailed
from flare_sparse.core.exchange import Contribution, Patch
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout
from flare_sparse.methods.fedavg import FedAvg
from flare_sparse.methods.fedsparsify import FedSparsify
from flare_sparse.methods.flexlora import FlexLoRA
from flare_sparse.methods.lora_a2 import LoRAA2
from flare_sparse.methods.metagater import MetaGater
from flare_sparse.methods.method import Method
from flare_sparse.methods.neurosfl import NeuroSFL
from flare_sparse.methods.scbf import SCBF, ChannelSelector

SITES, ROUNDS = ("site-1", "site-2", "site-3"), 3
STEPS = dict(zip(SITES, (3, 10, 7), strict=True))


class Gated(nn.Module):
    """A gated layer as MetaGater's networks name it, batch normalisation and an output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer.body, self.layer.gate = nn.Linear(6, 4), nn.Module()
        self.layer.gate.open = nn.Linear(2, 4)
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 1)


class Adapted(nn.Module):
    """Adapters of rank 3 as peft names them, over a frozen base, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 4)
        self.base.requires_grad_(False)
        self.one = nn.Module()
        self.one.lora_A = nn.ModuleDict({"default": nn.Linear(6, 3, bias=False)})
        self.one.lora_B = nn.ModuleDict({"default": nn.Linear(3, 4, bias=False)})
        self.head = nn.Linear(4, 1)


NETWORK = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 1))


def draw(layout: Layout, *labels: Any) -> torch.Tensor:
    seed = sum(map(ord, "".join(map(str, labels))))
    return torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))


def read(arrays: dict[str, Any], layout: Layout) -> torch.Tensor:
    return layout.flatten({spec.name: torch.as_tensor(arrays[spec.name]) for spec in layout.tensors})


def build_script(layout: Layout, *, is_delta: bool = False, hidden: Sequence[str] = ()) -> Callable[..., FLModel]:
    """A script that moves all entries, those outside a mask, too; integer buffers and a frozen base as they come."""

    def train(received: FLModel, site: str) -> FLModel:
        start = read(received.params, layout)
        trained = start + 0.1 * draw(layout, site, received.current_round)
        values = to_numpy(trained - start if is_delta else trained, layout)
        params = {**({} if is_delta else received.params), **values}
        kind = ParamsType.DIFF if is_delta else ParamsType.FULL
        meta = {"NUM_STEPS_CURRENT_ROUND": STEPS[site]}
        return FLModel(params={n: a for n, a in params.items() if n not in hidden}, params_type=kind, meta=meta)

    return train


def run_method(method: Method[Any, Any], start: torch.Tensor, select: Callable[..., Mask]) -> torch.Tensor:
    """The method's own rounds with the training of ``build_script``."""
    state, layout = method.init(start, list(SITES)), method.layout
    for round_ in range(ROUNDS):
        sent = method.model(state)
        contributions = []
        for site in SITES:
            model = sent.to_vector()
            trained = model + 0.1 * draw(layout, site, round_)
            mask = select(sent.mask, trained - model, model, site, round_ + 1)
            values = trained - model if method.update_content == "delta" else trained
            patch = Patch(mask.take(values), mask)
            contributions.append(Contribution(site, patch, method.update_content, STEPS[site]))
        state = method.learn(state, contributions)
    return method.model(state).to_vector()


def keep_all(live: Mask, *_: Any) -> Mask:
    return live


def build_channels(layout: Layout) -> Callable[..., Mask]:
    selector = ChannelSelector(SCBF.Config(rate=0.2), 0)
    return lambda live, delta, start, site, t: selector.select(delta, layout, site, t)


def build_ranks(layout: Layout) -> Callable[..., Mask]:
    upload = RankUpload(1, heads=["head.*"])
    return lambda live, delta, start, site, t: upload.select(delta, start, layout, site, t)


def build_first(layout: Layout) -> Callable[..., Mask]:
    method = FlexLoRA(FlexLoRA.Config(rank=2, ranks={"site-2": 1}), layout)
    return lambda live, delta, start, site, t: method.select_first_ranks(method.config.get_rank(site))


def settings(method: type[Method[Any, Any]], **values: Any) -> Callable[[Layout], Method[Any, Any]]:
    return lambda layout: method(method.Config(rounds=ROUNDS, **values), layout)


CASES: dict[str, tuple[Any, ...]] = {
    "mean": (NETWORK, OrderedMean, settings(FedAvg), lambda s: [], keep_all),
    "pruning": (
        NETWORK, lambda: MagnitudePruning(0.8), settings(FedSparsify, sparsity=0.8), lambda s: [KeepMask()], keep_all
    ),
    "scbf": (
        NETWORK, SelectiveSum, settings(SCBF, rate=0.2), lambda s: [ChannelUpload(0.2, model=NETWORK)],
        build_channels(Layout.from_module(NETWORK)),
    ),
    "scbf count": (
        NETWORK, lambda: SelectiveSum("count"), settings(SCBF, rate=0.2, aggregation="count"),
        lambda s: [ChannelUpload(0.2, model=NETWORK)], build_channels(Layout.from_module(NETWORK)),
    ),
    "lora_a2": (
        Adapted(), RankMean, settings(LoRAA2, rank=1), lambda s: [RankUpload(1, heads=["head.*"])],
        build_ranks(Layout.from_module(Adapted())),
    ),
    "flexlora": (
        Adapted(), lambda: FlexLoRAMean(2, {"site-2": 1}), settings(FlexLoRA, rank=2, ranks={"site-2": 1}),
        lambda s: [], build_first(Layout.from_module(Adapted())),
    ),
    "metagater": (
        Gated(), lambda: MetaStep(lasso=0.3), settings(MetaGater, lasso=0.3), lambda s: [KeepMask()], keep_all
    ),
}  # fmt: skip

SCORED = (NETWORK, lambda: ScoredMask(0.7), None, lambda s: [KeepMask()], None)
"""NeuroSFL, whose first round brings scores."""


def start_job(case: str, root: Path, to_csr: bool = False) -> tuple[Job, Layout, torch.Tensor]:
    network, build, _, filters, _ = SCORED if case == "neurosfl" else CASES[case]
    layout = Layout.from_module(network)
    start = draw(layout, "start").abs()
    arrays = {n: v.numpy() for n, v in network.state_dict().items()} | to_numpy(start, layout)
    last = [ToCSR()] if to_csr else []
    job = Job(root, arrays, network, build(), SITES, lambda s: [*filters(s), *last], [FromCSR()] if to_csr else [])
    return job, layout, start


@pytest.mark.parametrize("to_csr", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_rounds_of_components_end_with_the_model_of_the_method(case: str, to_csr: bool, tmp_path: Path) -> None:
    job, layout, start = start_job(case, tmp_path, to_csr)
    expected = run_method(CASES[case][2](layout), start, CASES[case][4])
    # FLARE's order of arrival must not show.
    model = job.run(ROUNDS, build_script(layout), order=lambda sites: sites[::-1])
    assert torch.equal(read(model.params, layout), expected)
    assert not torch.equal(expected, start)
    others = set(model.params) - {spec.name for spec in layout.tensors}
    assert all(np.array_equal(model.params[n], CASES[case][0].state_dict()[n].numpy()) for n in others)


@pytest.mark.parametrize("case", ["pruning", "scbf", "lora_a2", "metagater"])
def test_differences_end_within_float32(case: str, tmp_path: Path) -> None:
    job, layout, start = start_job(case, tmp_path)
    expected = run_method(CASES[case][2](layout), start, CASES[case][4])
    model = job.run(ROUNDS, build_script(layout, is_delta=True))
    assert torch.allclose(read(model.params, layout), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", [*CASES, "neurosfl"])
def test_resumed_job_ends_with_the_same_bits(case: str, tmp_path: Path) -> None:
    job, layout, _ = start_job(case, tmp_path / "whole")
    start = score if case == "neurosfl" else build_script
    expected = job.run(ROUNDS, start(layout)).params
    job, _, _ = start_job(case, tmp_path / "first")
    job.aggregator._rounds = ROUNDS  # type: ignore[attr-defined]
    model = interrupt(job, start(layout))
    snapshot = job.aggregator.get_persist_state(job.context)
    by_file, _, _ = start_job(case, tmp_path / "by_file")
    by_file.aggregator.resume_from = str(job.server.folder / f"{type(job.aggregator).__name__}.safetensors")  # type: ignore[attr-defined]
    by_snapshot, _, _ = start_job(case, tmp_path / "by_snapshot")
    by_snapshot.aggregator.restore(snapshot, by_snapshot.context)
    for second in (by_file, by_snapshot):
        second.model = FLModel(params=dict(model.params), params_type=ParamsType.FULL, meta=dict(model.meta))
        resumed = second.run(ROUNDS, build_script(layout), first=1)
        assert all(np.array_equal(resumed.params[name], array) for name, array in expected.items())


def interrupt(job: Job, train: Any) -> FLModel:
    """Run the first of several rounds."""

    class Stopped(Exception):
        pass

    def stop(received: FLModel, site: str) -> FLModel:
        if received.current_round:
            raise Stopped
        return train(received, site)  # type: ignore[no-any-return]

    with pytest.raises(Stopped):
        job.run(ROUNDS, stop)
    return job.model


def test_file_of_another_state_is_refused(tmp_path: Path) -> None:
    job, layout, _ = start_job("scbf", tmp_path)
    job.run(1, build_script(layout))
    other, layout, _ = start_job("pruning", tmp_path / "other")
    other.aggregator.resume_from = str(job.server.folder / "SelectiveSum.safetensors")  # type: ignore[attr-defined]
    with pytest.raises(RoundFailed, match=r"site-1: resume_from: the file is no state of .*fedsparsify"):
        other.run(1, build_script(layout))


def score(layout: Layout, *, is_delta: bool = False) -> Callable[..., FLModel]:
    """A script that answers with scores before the first round."""
    train = build_script(layout)
    asked: set[str] = set()

    def answer(received: FLModel, site: str) -> FLModel:
        if site in asked:
            return train(received, site)
        asked.add(site)
        values = draw(layout, site, "scores").abs()
        kind = ParamsType.DIFF if is_delta else ParamsType.FULL
        return FLModel(params=to_numpy(values, layout), params_type=kind)

    return answer


@pytest.mark.parametrize("is_delta", [False, True])
def test_scores_become_the_mask_of_neurosfl(is_delta: bool, tmp_path: Path) -> None:
    layout = Layout.from_module(NETWORK)
    start = draw(layout, "start")
    method = NeuroSFL(NeuroSFL.Config(rounds=ROUNDS, sparsity=0.7), layout)
    full = Mask.full(layout.size)
    scores = [Contribution(s, Patch.from_vector(draw(layout, s, "scores").abs(), full), "scores", 1) for s in SITES]
    state = method.learn(method.init(start, []), scores)
    job = Job(tmp_path, to_numpy(start, layout), NETWORK, ScoredMask(0.7), SITES)
    model = job.run(1, score(layout, is_delta=is_delta))
    assert torch.equal(read(model.params, layout), state.weights)
    # Bytes, so that torch reads the meta of a saved model without pickles of numpy.
    assert model.meta[MASK] == pack_mask(state.masks[0], layout)
    assert {type(bits) for bits in model.meta[MASK].values()} == {bytes}


def test_scores_from_which_flare_subtracted_the_model_are_refused_with_the_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout = Layout.from_module(NETWORK)
    arrays = to_numpy(draw(layout, "start"), layout)
    job, answer = Job(tmp_path, arrays, NETWORK, ScoredMask(0.7, min_sites=3), SITES), score(layout)

    def subtract(received: FLModel, site: str) -> FLModel:
        scores = answer(received, site)
        params = {name: array - received.params[name] for name, array in scores.params.items()}
        return FLModel(params=params, params_type=ParamsType.DIFF)

    with pytest.raises(RoundFailed, match=r"E_QUORUM: 0 updates count.*site-3: ScoredMask: the scores have negative"):
        job.run(1, subtract)
    assert "params_type=ParamsType.DIFF; otherwise FLARE subtracts the model" in caplog.text


def test_scores_that_are_not_finite_cost_the_site_its_part_in_the_mask(tmp_path: Path) -> None:
    layout = Layout.from_module(NETWORK)
    start, models = to_numpy(draw(layout, "start"), layout), []
    for name, sites in (("all", SITES), ("others", SITES[1:])):
        answer = score(layout)

        def overflow(received: FLModel, site: str, answer: Any = answer) -> FLModel:
            scores = answer(received, site)
            scores.params["0.bias"][0] = np.inf if site == SITES[0] else 0
            return scores  # type: ignore[no-any-return]

        job = Job(tmp_path / name, dict(start), NETWORK, ScoredMask(0.7, min_sites=2), sites)
        models.append(job.run(1, overflow).params)
    assert all(np.array_equal(models[0][name], array) for name, array in models[1].items())
    job = Job(tmp_path / "quorum", dict(start), NETWORK, ScoredMask(0.7, min_sites=3), SITES)
    with pytest.raises(RoundFailed, match=r"E_QUORUM: 2 updates count.*site-1: ScoredMask: 1 values are not finite"):
        job.run(1, lambda received, site: overflow(received, site, score(layout)))


def break_update(what: str) -> Callable[..., FLModel]:
    """A script of which site-2 sends something else."""
    layout = Layout.from_module(NETWORK)
    train = build_script(layout)

    def answer(received: FLModel, site: str) -> FLModel:
        model = train(received, site)
        if site != "site-2":
            return model
        changes: dict[str, Callable[[], Any]] = {
            "nan": lambda: model.params.update({"0.bias": np.full(5, np.nan, np.float32)}),
            "shape": lambda: model.params.update({"0.weight": np.ones((6, 5), np.float32)}),
            "missing": lambda: model.params.pop("3.bias"),
            "steps": lambda: model.meta.update(NUM_STEPS_CURRENT_ROUND=-1),
            "empty": model.params.clear,
            "text": lambda: model.params.update({"0.bias": "none"}),
        }
        changes[what]()
        return model

    return answer


@pytest.mark.parametrize("what", ["nan", "shape", "missing", "steps", "empty", "text"])
def test_bad_site_is_left_out_named_and_counted_against_the_quorum(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout = Layout.from_module(NETWORK)
    start = to_numpy(draw(layout, "start"), layout)
    others = [site for site in SITES if site != "site-2"]
    expected = Job(tmp_path / "others", dict(start), NETWORK, OrderedMean(), others).run(1, build_script(layout))
    model = Job(tmp_path / "job", dict(start), NETWORK, OrderedMean(min_sites=2), SITES).run(1, break_update(what))
    assert all(np.array_equal(model.params[name], array) for name, array in expected.params.items())
    if what != "empty":  # FLARE itself reports an empty result
        assert "E_COMPONENT: the update of site site-2 is left out of this round: OrderedMean: " in caplog.text
    job = Job(tmp_path / "quorum", dict(start), NETWORK, OrderedMean(min_sites=3), SITES)
    with pytest.raises(RoundFailed, match=r"OrderedMean: E_QUORUM: 2 updates count, of site-1, site-3, min_sites is 3"):
        job.run(1, break_update(what))
    assert all(np.array_equal(job.model.params[name], array) for name, array in start.items())


@pytest.mark.parametrize("select", [[], [ChannelUpload(1.0, model=NETWORK)]], ids=["all", "channels"])
def test_tensors_that_a_site_holds_back_count_as_its_owners_only(select: list[Any], tmp_path: Path) -> None:
    layout = Layout.from_module(NETWORK)
    start = to_numpy(draw(layout, "start"), layout)
    job = Job(
        tmp_path,
        dict(start),
        NETWORK,
        SelectiveSum("count", min_sites=3),
        SITES,
        lambda site: [*select, *([ExcludeVars(["3.weight"])] if site != "site-3" else [])],
    )
    model = job.run(1, build_script(layout))
    only = job.model.params["3.weight"]
    assert np.allclose(only, start["3.weight"] + 0.1 * to_numpy(draw(layout, "site-3", 0), layout)["3.weight"])
    assert not np.array_equal(model.params["0.weight"], start["0.weight"])


def test_scatter_and_gather_is_served_too(tmp_path: Path) -> None:
    layout = Layout.from_module(NETWORK)
    start = to_numpy(draw(layout, "start"), layout)
    expected = Job(tmp_path / "fedavg", dict(start), NETWORK, OrderedMean(), SITES).run(1, build_script(layout))
    job = Job(tmp_path / "sag", dict(start), NETWORK, OrderedMean(), SITES)
    job._fire("_start_run")
    job.context.set_prop("num_rounds", 1, private=True, sticky=False)
    job._publish()
    job._fire("_round_started")
    job.model.current_round = 0
    for site in reversed(SITES):
        shareable = FLModelUtils.to_shareable(build_script(layout)(job.model, site))
        shareable.set_peer_props({"__identity_name__": site})
        assert job.aggregator.accept(shareable, job.context)
    assert not job.aggregator.accept(FLModelUtils.to_shareable(FLModel(metrics={"a": 1})), job.context)
    params = FLModelUtils.from_shareable(job.aggregator.aggregate(job.context)).params
    assert all(np.array_equal(params[name], array) for name, array in expected.params.items())


def test_metrics_are_averaged_by_steps_unless_a_site_sends_none(tmp_path: Path) -> None:
    layout = Layout.from_module(NETWORK)
    start = to_numpy(draw(layout, "start"), layout)
    for silent, expected in (("", {"auc": pytest.approx((3 * 1 + 10 * 2 + 7 * 3) / 20)}), ("site-1", None)):

        def train(received: FLModel, site: str, silent: str = silent) -> FLModel:
            model = build_script(layout)(received, site)
            model.metrics = None if site == silent else {"auc": float(site[-1]), "names": ["a"]}
            return model

        assert Job(tmp_path, dict(start), NETWORK, OrderedMean(), SITES).run(1, train).metrics == expected


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: MagnitudePruning(1.5), "MagnitudePruning: sparsity is 1.5"),
        (
            lambda: MagnitudePruning(0.5, settings={"initial_sparsity": 0.9}),
            "the arguments do not fit together: .*initial_sparsity 0.9 is above",
        ),
        (lambda: OrderedMean(min_sites=0), "min_sites is 0, expected a number from 1"),
        (lambda: ScoredMask(scores="other"), "scores is 'other'"),  # type: ignore[arg-type]
        (lambda: ScoredMask(settings={"variant": "s"}), "settings has variant, expected of min_per_layer, maskable"),
        (
            lambda: NeuroSFLController(num_clients=2, aggregator=OrderedMean()),
            "aggregator is of type OrderedMean; give ",
        ),  # type: ignore[arg-type]
        (lambda: MetaStep(proximity=-1), "proximity is -1"),
        (lambda: FlexLoRAMean(ranks={"site-1": 0}), "ranks.site-1 is 0"),
    ],
)
def test_invalid_argument_is_refused_before_the_job_runs(build: Callable[[], MethodAggregator], reason: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ComponentError, match=reason):
        build()
