"""Encode and decode 25 M parameters against copying them: what a selection costs in time and bytes.

    python benchmarks/codec.py [--json FILE] [--millions 25]

*encode* starts from the full vector and ends with the message; *decode* ends with checked values, as the server sums
them; *put* writes them into the receiver's vector, as a site does. All in milliseconds, medians of 9, one thread; memcpy
is ``numpy.copyto`` of the dense float32 model into memory that is already there. Exits with 1 when encode plus decode of
``shared`` takes more than 4 memcpy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flare_sparse.exchange import Patch
from flare_sparse.mask import Mask
from flare_sparse.params import Entry, Layout
from flare_sparse.wire.codec import decode, encode
from flare_sparse.wire.encodings import ENCODINGS
from flare_sparse.wire.plan import Plan

BOUND = 4.0


def milliseconds(act: Callable[[], Any], runs: int = 9) -> float:
    act()
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        act()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def measured(sparsity: float, millions: int, memcpy_ms: float) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)
    layout = Layout((Entry("w", (1000, 1000 * millions), "weight"),))
    vector = torch.randn(layout.size, generator=draw)
    mask = Mask(torch.rand(layout.size, generator=draw) >= sparsity)
    plan = Plan(layout, "0" * 16, known=mask, sequence=1, round=1, kind="train")
    message = encode(Patch.of(vector, mask), plan)  # the mask's indices and fingerprint are computed once, here
    patch, held = decode(message.data, plan).patch, vector.clone()
    row: dict[str, Any] = {"sparsity": sparsity, "memcpy_ms": memcpy_ms, "bytes": message.payload_bytes}
    row["encode_ms"] = milliseconds(lambda: encode(Patch.of(vector, mask), plan))
    row["decode_ms"] = milliseconds(lambda: decode(message.data, plan))
    row["put_ms"] = milliseconds(lambda: patch.applied(held))
    row["memcpys"] = (row["encode_ms"] + row["decode_ms"]) / memcpy_ms
    row["selections"] = {}
    wider = mask | Mask(torch.rand(layout.size, generator=draw) < 0.1)
    for name, known in (("bitmap", None), ("shrink", wider), ("csr", None)):
        encoding = ENCODINGS[name]
        raw = np.frombuffer(encoding.write(mask, known, layout) or b"", np.uint8)
        row["selections"][name] = {
            "bytes": raw.size,
            "write_ms": milliseconds(lambda e=encoding, k=known: e.write(mask, k, layout), 1),
            "read_ms": milliseconds(lambda e=encoding, k=known, r=raw: e.read(r, k, layout), 1),
        }
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--millions", type=int, default=25)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dense = np.random.default_rng(1).standard_normal(arguments.millions * 1_000_000, dtype=np.float32)
    copy = np.empty_like(dense)
    memcpy_ms = milliseconds(lambda: np.copyto(copy, dense), 21)
    rows = [measured(sparsity, arguments.millions, memcpy_ms) for sparsity in (0.5, 0.9, 0.99)]
    print(f"memcpy of {dense.nbytes / 1e6:.0f} MB: {memcpy_ms:.1f} ms")
    for row in rows:
        print(
            f"shared at {row['sparsity']:.0%}: encode {row['encode_ms']:.1f} + decode {row['decode_ms']:.1f} ms = "
            f"{row['memcpys']:.2f} memcpy (bound {BOUND:.0f}), put {row['put_ms']:.1f} ms, {row['bytes']:,} bytes"
        )
        for name, cost in row["selections"].items():
            print(
                f"    say it by {name}: {cost['bytes']:>12,} bytes, write {cost['write_ms']:.0f} ms, "
                f"read {cost['read_ms']:.0f} ms"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    return int(any(row["memcpys"] > BOUND for row in rows))


if __name__ == "__main__":
    sys.exit(main())
