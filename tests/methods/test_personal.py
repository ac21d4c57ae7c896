"""Tensors that stay at the sites: never on the wire, each site's own, and the same after a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from local_federation import LocalFederation
from toy import Adapted, Toy, ToyBench

from flare_sparse.core.checkpoint.store import Store
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.mask import Mask
from flare_sparse.core.needs import Need, find_need
from flare_sparse.core.params import Layout, compute_digest
from flare_sparse.methods.registry import METHODS
from flare_sparse.results.runs.model_files import find_site_models, read_model, save_site_model
from flare_sparse.rounds.endpoints.site import SiteSnapshot
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.training import build_site
from flare_sparse.training.personal import PERSONAL, select_personal

NORMS = ("1.weight", "1.bias", "1.running_mean", "1.running_var")
HEAD = ("4.weight", "4.bias")
ALLOWED = [name for name, method in METHODS.items() if not find_need(method.Config().needs(), Need.WHOLE_MODEL)]
EXCHANGING = [name for name in ALLOWED if name != "local_only"]


def build_bench(name: str, personal: Any = "norms") -> ToyBench:
    """Return a bench whose sites keep the given tensors, or the head of a network with adapters."""
    is_adapted = name in ("lora_a2", "ffa_lora", "flexlora", "hetlora")
    return ToyBench(Adapted(), personal=("*.modules_to_save.*",)) if is_adapted else ToyBench(Toy(), personal=personal)


def build(
    name: str, folder: Path | None = None, personal: Any = "norms", values: Any = "float32", **settings: Any
) -> LocalFederation:
    settings = {"fraction": 0.2} | settings if name == "topk_ef" else settings
    return LocalFederation(
        name,
        build_bench(name, personal),
        values=values,
        rules=RoundRules(min_sites=3),
        stores=lambda end: None if folder is None else Store(folder / end, {}),
        **settings,
    )


def collect(federation: LocalFederation) -> dict[str, torch.Tensor]:
    """Return the tensors that each site keeps, as one vector."""
    return {name: site.memory[PERSONAL] for name, site in federation.sites.items() if PERSONAL in site.memory}


def test_saved_network_is_complete_where_a_mask_leaves_a_whole_tensor_out() -> None:
    bench = ToyBench(Toy(), personal="norms")
    site = bench.site(1)
    head = Mask.from_tensors(bench.layout, lambda spec: spec.name in HEAD)
    site.train(bench.weights, ~head, bench.method("fedavg").config.training, 1)
    site.evaluate(bench.weights)
    layout, vector = site.evaluated or pytest.fail("nothing was evaluated")
    assert layout.fingerprint == Layout.from_module(Toy().model()).fingerprint
    assert torch.equal(bench.layout.flatten(layout.unflatten(vector)), bench.weights)


def test_groups_and_patterns_name_tensors_of_the_network() -> None:
    layout = Layout.from_module(Toy().model())
    assert select_personal(layout, "norms") == NORMS
    assert select_personal(layout, "head") == HEAD
    assert select_personal(layout, "intercept") == ("4.bias",)
    assert select_personal(layout, ("4.b*", "1.running_*")) == ("4.bias", "1.running_mean", "1.running_var")
    with pytest.raises(ConfigError, match=r"'5\.\*' matches no tensor of the network, which has 0\.weight, 0\.bias"):
        select_personal(layout, ("4.*", "5.*"))
    with pytest.raises(ConfigError, match="use method local_only instead"):
        select_personal(layout, ("*",))
    with pytest.raises(ConfigError, match="'norms' matches no tensor"):
        select_personal(Layout.from_module(torch.nn.Linear(2, 1)), "norms")


@pytest.mark.slow
@pytest.mark.parametrize("personal", ["norms", "head", "intercept"])
def test_messages_shrink_by_exactly_the_values_that_stay(personal: str) -> None:
    full, partial = build("fedavg", personal=()), build("fedavg", personal=personal)
    full.run()
    partial.run()
    kept = sum(tensor.numel() for tensor in partial.bench.kept.values())
    assert kept == {"norms": 40, "head": 11, "intercept": 1}[personal]
    assert partial.method.layout.size == full.method.layout.size - kept
    for before, after in zip(full.ledger.lines, partial.ledger.lines, strict=True):
        assert before.scalars_sent - after.scalars_sent == (kept if before.scalars_sent else 0)
        assert before.floor_bytes - after.floor_bytes == (4 * kept if before.scalars_sent else 0)
        # Sections of a message are padded to 8 bytes.
        padded_before, padded_after = (-(-4 * line.scalars_sent // 8) * 8 for line in (before, after))
        assert before.payload_bytes - after.payload_bytes == padded_before - padded_after


@pytest.mark.slow
@pytest.mark.parametrize("name", EXCHANGING)
def test_sites_differ_in_what_they_keep_and_the_server_has_none_of_it(name: str) -> None:
    federation = build(name)
    outcome = federation.run()
    assert len(outcome.weights) == federation.bench.layout.size
    assert not set(federation.bench.kept) & {spec.name for spec in federation.server.layout.tensors}
    kept = collect(federation)
    initial = torch.cat([tensor.flatten() for tensor in federation.bench.kept.values()])
    assert len({compute_digest(values) for values in [*kept.values(), initial]}) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "values"), [*((name, "float32") for name in EXCHANGING), ("fedavg", "bfloat16"), ("topk_ef", "bfloat16")]
)
def test_resumed_run_ends_with_the_same_bits_at_server_and_sites(name: str, values: str, tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    expected = build(name, tmp_path / "uninterrupted", values=values)
    outcome = expected.run()
    killed = build(name, tmp_path / "cut", values=values)

    def kill(record: Any) -> None:
        if len(killed.records) == 2:
            raise Killed

    killed.on_round = kill
    with pytest.raises(Killed):
        killed.run()
    resumed = build(name, tmp_path / "cut", values=values)
    again = resumed.run(resume=True)
    assert torch.equal(again.weights, outcome.weights)
    assert again.evaluation == outcome.evaluation
    expected_kept = collect(expected)
    assert all(torch.equal(values, expected_kept[site]) for site, values in collect(resumed).items())
    assert collect(resumed).keys() == expected_kept.keys() == {"site-1", "site-2", "site-3"}


@pytest.mark.slow
def test_retry_starts_from_what_the_site_kept_before_the_first_attempt(tmp_path: Path) -> None:
    expected = build("fedavg", tmp_path / "plain")
    outcome = expected.run()
    lossy = build("fedavg", tmp_path / "lossy")
    lost: list[int] = []

    def lose_first(upload: Any) -> Any:
        if upload.site == "site-2" and upload.attempt.round not in lost:
            lost.append(upload.attempt.round)
            return None
        return upload

    lossy.change_message = lose_first
    assert torch.equal(lossy.run().weights, outcome.weights)
    assert {record.attempts for record in lossy.records} == {2}
    kept = collect(lossy)
    assert all(torch.equal(values, kept[site]) for site, values in collect(expected).items())


def test_checkpoint_of_a_site_holds_what_it_keeps(tmp_path: Path) -> None:
    federation = build("fedavg", tmp_path)
    federation.run()
    checkpoint = Store(tmp_path / "site-1", {}).load(SiteSnapshot)
    assert checkpoint is not None
    assert torch.equal(checkpoint[1].memory.method[PERSONAL], federation.sites["site-1"].memory[PERSONAL])


def test_received_model_is_evaluated_with_what_the_site_kept_before_it_trained() -> None:
    bench = ToyBench(Toy(), personal="head")
    site, whole = bench.site(1), ToyBench(Toy()).site(1)
    site.weights = bench.weights.clone()
    site.receive({})
    method = bench.method("fedavg")
    before = site.evaluate(site.weights)
    trained = site.train(site.weights, Mask.full(method.layout.size), method.config.training, 1)
    assert site.evaluate(site.weights) == before
    assert site.evaluate(trained) != before
    layout, vector = site.evaluated or pytest.fail("nothing was evaluated")
    assert layout.fingerprint == whole.layout.fingerprint
    assert whole.evaluate(vector) == site.evaluate(trained)


def test_one_site_that_keeps_its_norms_trains_as_one_that_exchanges_them() -> None:
    """Parameters that stay are trained by the same optimiser; with one site the average is its own model."""
    apart, together = build("fedavg"), build("fedavg", personal=())
    for federation in (apart, together):
        federation.rules = RoundRules()
        federation.endpoints = {"site-1": federation.endpoints["site-1"]}
    outcome = apart.run()
    whole = together.run()
    tensors = together.bench.layout.unflatten(whole.weights)
    torch.testing.assert_close(outcome.weights, apart.bench.layout.flatten(tensors))
    kept = torch.cat([tensors[name].flatten() for name in NORMS])
    torch.testing.assert_close(apart.sites["site-1"].memory[PERSONAL], kept)
    assert outcome.evaluation.overall["mse"] == pytest.approx(whole.evaluation.overall["mse"])


def test_site_model_is_saved_as_the_whole_network(tmp_path: Path) -> None:
    federation = build("fedavg")
    outcome = federation.run()
    for site in federation.sites.values():
        save_site_model(tmp_path, site)
    layout = Layout.from_module(Toy().model())
    for name, file in find_site_models(tmp_path).items():
        tensors = layout.unflatten(read_model(file, layout))
        assert torch.equal(federation.bench.layout.flatten(tensors), outcome.weights)
        kept = torch.cat([tensors[key].flatten() for key in NORMS])
        assert torch.equal(kept, federation.sites[name].memory[PERSONAL])


def test_new_site_starts_with_the_initial_values_and_adapts_them_alone() -> None:
    federation = build("fedavg", personal="head")
    outcome = federation.run()
    newcomer = federation.bench.site(9)
    newcomer.weights = outcome.weights.clone()
    before = newcomer.evaluate(outcome.weights)
    adapted = federation.method.adapt(newcomer, outcome.mask)
    assert torch.equal(adapted, outcome.weights)
    initial = torch.cat([tensor.flatten() for tensor in federation.bench.kept.values()])
    assert not torch.equal(newcomer.memory[PERSONAL], initial)
    assert newcomer.evaluate(adapted) != before


def test_trial_leaves_no_trace_in_what_a_site_keeps() -> None:
    bench = ToyBench(Toy(), personal="norms")
    local, method = bench.open_task(1), bench.method("fedavg")
    site = build_site(local, personal=bench.kept)
    site.train(bench.weights, Mask.full(method.layout.size), method.config.training, 1, stream="trial")
    next(site.trainer.compute_gradients(bench.weights, 8, 1, 1))
    assert site.memory == {}
    tensors = local.model.module.state_dict()
    norm = [tensors[name] for name in bench.kept]
    # Scale, shift, running mean and variance; passes that compute gradients update the statistics.
    initial = torch.cat([torch.ones(10), torch.zeros(10), torch.zeros(10), torch.ones(10)])
    assert not torch.equal(torch.cat(norm), initial)
    site.evaluate(bench.weights)
    assert torch.equal(torch.cat(norm), initial)
