"""Errors of components."""

from __future__ import annotations

import pytest

from flare_sparse.components import ComponentError, KeepMask, OrderedMean


@pytest.mark.parametrize(
    ("component", "file"),
    [
        (OrderedMean(min_sites=1), "(config_fed_server.json of the job)"),
        (KeepMask(), "(config_fed_client.json or _server.json of the job)"),
    ],
)
def test_error_names_component_problem_remedy_and_the_file_of_the_job(component: object, file: str) -> None:
    text = str(ComponentError(component, "the update is empty", "see the log"))
    assert text == f"{type(component).__name__}: the update is empty; see the log {file}"
    # A remedy that names the file says it once.
    assert str(ComponentError(component, "x", "put it into config_fed_client.json")).count("config_fed") == 1
