"""Bytes, error and time of every value format, and of random selections in every encoding against their entropy.

    python benchmarks/performance/value_formats.py [--json FILE] [--millions 25]

The values are the 10 % of a mask that both ends hold, normal with the deviation 1/30, and differ from the receiver's by
a tenth of that. *Error* is the mean error of a value that arrives, against the deviation of what is sent: of the
differences for 8, 4 and 2 bits, of the values for the others. Times are the
shortest of 9, of the processor, one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flare_sparse.core.exchange import Patch
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.wire.codec import decode, encode
from flare_sparse.wire.encodings import ENCODINGS, compute_selection_entropy
from flare_sparse.wire.formats import FORMATS, ValueType
from flare_sparse.wire.plan import Plan

DEVIATION = 1 / 30


def time_ms(act: Callable[[], Any]) -> float:
    times = []
    for _ in range(9):
        began = time.process_time()
        act()
        times.append(1000 * (time.process_time() - began))
    return min(times)


def measure_formats(layout: Layout, draw: torch.Generator) -> list[dict[str, Any]]:
    """Return bits a value, error and milliseconds of each value format."""
    vector, change = (torch.randn(layout.size, generator=draw) * DEVIATION for _ in range(2))
    mask, held = Mask(torch.rand(layout.size, generator=draw) < 0.1), vector + change / 10
    mask.indices  # noqa: B018
    plan = Plan(
        layout, "0" * 16, "b" * 16, mask, held, target="7" * 16, request="9" * 16, sequence=2, round=1, kind="train"
    )
    rows = []
    for values in list(FORMATS):

        def send(values: ValueType = values) -> Any:
            generator = torch.Generator().manual_seed(1)
            return encode(Patch.from_vector(vector, mask), plan, values=values, generator=generator)

        message = send()
        error = (decode(message.data, plan).patch.values - mask.take(vector)).abs().mean()
        rows.append(
            {
                "values": values,
                "bits": 8 * message.values_bytes / mask.count,
                "error": float(error) / (DEVIATION / 10 if FORMATS[values].sends_differences else DEVIATION),
                "encode_ms": time_ms(send),
                "decode_ms": time_ms(partial(decode, message.data, plan)),
            }
        )
    return rows


def measure_selections(layout: Layout, draw: torch.Generator) -> list[dict[str, Any]]:
    """Return bytes and milliseconds of selections at random."""
    rows = []
    for sparsity in (0.8, 0.9, 0.95, 0.98, 0.99, 0.999):
        mask = Mask(torch.rand(layout.size, generator=draw) >= sparsity)
        mask.indices  # noqa: B018
        sections = {name: ENCODINGS[name].encode(mask, None, layout) or b"" for name in ("gaps", "bitmap")}
        raw = np.frombuffer(sections["gaps"], np.uint8)
        rows.append(
            {
                "sparsity": sparsity,
                "entries": mask.count,
                "entropy": compute_selection_entropy(mask, None),
                **{name: len(section) for name, section in sections.items()},
                # Row pointers and column indices, int32: what the papers send.
                "csr": 4 * (mask.count + layout.tensors[0].shape[0] + 1),
                "encode_ms": time_ms(partial(ENCODINGS["gaps"].encode, mask, None, layout)),
                "decode_ms": time_ms(partial(ENCODINGS["gaps"].decode, raw, None, layout)),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--millions", type=int, default=25)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    layout = Layout((TensorSpec("w", (1000, 1000 * arguments.millions), "weight"),))
    draw = torch.Generator().manual_seed(1)
    formats, selections = measure_formats(layout, draw), measure_selections(layout, draw)
    plain = next(row["encode_ms"] + row["decode_ms"] for row in formats if row["values"] == "bfloat16")
    print("| format | bits a value | error | encode | decode | of bfloat16 |\n| --- | --- | --- | --- | --- | --- |")
    for row in formats:
        print(
            f"| {row['values']} | {row['bits']:.2f} | {row['error']:.2%} | {row['encode_ms']:.0f} ms "
            f"| {row['decode_ms']:.0f} ms | {(row['encode_ms'] + row['decode_ms']) / plain:.1f}x |"
        )
    print("\n| sparsity | entropy | gaps | of entropy | bits an entry | bitmap | csr | encode | decode |")
    print("| --- " * 9 + "|")
    for row in selections:
        print(
            f"| {row['sparsity']:.1%} | {row['entropy']:,} | {row['gaps']:,} | {row['gaps'] / row['entropy']:.3f} "
            f"| {8 * row['gaps'] / row['entries']:.2f} | {row['bitmap']:,} | {row['csr']:,} "
            f"| {row['encode_ms']:.0f} ms | {row['decode_ms']:.0f} ms |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"formats": formats, "selections": selections}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
