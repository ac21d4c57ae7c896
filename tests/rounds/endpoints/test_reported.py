"""The numbers that a site reports beside its message."""

from __future__ import annotations

import pytest

from flare_sparse.core.errors import RejectedMessage
from flare_sparse.rounds.endpoints.events import validate_metrics


@pytest.mark.parametrize(
    "name",
    ["<script>x</script>", "\x1b[31mred", "mae\n", "a\tb", "", " ", "m" * 65, "[red]mae", 'a"b', "a\u202eb", "\ud800"],
)
def test_metric_name_with_markup_or_control_characters_is_rejected(name: str) -> None:
    with pytest.raises(RejectedMessage, match="E_METRICS"):
        validate_metrics({name: 1.0}, "site-1")


def test_printable_metric_names_of_any_language_are_accepted() -> None:
    names = (
        "mae",
        "top-5 accuracy (%)",
        "dice/left",
        "recall@10",
        "f1.5",
        "größe",
        "Fehler in Jahren",
        "R²",
        "年齢",
        "Σ=1",
    )
    assert set(validate_metrics(dict.fromkeys(names, 1.0), "site-1")) == set(names)
