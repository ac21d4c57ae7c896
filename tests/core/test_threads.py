"""Work beside a block."""

from __future__ import annotations

import threading
from contextvars import ContextVar

import pytest

from flare_sparse.core.threads import run_beside


@pytest.mark.parametrize("fails", [False, True])
def test_work_ends_with_its_block_and_is_waited_for(fails: bool) -> None:
    done: list[str] = []

    def work(has_ended: threading.Event) -> None:
        assert has_ended.wait(10)
        done.append("last look")

    def block() -> None:
        with run_beside(work):
            done.append("block")
            if fails:
                raise KeyError

    if fails:
        with pytest.raises(KeyError):
            block()
    else:
        block()
    assert done == ["block", "last look"]


def test_work_sees_the_variables_of_its_caller() -> None:
    variable, seen = ContextVar("variable", default=False), list[bool]()
    variable.set(True)
    with run_beside(lambda _: seen.append(variable.get())):
        pass
    assert seen == [True]
