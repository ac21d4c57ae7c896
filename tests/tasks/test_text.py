"""Text classification on BANKING77 with the real pre-trained encoder, offline."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel

from flare_sparse.core.errors import ConfigError, DataError
from flare_sparse.core.params import Layout
from flare_sparse.methods.scores.ranks import Slots
from flare_sparse.tasks.task import SiteData
from flare_sparse.tasks.text import TextClassification

BASE = "all-MiniLM-L6-v2"


def task(**settings: object) -> TextClassification:
    return TextClassification({"base": BASE, "adapter": {"rank": 16}, **settings})


@pytest.fixture
def queries(tmp_path: Path) -> Path:
    """Twenty texts of two classes."""
    file = tmp_path / "queries.csv"
    words = ["my card is lost", "what is my balance, and when was it updated?"]
    file.write_text("label,text\n" + "".join(f'{i % 2},"{words[i % 2]} {i}"\n' for i in range(20)))
    return file


@pytest.mark.slow
def test_adapted_minilm_starts_as_its_base_model(models_folder: Path) -> None:
    made = task()
    model = made.model().eval()
    layout = Layout.from_module(model)
    slots = Slots(layout)
    assert (slots.num_modules, slots.rank, slots.other_entries.count) == (36, 16, 0)
    assert layout.size == 16 * 6 * (4 * 768 + 2 * 1920)  # four 384 x 384, two between 384 and 1536, in six layers
    batch = [torch.tensor([[101, 2026, 4003, 102]]), torch.ones(1, 4, dtype=torch.int64)]
    with torch.no_grad():
        assert torch.equal(model(*batch), made.build_base().eval()(*batch))


@pytest.mark.slow
def test_prediction_of_a_text_is_independent_of_its_batch(models_folder: Path, queries: Path) -> None:
    """Padding takes no part in attention or in the mean over tokens."""
    made = task(classes=2)
    model = made.build_base().eval()
    train = made.load(SiteData("site-1", queries), 1).train
    rows = [train[i] for i in range(4)]
    batch = [torch.stack(parts) for parts in zip(*rows, strict=True)]
    together, _ = made.predict(model, batch)
    for index, row in enumerate(rows):
        alone, _ = made.predict(model, [part.unsqueeze(0) for part in row])
        assert torch.allclose(alone[0], together[index], atol=1e-5)
    lengths = {int(row[1].sum()) for row in rows}
    assert len(lengths) > 1


def test_site_reads_only_its_rows(models_folder: Path, queries: Path) -> None:
    made = task(classes=2)
    examples = made.load(SiteData("site-1", queries, tuple(map(str, range(10)))), 1)
    assert (examples.n_train, examples.n_test) == (8, 2)
    assert made.cohort(queries).columns["label"].tolist() == [i % 2 for i in range(20)]
    assert task(classes=2, every=5).cohort(queries).ids == ("0", "5", "10", "15")


@pytest.mark.slow
def test_banking77_is_loaded_and_evaluated(models_folder: Path, shared_data: Path) -> None:
    made = task(every=100)
    file = shared_data / "banking77" / "banking77.csv.gz"
    cohort = made.cohort(file)
    assert len(cohort.ids) == 131
    assert set(cohort.columns["label"]) <= set(range(77))
    examples = made.load(SiteData("site-1", file, cohort.ids[:20]), 1)
    figures = made.evaluate(made.model(), examples.test)
    assert figures.keys() == {"accuracy", "cross_entropy"}


def test_unusable_settings_and_rows_are_explained(models_folder: Path, queries: Path) -> None:
    with pytest.raises(DataError, match=r"class 2; expected 0 to 1\. Set task\.classes"):
        TextClassification({"base": BASE, "classes": 2}).load(SiteData("s", _with_class(queries, 2)), 1)
    with pytest.raises(DataError, match="no row '20'"):
        task(classes=2).load(SiteData("s", queries, ("3", "20")), 1)
    with pytest.raises(DataError, match="no column 'intent'"):
        task(label="intent").cohort(queries)
    with pytest.raises(ConfigError, match=r"task\.base: missing"):
        TextClassification({"classes": 2}).load(SiteData("s", queries), 1)
    (models_folder / "empty").mkdir()
    with pytest.raises(ConfigError, match="cannot be read by transformers"):
        task(base="empty").model()


def _with_class(file: Path, label: int) -> Path:
    other = file.with_name("other.csv")
    other.write_text(file.read_text() + f"{label},one more\n")
    return other


@pytest.mark.slow
def test_saved_adapter_is_loaded_by_peft(models_folder: Path, tmp_path: Path) -> None:
    made = task(adapter={"rank": 2, "head": "trained"})
    model = made.model().eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    made.save(model, tmp_path / "adapter")
    opened = PeftModel.from_pretrained(made.build_base(), str(tmp_path / "adapter")).eval()
    batch = [torch.tensor([[101, 2026, 4003, 102]]), torch.ones(1, 4, dtype=torch.int64)]
    with torch.no_grad():
        assert torch.equal(opened(*batch), model(*batch))
