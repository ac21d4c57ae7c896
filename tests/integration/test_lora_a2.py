"""LoRA-A2 in a real FLARE job: sites with rank budgets 2, 4, 8 and 16 adapt a text encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertConfig, BertModel
from typer.testing import CliRunner

from flare_sparse.api.local import run as run_in_process
from flare_sparse.api.start import launch
from flare_sparse.cli import app
from flare_sparse.config.assemble import assemble
from flare_sparse.config.loading import load_config
from flare_sparse.config.schema import RunConfig
from flare_sparse.config.study import Study
from flare_sparse.core.errors import RejectedMessage
from flare_sparse.core.exchange import Request, Update
from flare_sparse.core.seeds import seed_torch
from flare_sparse.methods.lora_a2 import LoRAA2
from flare_sparse.methods.scores.ranks import Slots
from flare_sparse.results.runs.folder import RunFolder
from flare_sparse.results.runs.model_files import read_model
from flare_sparse.rounds.endpoints.server import ServerEndpoint
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.rounds.local.dry_run import DryTrainer
from flare_sparse.tasks.adaptation import AdaptableTask
from flare_sparse.training import Site
from flare_sparse.wire.ledger import Ledger

BUDGETS = {"site-1": 2, "site-2": 4, "site-3": 8, "site-4": 16}
WORDS = ("card", "cash", "rate", "loan")


@pytest.fixture
def configuration(tmp_path: Path, models_folder: Path) -> Path:
    """Four classes of texts at four sites, and a small encoder with the tokenizer of a large one."""
    with seed_torch(0):
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
        BertModel(BertConfig(vocab_size=30522, **sizes)).save_pretrained(str(models_folder / "small"))
    AutoTokenizer.from_pretrained(str(models_folder / "all-MiniLM-L6-v2")).save_pretrained(str(models_folder / "small"))
    rows = [f"{i % 4},my {WORDS[i % 4]} number {i}" for i in range(80)]
    (tmp_path / "texts.csv").write_text("\n".join(["label,text", *rows]) + "\n")
    content = {
        "name": "lora_a2_small",
        "seed": 3,
        "method": {
            "name": "lora_a2",
            "ranks": BUDGETS,
            "rounds": 4,
            "training": {"epochs": 1, "optimizer": "adamw", "lr": 0.005, "weight_decay": 0.01, "batch_size": 8},
        },
        "task": {
            "name": "text_classification",
            "base": "small",
            "classes": 4,
            "max_length": 12,
            "adapter": {"rank": 16},
        },
        "federation": {"min_sites": 4, "task_timeout_s": 600},
        "simulator": {"sites": 4, "data": {"path": "texts.csv", "partition": {"kind": "iid"}}},
    }
    file = tmp_path / "lora_a2_small.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def selected_scalars(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, str], int]:
    """Scalars of the slots selected in this process, by round and site: the sum of d1 (B round) or d2 (A round)."""
    sums: dict[tuple[int, str], int] = {}
    answer = LoRAA2.answer

    def answer_and_record(self: LoRAA2, request: Request, site: Site) -> Update:
        update, active = answer(self, request, site), self.get_active_factor(request.round)
        slots = self.slots.find_slots(update.patch.mask, active)
        assert slots is not None
        assert int(slots.sum()) == BUDGETS[site.name] * self.slots.num_modules
        sums[request.round, site.name] = int(self.slots.get_slot_widths(active)[slots].sum())
        return update

    monkeypatch.setattr(LoRAA2, "answer", answer_and_record)
    return sums


@pytest.mark.long
def test_sites_upload_exactly_the_scalars_of_their_rank_budgets_and_peft_loads_the_adapter(
    configuration: Path, tmp_path: Path, models_folder: Path, selected_scalars: dict[tuple[int, str], int]
) -> None:
    """The slots of a local run, which ends with the same bits, give the scalars that FLARE's ledger must count."""
    config = load_config(configuration)
    flare = launch("sim", Study(config, configuration), RunFolder(tmp_path / "flare")).summary
    assert selected_scalars == {}
    local = run_in_process(Study(config, configuration), RunFolder(tmp_path / "local")).summary
    assert flare["model_sha256"] == local["model_sha256"]
    lines = [line for line in jsonl(tmp_path / "flare" / "ledger.jsonl") if line["kind"] == "train"]
    up = {(line["round"], line["site"]): line["scalars_sent"] for line in lines if line["direction"] == "up"}
    assert up == selected_scalars
    assert len(up) == 4 * 4
    slots = Slots(assemble(config).layout)
    assert {t: up[t, "site-4"] for t in (1, 2)} == {1: slots.factors["B"].count, 2: slots.factors["A"].count}
    down = {(line["round"], line["site"]): line["scalars_sent"] for line in lines if line["direction"] == "down"}
    assert {t: down[t, "site-1"] for t in range(1, 5)} == {
        1: slots.layout.size,
        2: slots.factors["B"].count,
        3: slots.factors["A"].count,
        4: slots.factors["B"].count,
    }
    save = ["save", str(tmp_path / "flare"), "--out", str(tmp_path / "adapter")]
    result = CliRunner().invoke(app, save)
    assert result.exit_code == 0, result.output
    check_adapter(tmp_path / "adapter", config, tmp_path / "flare" / "model.safetensors")
    (models_folder / "small").rename(models_folder / "gone")
    result = CliRunner().invoke(app, save)
    assert result.exit_code == 2
    assert "no folder 'small'" in result.output


def check_adapter(folder: Path, config: RunConfig, model_file: Path) -> None:
    """Check that an adapter gives the outputs of the run's model with peft, which differ from the base model's."""
    assembly = assemble(config)
    model = assembly.task.model().eval()
    model.load_state_dict(assembly.layout.unflatten(read_model(model_file, assembly.layout)), strict=False)
    assert isinstance(assembly.task, AdaptableTask)
    loaded = PeftModel.from_pretrained(assembly.task.build_base(), str(folder)).eval()
    batch = [torch.tensor([[101, 2026, 4003, 102]]), torch.ones(1, 4, dtype=torch.int64)]
    with torch.no_grad():
        assert torch.equal(loaded(*batch), model(*batch))
        assert not torch.allclose(loaded(*batch), assembly.task.build_base().eval()(*batch), atol=1e-4)


def test_message_for_another_base_model_is_rejected(configuration: Path, models_folder: Path) -> None:
    """The adapters have the same names and shapes; the base models differ in one weight."""
    config = load_config(configuration)
    server = assemble(config)
    file = models_folder / "small" / "model.safetensors"
    tensors = load_file(file)
    tensors["encoder.layer.0.attention.self.query.weight"][0, 0] += 1e-4
    save_file(tensors, file, metadata={"format": "pt"})
    site = assemble(config)
    assert [e.name for e in site.layout.tensors] == [e.name for e in server.layout.tensors]
    attempt = ServerEndpoint(server.layout, server.run_id, "float32", Ledger()).encode_requests(
        server.method.ask(server.method.init(server.weights, ["site-1"]), ["site-1"]) or {}
    )
    endpoint = SiteEndpoint(Site("site-1", DryTrainer("site-1", site.layout)), site.method, site.run_id, "float32")
    with pytest.raises(RejectedMessage, match="E_LAYOUT"):
        endpoint.receive(attempt.messages["site-1"])
