"""The kernels' loops are compiled before they are used."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import kernel_digest
import pytest
import torch

from flare_sparse.compute.kernels import loops
from flare_sparse.compute.kernels.preparation import prepare_loops
from flare_sparse.config.assemble import assemble, check_kernels
from flare_sparse.config.loading import load_config

CONFIG = Path(__file__).parents[3] / "app_configs" / "neurosfl_brain_age.yaml"
ENTRIES = ("convolve", "scale_and_activate", "differentiate_activation", "differentiate_block", "convolve_back")


def test_every_loop_that_a_block_calls_is_ready(caplog: pytest.LogCaptureFixture) -> None:
    prepare_loops.cache_clear()
    before = torch.random.get_rng_state()
    with caplog.at_level(logging.INFO):
        prepare_loops()
        prepare_loops()
    assert [len(getattr(loops, name).signatures) for name in ENTRIES] == [1] * len(ENTRIES)
    assert len(caplog.messages) == 2, "the second call has nothing to do"
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(("compute", "lines"), [("sparse", 2), ("auto", 0), ("dense", 0)])
def test_a_job_that_demands_the_kernels_compiles_them_at_its_start(
    compute: str, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    prepare_loops.cache_clear()
    config = load_config(CONFIG, [f"method.training.compute={compute}"])
    with caplog.at_level(logging.INFO):
        check_kernels(assemble(config).method)
    assert len([line for line in caplog.messages if "sparse kernels" in line]) == lines


@pytest.mark.long
def test_one_of_two_processes_compiles_the_loops_and_both_compute_the_same_bits(tmp_path: Path) -> None:
    line, environment = [sys.executable, kernel_digest.__file__], {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    processes = [
        subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate() for process in processes]
    assert sorted("compiled in" in errors for _, errors in outputs) == [False, True]
    digests = [digest for output, _ in outputs for digest in output.split()]
    # In one and two threads; this process has a cache of its own.
    assert len(digests) == 4
    assert {*digests} == {kernel_digest.digest_kernels(1)}
