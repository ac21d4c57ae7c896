from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from flare_sparse.core.ranking import compute_auc, compute_average_precision

# Few values: many risks are equal.
RANKED = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]), st.booleans()), min_size=2, max_size=40)


@given(RANKED.filter(lambda pairs: len({positive for _, positive in pairs}) == 2))
def test_both_metrics_equal_those_of_scikit_learn(pairs: list[tuple[float, bool]]) -> None:
    risk, classes = (torch.tensor(column) for column in zip(*pairs, strict=True))
    assert compute_auc(risk, classes) == pytest.approx(roc_auc_score(classes, risk), abs=1e-12)
    assert compute_average_precision(risk, classes) == pytest.approx(average_precision_score(classes, risk), abs=1e-12)
