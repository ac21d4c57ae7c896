"""Coverage-guided fuzzing of the decoder: whatever the bytes, only a ``WireError`` comes out, cheaply.

    pip install '.[fuzz]'
    python benchmarks/fuzz_decoder.py [--seconds 1800] [--folder fuzz] [--json FILE]

Each input picks one of four plans (a server's, a site's, one that holds nothing, one of a larger network) and carries a
message; half of them get checksums that hold, as a forger's would, and half of these the right run, model, question and
mask too. A finding is any exception but ``WireError``, a patch
that is not within the plan, more than a second of processor time, or memory above twice the plan plus 16 MB. It ends the
run, and its input stays in ``FOLDER/findings``: make it a case of ``tests/wire/test_hostile.py``, where it is a test for
ever. Exits with 1 on a finding.
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
    from flare_sparse.wire.codec import Decoded, decode, encode
    from flare_sparse.wire.encodings import CODES, ENCODINGS
    from flare_sparse.wire.envelope import HEADER_BYTES, read_header, write_header

from flare_sparse.errors import RejectedMessage, WireError
from flare_sparse.exchange import Patch
from flare_sparse.mask import Mask
from flare_sparse.params import Layout, TensorSpec
from flare_sparse.wire import envelope
from flare_sparse.wire.plan import Plan

SLACK_BYTES = 16 * 2**20
SECONDS = 1.0
MOST_BYTES = 40_960
LENGTHS = slice(96, 112)
IDENTITY = (slice(0, 6), slice(12, 24), slice(32, 72))  # magic and version; round and sequence; kind, run and layout
KNOWN = slice(72, 88)


def layout(*shapes: tuple[int, ...]) -> Layout:
    return Layout(tuple(TensorSpec(f"t{i}", shape, "weight") for i, shape in enumerate(shapes)))


def some(size: int, share: float) -> Mask:
    return Mask(torch.rand(size, generator=torch.Generator().manual_seed(7)) < share)


SMALL, LARGE = layout((6, 5), (7,), (), (4, 2, 3)), layout((100, 60), (20, 10, 3, 3), (17,))
SERVER = Plan(
    SMALL, "0123456789abcdef", base_mask=some(SMALL.size, 0.5), base_sequence=4, sequence=7, round=3, kind="train"
)
PLANS = (
    SERVER,
    replace(SERVER, sequence=None, round=None, kind=None),
    replace(SERVER, base_mask=None, base_sequence=None),
    replace(SERVER, layout=LARGE, base_mask=some(LARGE.size, 0.5)),
)


class Finding(Exception):
    """The decoder did what it must not do."""


def seeds() -> list[bytes]:
    """Valid messages: every plan, selection and number format, each encoding where it can say the selection."""
    found = []
    for (number, plan), share, values in product(enumerate(PLANS), (0.0, 0.02, 0.3, 1.0), ("float32", "bfloat16")):
        full = replace(plan, sequence=7, round=3, kind="train")
        masks = [some(plan.layout.size, share)]
        if plan.base_mask is not None:
            masks += [plan.base_mask, plan.base_mask & masks[0]]
        for on in masks:
            patch = Patch(torch.ones(on.count), on)
            found += [bytes([number]) + encode(patch, full, values=values).data.tobytes()]  # type: ignore[arg-type]
            found += [bytes([number]) + forced(name, full, on).tobytes() for name in ENCODINGS if can(name, full, on)]
        asked = encode(
            Patch(torch.ones(on.count), on, "previous" if plan.base_sequence else "zeros"), full, trainable=on
        )
        found.append(bytes([number]) + asked.data.tobytes())
    return sorted(set(found))


def can(name: str, plan: Plan, on: Mask) -> bool:
    least = ENCODINGS[name].min_bytes(on, plan.base_mask, plan.layout)
    return least is not None and ENCODINGS[name].encode(on, plan.base_mask, plan.layout) is not None


def forced(name: str, plan: Plan, on: Mask) -> np.ndarray:
    """A message whose selection is said by one encoding, cheap or not."""
    encoding = ENCODINGS[name]
    raw = encoding.encode(on, plan.base_mask, plan.layout)
    assert raw is not None
    plain = read_header(encode(Patch(torch.ones(on.count), on), replace(plan, base_mask=None)).data)
    known = bytes.fromhex(plan.base_mask.fingerprint) if encoding.requires_base and plan.base_mask else bytes(16)
    header = replace(plain, encoding=encoding.code, base_mask=known, selection_bytes=len(raw))
    buffer = np.zeros(header.values_start + -(-4 * on.count // 8) * 8, np.uint8)
    buffer[HEADER_BYTES : HEADER_BYTES + len(raw)] = np.frombuffer(raw, np.uint8)
    write_header(header, buffer)
    return buffer


def resealed(message: np.ndarray) -> np.ndarray:
    """With checksums that hold, where its lengths leave room for them; names of run and model are left as they are."""
    if message.size < HEADER_BYTES:
        return message
    first, second = (int(n) for n in np.frombuffer(message[LENGTHS].tobytes(), "<u8"))
    start = -(-(HEADER_BYTES + first + second) // 8) * 8
    if start <= message.size and not (message.size - start) % 8:
        checks = envelope._CHECKS.pack(*envelope._checksums(message, start))
        message[112:HEADER_BYTES] = np.frombuffer(checks, np.uint8)
    return message


@cache
def sample(plan: Plan) -> np.ndarray:
    """An empty message of this plan."""
    full = replace(plan, base_mask=None, sequence=7, round=3, kind="train")
    return encode(Patch(torch.zeros(0), Mask.empty(plan.layout.size)), full).data


def introduced(message: np.ndarray, plan: Plan) -> np.ndarray:
    """With the right run, model and question in its header, and the mask's name where its encoding leans on one."""
    if message.size < HEADER_BYTES:
        return message
    right = sample(plan)
    for part in IDENTITY:
        message[part] = right[part]
    requires_base = message[6] in CODES and CODES[int(message[6])].requires_base and plan.base_mask is not None
    held = bytes.fromhex(plan.base_mask.fingerprint) if requires_base and plan.base_mask else bytes(16)
    message[KNOWN] = np.frombuffer(held, np.uint8)
    return message


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def resident_bytes() -> int:
    return resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[1])


def check(data: bytes) -> None:
    """One input; the oracle.

    Raises:
        Finding: the decoder did what it must not do.
    """
    if not data:
        return
    plan, message = PLANS[data[0] % len(PLANS)], np.frombuffer(data[1:], np.uint8).copy()
    if data[0] < 64:
        message = introduced(message, plan)
    if data[0] < 128:
        message = resealed(message)
    peak, before, began = peak_bytes(), resident_bytes(), time.thread_time()
    try:
        harmless(decode(message, plan, "site-1"), plan)
    except WireError as error:
        if isinstance(error, RejectedMessage) and not error.code.startswith("E_"):
            raise Finding(f"a code that is none: {error.code}") from error
    if time.thread_time() - began > SECONDS:
        raise Finding(f"took {time.thread_time() - began:.1f} s")
    grown = peak_bytes() - before
    if peak_bytes() > peak and grown > 2 * 4 * plan.layout.size + SLACK_BYTES:
        raise Finding(f"took {grown} bytes")


def harmless(said: Decoded, plan: Plan) -> None:
    patch = said.patch
    if patch.mask.size != plan.layout.size or patch.values.shape != (patch.mask.count,):
        raise Finding(f"not within the plan: {patch.mask}, {tuple(patch.values.shape)}")
    if not torch.isfinite(patch.values).all():
        raise Finding("a value that is not finite")
    if said.trainable is not None and said.trainable.size != plan.layout.size:
        raise Finding(f"not within the plan: {said.trainable}")


def fuzz(arguments: list[str]) -> None:
    """LibFuzzer's own loop; does not return."""
    torch.set_num_threads(1)
    atheris.Setup([sys.argv[0], *arguments], check)
    atheris.Fuzz()


def campaign(seconds: int, folder: Path) -> dict[str, Any]:
    """Run libFuzzer in a process of its own and read its figures."""
    corpus, findings = folder / "corpus", folder / "findings"
    for place in (corpus, findings):
        place.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()):
        (corpus / f"seed-{number:03}").write_bytes(seed)
    log = folder / "fuzz.log"
    line = [sys.executable, __file__, "--child", f"-max_total_time={seconds}", f"-max_len={MOST_BYTES}", "-timeout=30"]
    line += ["-rss_limit_mb=2048", "-print_final_stats=1", f"-artifact_prefix={findings}/", str(corpus)]
    with log.open("w") as file:
        done = subprocess.run(line, stdout=file, stderr=subprocess.STDOUT, check=False)
    said = log.read_text(errors="replace")
    figures = {name: int(number) for name, number in re.findall(r"^stat::(\w+):\s+(\d+)", said, re.MULTILINE)}
    covered = re.findall(r"cov: (\d+) ft: (\d+)", said)
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
    figures = campaign(options.seconds, options.folder.resolve())
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return int(bool(figures["findings"]) or figures["status"] != 0 or not figures["inputs"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        fuzz(sys.argv[2:])
    sys.exit(main())
