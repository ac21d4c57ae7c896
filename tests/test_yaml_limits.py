"""Settings are read within bounds: no aliases, no deep nesting, no huge files, models or messages."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml

from flare_sparse.assemble import assemble, count_model_entries
from flare_sparse.config import build_task, parse_job
from flare_sparse.config.yaml_files import MAX_BYTES, MAX_DEPTH, parse_yaml, read_yaml
from flare_sparse.data.admissions import AdmissionColumns, read_admissions
from flare_sparse.data.source import find_site_data
from flare_sparse.endpoints.reported import validate_metrics
from flare_sparse.errors import ConfigError, DataError, RejectedMessage
from flare_sparse.params import Layout
from flare_sparse.policy.policy import read_policy
from flare_sparse.wire.codec import decode
from flare_sparse.wire.plan import Plan

# Each level stands for ten of the one before: a billion values in half a kilobyte.
ALIAS_BOMB = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))
COLUMNS = AdmissionColumns("died", "med", None, None, None)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (ALIAS_BOMB, r"aliases such as \*a0 are not allowed"),
        ("a: " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested deeper than 32 levels"),
        ("a: " + "[" * 100_000, "nested deeper than 32 levels"),
        (" " * (MAX_BYTES + 1), "more than 1048576 bytes"),
    ],
)
def test_settings_that_exhaust_memory_are_refused(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_yaml(file)
    with pytest.raises(ConfigError, match=problem):
        read_policy(file)


def test_override_with_an_alias_is_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="aliases"):
        parse_yaml("[&a [x], *a]")


def test_deeply_nested_site_file_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "flare_sparse.yaml").write_text("data: " + "[" * 100_000)
    with pytest.raises(DataError, match="cannot be read as a site file"):
        find_site_data("site-1", tmp_path, {})


def test_number_of_threads_and_size_of_the_model_are_bounded_before_allocation() -> None:
    settings = {"name": "job", "method": {"name": "fedavg"}, "task": {"name": "mortality", "medications": 1_000_000}}
    with pytest.raises(ConfigError, match=r"federation\.threads"):
        parse_job({**settings, "federation": {"threads": 1025}})
    job = parse_job({**settings, "task": {**settings["task"], "model": {"name": "mlp", "hidden": [100_000]}}})
    assert count_model_entries(build_task(job)) == 100_000 * 1_000_002 + 1  # 400 GB if allocated
    with pytest.raises(ConfigError, match="allows max_model_entries 1000000"):
        assemble(job, max_entries=10**6)


def test_message_longer_than_any_of_the_model_is_refused_unread() -> None:
    plan = Plan(Layout.from_module(build_task(parse_job({
        "name": "job", "method": {"name": "fedavg"}, "task": {"name": "mortality", "medications": 2}
    })).model()), "0" * 16)  # fmt: skip
    message = np.zeros(2**24, np.uint8)
    with pytest.raises(RejectedMessage, match="E_LEN") as error:
        decode(message, plan)
    assert error.value.found == 2**24


@pytest.mark.parametrize("name", ["<script>x</script>", "\x1b[31mred", "mae\n", "", "m" * 65, "größe"])
def test_metric_name_with_markup_or_control_characters_is_rejected(name: str) -> None:
    with pytest.raises(RejectedMessage, match="E_METRICS"):
        validate_metrics({name: 1.0}, "site-1")


def test_ordinary_metric_names_are_accepted() -> None:
    names = ("mae", "auc_roc", "top-5 accuracy (%)", "dice/left", "recall@10", "f1.5")
    assert set(validate_metrics(dict.fromkeys(names, 1.0), "site-1")) == set(names)


def test_damaged_array_file_is_a_data_error_wherever_a_byte_changes(tmp_path: Path) -> None:
    buffer, file = io.BytesIO(), tmp_path / "stays.npz"
    np.savez_compressed(buffer, med=np.eye(8, dtype=np.uint8), died=np.arange(8) % 2)
    content = buffer.getvalue()
    refused = 0
    for position in range(len(content)):
        file.write_bytes(content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :])
        try:
            read_admissions(file, COLUMNS)
        except DataError:
            refused += 1
    assert refused > len(content) / 2
    assert zipfile.is_zipfile(io.BytesIO(content))
