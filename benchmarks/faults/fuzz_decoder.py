"""Coverage-guided fuzzing of the decoder: for any bytes it returns a message or raises ``WireError``, cheaply.

    pip install '.[fuzz]'
    python benchmarks/faults/fuzz_decoder.py [--seconds 1800] [--folder fuzz] [--json FILE]

Each input selects one of four plans (a server's, a site's, one without a base, one of a larger network) and carries a
message. Half of the messages get valid checksums, and half of these also the right run, model, request and mask. A
finding is any exception but ``WireError``, a patch outside the plan, more than a second of processor time, or memory
above twice the plan plus 16 MB. It ends the run; its input stays in ``FOLDER/findings`` and should become a case of
``tests/wire/test_hostile.py``. Exits with 1 on a finding.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import atheris
import numpy as np
import torch

with atheris.instrument_imports(include=["flare_sparse.wire"], enable_loader_override=False):
    from flare_sparse.wire.codec import decode, encode
    from flare_sparse.wire.encodings import ENCODINGS, Encoding
    from flare_sparse.wire.envelope import HEADER_BYTES, VERSION, read_header, write_header

from flare_sparse.core.errors import RejectedMessage, WireError
from flare_sparse.core.exchange import Patch
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.wire import envelope
from flare_sparse.wire.codec import Decoded
from flare_sparse.wire.formats import FORMATS
from flare_sparse.wire.plan import NO_NAME, Plan

SLACK_BYTES = 16 * 2**20
SECONDS = 1.0
MOST_BYTES = 40_960
LENGTHS = slice(96, 112)
CODES: dict[int, Encoding] = {encoding.code: encoding for encoding in ENCODINGS.values()}
# Magic; round and sequence; names, kind, run and layout.
IDENTITY = (slice(0, 4), slice(5, 6), slice(12, 24), slice(32, 88))
KNOWN = slice(24, 32)


def build_layout(*shapes: tuple[int, ...]) -> Layout:
    """Return a layout whose last tensor is a buffer."""
    *weights, buffer = (TensorSpec(f"t{i}", shape, "weight") for i, shape in enumerate(shapes))
    return Layout((*weights, replace(buffer, role="buffer")))


def draw_mask(size: int, share: float) -> Mask:
    return Mask(torch.rand(size, generator=torch.Generator().manual_seed(7)) < share)


SMALL, LARGE = build_layout((6, 5), (7,), (), (4, 2, 3)), build_layout((100, 60), (20, 10, 3, 3), (17,))
SERVER = Plan(
    SMALL,
    "0123456789abcdef",
    base="4" * 16,
    base_mask=draw_mask(SMALL.size, 0.5),
    base_vector=torch.linspace(-1, 1, SMALL.size),
    target="7" * 16,
    request="9" * 16,
    sequence=7,
    round=3,
    kind="train",
)
PLANS = (
    SERVER,
    replace(SERVER, target=None, request=None, sequence=None, round=None, kind=None),
    replace(SERVER, base=None, base_mask=None, base_vector=None),
    replace(
        SERVER,
        layout=LARGE,
        base_mask=draw_mask(LARGE.size, 0.5),
        base_vector=torch.linspace(-1, 1, LARGE.size),
    ),
)


class Finding(Exception):
    """The decoder violated a property."""


def build_seeds() -> list[bytes]:
    """Return valid messages of every plan, selection and number format, by every encoding that can write them."""
    messages = []
    for (number, plan), share, values in product(enumerate(PLANS), (0.0, 0.02, 0.3, 1.0), FORMATS):
        full = replace(plan, target="7" * 16, request="9" * 16, sequence=7, round=3, kind="train")
        masks = [draw_mask(plan.layout.size, share)]
        if plan.base_mask is not None:
            masks += [plan.base_mask, plan.base_mask & masks[0]]
        for mask in masks:
            patch = Patch(torch.ones(mask.count), mask)
            for content in ("weights", "delta"):
                generator = torch.Generator().manual_seed(1)
                options: Any = {"values": values, "content": content, "generator": generator}
                messages.append(bytes([number]) + encode(patch, full, **options).data.tobytes())
            messages += [
                bytes([number]) + encode_by(name, full, mask).tobytes()
                for name in ENCODINGS
                if is_possible(name, full, mask)
            ]
        request = encode(
            Patch(torch.ones(mask.count), mask, "previous" if plan.base else "zeros"), full, trainable=mask
        )
        messages.append(bytes([number]) + request.data.tobytes())
    return sorted(set(messages))


def is_possible(name: str, plan: Plan, mask: Mask) -> bool:
    least = ENCODINGS[name].compute_min_bytes(mask, plan.base_mask, plan.layout)
    return least is not None and ENCODINGS[name].encode(mask, plan.base_mask, plan.layout) is not None


def encode_by(name: str, plan: Plan, mask: Mask) -> np.ndarray:
    """Return a message whose selection is written by a given encoding, even if another takes fewer bytes."""
    encoding = ENCODINGS[name]
    raw = encoding.encode(mask, plan.base_mask, plan.layout)
    assert raw is not None
    plain_plan = replace(plan, base_mask=None, base_vector=None)
    message = encode(Patch(torch.ones(mask.count), mask), plain_plan).data
    plain = read_header(message)
    values = message[plain.values_start :]
    known = plan.base if encoding.requires_base and plan.base else NO_NAME
    header = replace(plain, encoding=encoding.code, base=known, selection_bytes=len(raw))
    buffer = np.zeros(header.values_start + values.size, np.uint8)
    buffer[header.values_start :] = values
    buffer[HEADER_BYTES : HEADER_BYTES + len(raw)] = np.frombuffer(raw, np.uint8)
    write_header(header, buffer)
    return buffer


def with_checksums(message: np.ndarray) -> np.ndarray:
    """Return the message with valid checksums, if its lengths allow; names of run and model stay as they are."""
    if message.size < HEADER_BYTES:
        return message
    first, second = (int(n) for n in np.frombuffer(message[LENGTHS].tobytes(), "<u8"))
    start = -(-(HEADER_BYTES + first + second) // 8) * 8
    if start <= message.size and not (message.size - start) % 8:
        envelope.write_checksums(message, start)
    return message


@cache
def build_empty_message(plan: Plan) -> np.ndarray:
    """Return a message of this plan without values."""
    full = replace(plan, base_mask=None, target="7" * 16, request="9" * 16, sequence=7, round=3, kind="train")
    return encode(Patch(torch.zeros(0), Mask.empty(plan.layout.size)), full).data


def with_identity(message: np.ndarray, plan: Plan) -> np.ndarray:
    """Return the message with the right run, model, request and, if its encoding needs one, base mask."""
    if message.size < HEADER_BYTES:
        return message
    valid = build_empty_message(plan)
    for part in IDENTITY:
        message[part] = valid[part]
    message[4] = VERSION
    encoding = CODES.get(int(message[6]))
    requires_base = encoding is not None and encoding.requires_base and plan.base_mask is not None
    base = plan.base if requires_base and plan.base else NO_NAME
    message[KNOWN] = np.frombuffer(bytes.fromhex(base), np.uint8)
    return message


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def resident_bytes() -> int:
    return resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[1])


def check(data: bytes) -> None:
    """Decode one input and check the properties.

    Raises:
        Finding: the decoder violated a property.
    """
    if not data:
        return
    plan, message = PLANS[data[0] % len(PLANS)], np.frombuffer(data[1:], np.uint8).copy()
    if data[0] < 64:
        message = with_identity(message, plan)
    if data[0] < 128:
        message = with_checksums(message)
    peak, before, began = peak_bytes(), resident_bytes(), time.thread_time()
    try:
        check_message(decode(message, plan, "site-1"), plan)
    except WireError as error:
        if isinstance(error, RejectedMessage) and not error.code.startswith("E_"):
            raise Finding(f"not an error code: {error.code}") from error
    if time.thread_time() - began > SECONDS:
        raise Finding(f"took {time.thread_time() - began:.1f} s")
    grown = peak_bytes() - before
    if peak_bytes() > peak and grown > 2 * 4 * plan.layout.size + SLACK_BYTES:
        raise Finding(f"took {grown} bytes")


def check_message(message: Decoded, plan: Plan) -> None:
    patch = message.patch
    if patch.mask.size != plan.layout.size or patch.values.shape != (patch.mask.count,):
        raise Finding(f"outside the plan: {patch.mask}, {tuple(patch.values.shape)}")
    if not torch.isfinite(patch.values).all():
        raise Finding("a value that is not finite")
    if message.trainable is not None and message.trainable.size != plan.layout.size:
        raise Finding(f"outside the plan: {message.trainable}")


def fuzz(arguments: list[str]) -> None:
    """Run libFuzzer's loop, which does not return."""
    torch.set_num_threads(1)
    atheris.Setup([sys.argv[0], *arguments], check)
    atheris.Fuzz()


def run_fuzzer(seconds: int, folder: Path) -> dict[str, Any]:
    """Run libFuzzer in another process and return its figures."""
    corpus, findings = folder / "corpus", folder / "findings"
    for subfolder in (corpus, findings):
        subfolder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(build_seeds()):
        (corpus / f"seed-{number:03}").write_bytes(seed)
    log = folder / "fuzz.log"
    line = [sys.executable, __file__, "--child", f"-max_total_time={seconds}", f"-max_len={MOST_BYTES}", "-timeout=30"]
    line += ["-rss_limit_mb=2048", "-print_final_stats=1", f"-artifact_prefix={findings}/", str(corpus)]
    with log.open("w") as file:
        done = subprocess.run(line, stdout=file, stderr=subprocess.STDOUT, check=False)
    text = log.read_text(errors="replace")
    figures = {name: int(number) for name, number in re.findall(r"^stat::(\w+):\s+(\d+)", text, re.MULTILINE)}
    covered = re.findall(r"cov: (\d+) ft: (\d+)", text)
    return {
        "seconds": seconds,
        "inputs": figures.get("number_of_executed_units", 0),
        "peak_rss_mb": figures.get("peak_rss_mb", 0),
        "edges": int(covered[-1][0]) if covered else 0,
        "features": int(covered[-1][1]) if covered else 0,
        "corpus": len(list(corpus.iterdir())),
        "findings": sorted(path.name for path in findings.iterdir()),
        "status": done.returncode,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=1800)
    parser.add_argument("--folder", type=Path, default=Path("fuzz"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = run_fuzzer(options.seconds, options.folder.resolve())
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return int(bool(figures["findings"]) or figures["status"] != 0 or not figures["inputs"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        fuzz(sys.argv[2:])
    sys.exit(main())
