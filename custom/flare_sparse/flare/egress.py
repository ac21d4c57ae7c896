"""The site's egress log in FLARE: the last handler of a result writes its line, behind every filter and every guard.

What components send outside of a task's result (events, streams, messages of a swarm, replies) has a line of its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvflare.apis.dxo import from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, ReservedTopic, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
from nvflare.apis.utils.fl_context_utils import gen_new_peer_ctx
from nvflare.fuel.utils import fobs

from ..config.policy.policy import POLICY_FILE, read_policy
from ..config.yaml_files import read_yaml
from ..core.errors import FlareSparseError, get_failure_code
from ..rounds.endpoints.egress import EGRESS_FOLDER, EgressLog, Outgoing, describe_message
from .payload import HELLO, SUM, extract, get_refusal_code, is_statistics, shareable_to_message, strip_to_codes
from .workspace import find_job_file, get_workspace, write_site_error

_CONTROL = {value for name, value in vars(ReservedTopic).items() if name.isupper()} - {ReservedTopic.DO_TASK}
"""Topics of FLARE's own control of a job: heartbeats, end of a run."""


class EgressRecorder(FLComponent):
    """Writes a line for each result of a task, and for each other message of the job, before FLARE sends it.

    It is no component of a job or of a site's configuration: :func:`install_recorder` adds it behind all of them, so
    that it sees what leaves and not what a guard removes afterwards.
    """

    def __init__(self) -> None:
        super().__init__()
        self._log: EgressLog | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.AFTER_TASK_RESULT_FILTER:
            result = fl_ctx.get_prop(FLContextKey.TASK_RESULT)
            if isinstance(result, Shareable):
                self._record(result, fl_ctx)

    def _record(self, result: Shareable, fl_ctx: FLContext) -> None:
        """Write the line of a result; one without a line is stripped to its code, in place, and does not leave.

        FLARE sends the result even if an event handler raises, so an exception would not stop it.
        """
        try:
            self._log = self._log or _open_log(fl_ctx)
            self._log.record(replace(describe_result(result), sent=serialize(result, fl_ctx)))
        except Exception as error:  # noqa: BLE001 - fail closed, whatever goes wrong
            code = get_failure_code(error)
            strip_to_codes(result, code)
            # Its text stays here: logs may be streamed to the server.
            self.log_error(fl_ctx, f"{code}: a result was withheld, because the egress log has no line of it")
            with suppress(OSError):
                write_site_error(error, code, fl_ctx)

    def watch(self, runner: Any) -> None:
        """Write a line for each message that FLARE's ``AuxRunner`` sends, and for each reply that it returns.

        Events of a federation, streams, reliable messages and the messages of a swarm all go through it.
        """
        runner.send_aux_request = self._guard(
            runner.send_aux_request, lambda call: {target.name: call["request"] for target in call["targets"]}
        )
        runner.multicast_aux_requests = self._guard(
            runner.multicast_aux_requests,
            lambda call: {target.name: request for target, request in call["target_requests"]},
        )
        dispatch = runner.dispatch

        def reply(topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
            answer = dispatch(topic=topic, request=request, fl_ctx=fl_ctx)
            peer = fl_ctx.get_peer_context()
            name = "server" if peer is None else str(peer.get_identity_name())
            is_logged = self._record_messages(topic, {name: answer}, fl_ctx)
            return answer if is_logged else make_reply(ReturnCode.ERROR)

        runner.dispatch = reply

    def _guard(self, send: Callable[..., Any], list_requests: Callable[[Mapping[str, Any]], Any]) -> Callable[..., Any]:
        """Return a method that sends its requests if each has a line, and otherwise nothing."""

        def send_logged(*args: Any, **settings: Any) -> Any:
            call = signature(send).bind(*args, **settings).arguments
            is_logged = self._record_messages(call["topic"], list_requests(call), call["fl_ctx"])
            return send(*args, **settings) if is_logged else {}

        return send_logged

    def _record_messages(self, topic: str, messages: Mapping[str, Shareable], fl_ctx: FLContext) -> bool:
        """Write a line for each message by its receiver, and return whether they may leave."""
        try:
            # One message to many receivers is serialized once: it may be a piece of a model.
            sent: dict[int, bytes] = {}
            for receiver, message in messages.items():
                if topic in _CONTROL and set(message) <= {ReservedHeaderKey.HEADERS}:
                    continue
                self._log = self._log or _open_log(fl_ctx)
                if id(message) not in sent:
                    sent[id(message)] = serialize(message, fl_ctx)
                self._log.record(Outgoing("message", [topic], [sent[id(message)]], {"receiver": receiver}))
        except Exception as error:  # noqa: BLE001 - fail closed, whatever goes wrong
            self.log_error(
                fl_ctx, f"{get_failure_code(error)}: a message was withheld: it has no line in the egress log"
            )
            return False
        return True


def install_recorder(fl_ctx: FLContext) -> None:
    """Add the recorder behind the components of this site's process; a second call changes nothing."""
    engine = fl_ctx.get_engine()
    if not any(isinstance(handler, EgressRecorder) for handler in engine.handlers):
        recorder = EgressRecorder()
        engine.add_handler(recorder)
        recorder.watch(engine.aux_runner)


def describe_result(result: Shareable) -> Outgoing:
    """Return what a result contains, whichever package it is of."""
    if result.get_return_code() != ReturnCode.OK:
        return Outgoing("refusal", [get_refusal_code(result)])
    if (hello := extract(HELLO, result)) is not None:
        return Outgoing("hello", ["versions and limits"], beside=hello)
    with suppress(FlareSparseError):
        message = extract(SUM, result)
        return describe_message(*((message,) if message is not None else shareable_to_message(result, "")))
    with suppress(ValueError):
        dxo = from_shareable(result)
        kind = "statistics" if is_statistics(result) else getattr(dxo.data_kind, "value", str(dxo.data_kind))
        return Outgoing("result", [kind], list(iterate_buffers([dxo.data, dxo.meta])))
    # A result that is no DXO has no form that would tell its bytes from those beside it.
    return Outgoing("result", ["return code"], [serialize(result)])


def serialize(result: Shareable, fl_ctx: FLContext | None = None) -> bytes:
    """Return a result as FLARE serializes it: keys, headers, cookies, and the public properties of the site's context.

    FLARE adds an id of the message and the envelope of its connection afterwards.
    """
    whole = Shareable()
    whole.update({key: dict(value) if isinstance(value, dict) else value for key, value in result.items()})
    if fl_ctx is not None:
        whole.set_peer_context(gen_new_peer_ctx(fl_ctx))
    return bytes(fobs.dumps(whole))


def iterate_buffers(value: Any) -> Iterator[np.ndarray | bytes]:
    """Yield the content of nested mappings and sequences of a foreign job's result, names and values, in order."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
        yield value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
    elif isinstance(value, bytes) or (isinstance(value, np.ndarray) and value.dtype.kind in "biufc"):
        yield value
    elif isinstance(value, Mapping):
        for key in value:
            yield str(key).encode()
            yield from iterate_buffers(value[key])
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from iterate_buffers(item)
    elif value is None or isinstance(value, str | int | float | np.generic):
        yield str(value).encode()
    else:
        # Whatever else has bytes of its own only as FLARE serializes it.
        yield bytes(fobs.dumps(value))


def _open_log(fl_ctx: FLContext) -> EgressLog:
    policy = read_policy(Path(get_workspace(fl_ctx).get_site_config_dir()) / POLICY_FILE)
    file = find_job_file(fl_ctx)
    # A job of another package has no such file, only FLARE's id.
    job = read_yaml(file) if file.is_file() else {"name": fl_ctx.get_job_id()}
    terms = policy.model_dump(mode="json", exclude_defaults=True)
    folder = Path(get_workspace(fl_ctx).get_root_dir()) / EGRESS_FOLDER / fl_ctx.get_identity_name()
    return EgressLog(folder, str(job["name"]), terms, job.get("permit"))
