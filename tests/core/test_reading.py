"""Minibatches of tensors are read at once, and are the same as examples read one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from flare_sparse.core.reading import MinibatchReader, stack_examples


class Doubled(TensorDataset):
    """Changes its examples where they are read."""

    def __getitem__(self, index: Any) -> tuple[torch.Tensor, ...]:
        return tuple(2 * value for value in super().__getitem__(index))


def build_rows(kind: type[TensorDataset] = TensorDataset) -> TensorDataset:
    return kind(torch.randn(7, 3, 2), torch.arange(7), torch.randn(7, 1).double())


@pytest.mark.parametrize(
    "dataset",
    [
        build_rows(),
        build_rows(Doubled),
        Subset(build_rows(), [6, 2, 2, 0]),
        ConcatDataset([build_rows(), build_rows()]),
        [(torch.ones(2), torch.tensor(i)) for i in range(5)],
    ],
    ids=["tensors", "subclass", "subset", "concatenated", "list"],
)
def test_minibatches_are_those_of_the_dataset_itself(dataset: Any) -> None:
    for batch, expected in zip(
        DataLoader(MinibatchReader(dataset), batch_size=3), DataLoader(dataset, batch_size=3), strict=True
    ):
        assert [value.dtype for value in batch] == [value.dtype for value in expected]
        assert all(torch.equal(value, other) for value, other in zip(batch, expected, strict=True))


def test_rows_of_tensors_are_not_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda *_: pytest.fail("an example was read alone"))
    rows: Dataset[Any] = build_rows()
    loader = DataLoader(MinibatchReader(rows), batch_size=4, collate_fn=stack_examples)
    assert [len(batch[0]) for batch in loader] == [4, 3]


def test_examples_of_a_minibatch_are_rows_for_a_collate_of_the_users_own() -> None:
    numbers, rows = torch.arange(6), torch.randn(6, 2)
    examples = MinibatchReader(TensorDataset(numbers, rows)).__getitems__([0, 1, 2, 5])
    assert len(examples) == 4
    assert [int(number) for number, _ in examples] == [0, 1, 2, 5]
    number, row = examples[-1]
    assert number == 5
    assert torch.equal(row, rows[5])


def test_tensors_of_a_minibatch_are_not_stacked_again() -> None:
    columns = [torch.arange(4), torch.randn(4, 2)]
    stacked = stack_examples(TensorDataset(*columns))
    assert all(one is other for one, other in zip(stacked, columns, strict=True))
