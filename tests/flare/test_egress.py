"""The egress log in FLARE: the last handler, behind guards; a result without a line does not leave."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ProcessType, ReservedTopic, ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.fuel.f3.cellnet.core_cell import Message
from nvflare.fuel.utils import fobs
from nvflare.private.aux_runner import AuxMsgTarget, AuxRunner

from flare_sparse.components.decomposers import MaskDecomposer
from flare_sparse.core.mask import Mask
from flare_sparse.flare.egress import EgressRecorder, install_recorder, iterate_buffers
from flare_sparse.flare.payload import HELLO, build_refusal, get_refusal_code, wrap
from flare_sparse.rounds.endpoints.egress import EGRESS_FOLDER, read_chain


class Cell:
    """FLARE's connection, which keeps what was sent by receiver."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Shareable]] = []

    def fire_and_forget(self, *, targets: list[str], message: Message, **settings: Any) -> None:
        self.sent += [(target, message.payload) for target in targets]

    def fire_multi_requests_and_forget(self, targets: dict[str, Any], **settings: Any) -> None:
        self.sent += [(target, request.message.payload) for target, request in targets.items()]


def build_context(kit: Path) -> FLContext:
    (kit / "local").mkdir(parents=True)
    (kit / "local" / "flare_sparse_policy.yaml").write_text("metrics: rounded\n")
    workspace = SimpleNamespace(
        get_root_dir=lambda: str(kit),
        get_site_config_dir=lambda: str(kit / "local"),
        get_run_dir=lambda job: str(kit),
        get_app_config_dir=lambda job: str(kit / job),
    )
    handlers: list[Any] = []
    cell = Cell()
    engine = SimpleNamespace(
        get_workspace=lambda: workspace,
        handlers=handlers,
        get_cell=lambda: cell,
        add_handler=handlers.append,
        fire_event=lambda *event: None,
    )
    engine.aux_runner = AuxRunner(engine)
    fl_ctx = FLContextManager(engine=engine, identity_name="site-1", job_id="job-id").new_context()
    fl_ctx.set_prop(FLContextKey.PROCESS_TYPE, ProcessType.CLIENT_JOB, private=True, sticky=False)
    return fl_ctx


def send(result: Shareable, fl_ctx: FLContext) -> None:
    install_recorder(fl_ctx)
    install_recorder(fl_ctx)
    (recorder,) = fl_ctx.get_engine().handlers
    assert isinstance(recorder, EgressRecorder)
    fl_ctx.set_prop(FLContextKey.TASK_RESULT, result, private=True, sticky=False)
    recorder.handle_event(EventType.AFTER_TASK_RESULT_FILTER, fl_ctx)


def test_results_of_every_kind_have_a_line_with_the_policy_in_force(tmp_path: Path) -> None:
    fl_ctx = build_context(tmp_path)
    arrays = {"w": np.zeros(4, np.float32), "b": torch.ones(2), "n": [3]}
    results = [
        wrap(HELLO, {"version": "1"}),
        build_refusal("E_DATA", ReturnCode.EXECUTION_EXCEPTION),
        make_reply(ReturnCode.OK),
        DXO(DataKind.WEIGHTS, data=arrays).to_shareable(),
    ]
    for result in results:
        send(result, fl_ctx)
    lines = read_chain(tmp_path / EGRESS_FOLDER / "site-1")[0]
    assert [(line["kind"], line["contents"]) for line in lines] == [
        ("hello", ["versions and limits"]),
        ("refusal", ["E_DATA"]),
        ("result", ["return code"]),
        ("result", ["WEIGHTS"]),
    ]
    assert [line["bytes"] for line in lines[:2]] == [0, 0]
    # Of a DXO names, values and meta: 16 + 8 + 1 bytes of values, three names of one.
    assert [line["bytes"] for line in lines[2:]] == [len(fobs.dumps(results[2])), 28]
    # Headers and the site's context travel, too.
    assert all(line["sent_bytes"] > max(line["bytes"], 100) for line in lines)
    assert {line["job"] for line in lines} == {"job-id"}
    assert all(line["policy"] == {"metrics": "rounded"} for line in lines)


def test_what_a_job_hides_beside_its_numbers_is_counted(tmp_path: Path) -> None:
    fl_ctx, rows = build_context(tmp_path), bytes(100_000)
    plain = DXO(DataKind.WEIGHTS, data={"w": np.zeros(4, np.float32)})
    hidden = [plain.to_shareable() for _ in range(3)]
    hidden[1]["rows"] = rows
    hidden[2].set_header("rows", rows)
    for result in hidden:
        send(result, fl_ctx)
    fl_ctx.set_prop("rows", rows, private=False, sticky=True)
    send(hidden[0], fl_ctx)
    sent = [line["sent_bytes"] for line in read_chain(tmp_path / EGRESS_FOLDER / "site-1")[0]]
    assert min(sent[1:]) > sent[0] + len(rows)


@pytest.mark.parametrize("folder", [".", "config"])
def test_job_is_found_with_and_without_a_configuration_folder_of_the_kit(folder: str, tmp_path: Path) -> None:
    fl_ctx = build_context(tmp_path)
    (tmp_path / "job-id" / folder).mkdir(parents=True)
    (tmp_path / "job-id" / folder / "flare_sparse.yaml").write_text("name: age\npermit: EA 1\n")
    send(make_reply(ReturnCode.OK), fl_ctx)
    (line,) = read_chain(tmp_path / EGRESS_FOLDER / "site-1")[0]
    assert (line["job"], line["permit"]) == ("age", "EA 1")


def test_result_without_a_line_leaves_as_a_code(tmp_path: Path) -> None:
    fl_ctx = build_context(tmp_path)
    send(make_reply(ReturnCode.OK), fl_ctx)
    log = tmp_path / EGRESS_FOLDER / "site-1" / "egress.jsonl"
    log.write_bytes(log.read_bytes().replace(b"result", b"hello!"))
    result = DXO(DataKind.WEIGHTS, data={"w": np.ones(4)}).to_shareable()
    assert from_shareable(result).data
    send(result, fl_ctx)
    assert get_refusal_code(result) == "E_EGRESS"
    assert "DXO" not in result
    assert "line 1 is not the one" in (tmp_path / "site_error.txt").read_text()


@pytest.mark.parametrize(
    ("value", "size"),
    [(torch.ones((), dtype=torch.bfloat16), 2), (np.ones((2, 3))[:, ::2], 32), (["a", 1.5, None], 8),
     (Mask.full(80), 10)],
    ids=["scalar", "strided", "plain", "foreign"],
)  # fmt: skip
def test_content_of_any_value_is_counted(value: Any, size: int) -> None:
    fobs.register(MaskDecomposer)
    found = sum(len(part) if isinstance(part, bytes) else part.nbytes for part in iterate_buffers(value))
    # FLARE's serializer names the class, as of a ciphertext.
    assert found == size or (isinstance(value, Mask) and found > size)


def send_message(fl_ctx: FLContext, topic: str, content: bytes, *, multicast: bool = False) -> None:
    """Send a message as FLARE's engine does for events, streams and swarms."""
    runner, request = fl_ctx.get_engine().aux_runner, Shareable()
    if content:
        request["content"] = content
    targets = [AuxMsgTarget("server", "server"), AuxMsgTarget("site-2", "site-2")]
    if multicast:
        runner.multicast_aux_requests(topic, [(target, request) for target in targets], 0.0, fl_ctx)
    else:
        runner.send_aux_request(targets=targets, topic=topic, request=request, timeout=0.0, fl_ctx=fl_ctx)


def test_messages_outside_of_a_result_have_a_line_for_each_receiver(tmp_path: Path) -> None:
    fl_ctx, rows = build_context(tmp_path), bytes(50_000)
    install_recorder(fl_ctx)
    engine = fl_ctx.get_engine()
    engine.aux_runner.register_aux_message_handler("ask", lambda topic, request, fl_ctx: answer)
    answer = Shareable({"rows": rows})
    send_message(fl_ctx, "fed.event", rows)
    send_message(fl_ctx, "stream", rows, multicast=True)
    send_message(fl_ctx, ReservedTopic.JOB_HEART_BEAT, b"")
    send_message(fl_ctx, ReservedTopic.JOB_HEART_BEAT, rows)
    question = Shareable()
    question.set_peer_props({"__identity_name__": "site-2"})
    assert engine.aux_runner.dispatch(topic="ask", request=question, fl_ctx=fl_ctx) is answer
    lines = read_chain(tmp_path / EGRESS_FOLDER / "site-1")[0]
    assert [(line["kind"], *line["contents"], line["beside"]["receiver"]) for line in lines] == [
        *(
            ("message", topic, to)
            for topic in ("fed.event", "stream", "__job_heartbeat__")
            for to in ("server", "site-2")
        ),
        ("message", "ask", "site-2"),
    ]
    assert all(line["bytes"] == line["sent_bytes"] > len(rows) for line in lines)
    assert len(engine.get_cell().sent) == 8


def test_message_without_a_line_is_not_sent(tmp_path: Path) -> None:
    fl_ctx = build_context(tmp_path)
    send(make_reply(ReturnCode.OK), fl_ctx)
    engine = fl_ctx.get_engine()
    engine.aux_runner.register_aux_message_handler("ask", lambda topic, request, fl_ctx: Shareable({"rows": b"1"}))
    (tmp_path / EGRESS_FOLDER / "site-1" / "head.txt").write_text("changed")
    for multicast in (False, True):
        send_message(fl_ctx, "fed.event", b"1", multicast=multicast)
    assert engine.get_cell().sent == []
    question = Shareable()
    question.set_peer_props({"__identity_name__": "site-2"})
    reply = engine.aux_runner.dispatch(topic="ask", request=question, fl_ctx=fl_ctx)
    assert reply.get_return_code() == ReturnCode.ERROR
    assert "rows" not in reply
