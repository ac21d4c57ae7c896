"""The streams of one job at one end: its model, and groups of arrays of the same shapes beside it.

SCAFFOLD, for example, sends its controls beside the model and the deltas of controls beside an update. A packet is what
travels: the messages of all streams and what a receiver needs to read them, in plain types.
"""

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ...core.checkpoint.store import Store
from ...core.errors import RejectedMessage
from ...wire.codec import read_names
from ...wire.ledger import Ledger, LedgerLine
from ...wire.plan import is_name
from ..link import Answer, SiteLink
from .arrays import Arrays, read_specs, write_specs
from .models import HeldModel, ModelReceiver, ModelSender, decode_update, encode_update, name_update
from .packets import MODEL, Groups, Packet, align_arrays, build_kind, read_message, read_parts, restore_arrays
from .settings import StreamSettings


@dataclass(frozen=True)
class StreamMemory:
    """What a site keeps on disk.

    Attributes:
        held: the models that it holds, by stream.
        answers: what its last answers have not sent, by stream and name.
        counted: name of the last answer that counts, by stream.
    """

    held: dict[str, HeldModel] = field(default_factory=dict)
    answers: dict[str, dict[str, Answer[Tensor | None]]] = field(default_factory=dict)
    counted: dict[str, str] = field(default_factory=dict)


class Exchange:
    """Encodes and decodes the packets of one job at one end. All methods may be called from several threads.

    Args:
        job: name of the job, equal at both ends.
        name: name of this end.
        record: receives a line for every message.
        folder: folder of this end's memory, which a restarted process continues from; None: it is not kept on disk.
    """

    def __init__(self, job: str, name: str, record: Callable[[LedgerLine], None], folder: Path | None = None):
        self._run = hashlib.sha256(job.encode()).hexdigest()[:16]
        self._name, self._record = name, record
        self._store = None if folder is None else Store(folder, {"run": self._run}, keep=1)
        stored = None if self._store is None else self._store.load(StreamMemory)
        self._number, memory = stored or (0, StreamMemory())
        self._senders: dict[str, ModelSender] = {}
        self._receivers = {name: self._build_receiver(name, held) for name, held in memory.held.items()}
        self._links = {name: SiteLink[Tensor | None](answers=answers) for name, answers in memory.answers.items()}
        self._counted: dict[str, str | None] = dict(memory.counted)
        self._current = memory.held.get(MODEL)
        self._lock = threading.RLock()

    def encode_model(
        self, groups: Groups, round_: int, settings: StreamSettings, receiver: str | None = None
    ) -> Packet:
        """Return the packet of a model for a receiver; None: for several receivers.

        Raises:
            RejectedMessage: a value is NaN or infinite.
            ConfigError: the mask names no array.
        """
        with self._lock:
            parts: dict[str, dict[str, Any]] = {}
            for name, group in groups.items():
                sender = self._senders.setdefault(name, ModelSender(self._run, build_kind(name)))
                sent = sender.encode(Arrays.from_mapping(group), round_, settings, receiver)
                parts[name] = {"message": sent.encoded.data}
                if sent.has_specs:
                    parts[name]["arrays"] = write_specs(sent.model.specs)
                # Of several receivers it is not known which answer counts: each one's last one does.
                if receiver is not None:
                    parts[name]["counted"] = sender.get_counted(receiver)
                # A peer trains the model that it sends, too.
                if name == MODEL and receiver is None:
                    self._current = sent.model
                ledger = Ledger()
                ledger.record_sent(sent.encoded, sent.plan, receiver or self._name, "weights")
                self._record(ledger.lines[0])
            return {"parts": parts}

    def decode_model(self, packet: Any, sender: str) -> Groups:
        """Return the arrays of a packet, by stream.

        Raises:
            RejectedMessage: the packet is malformed, damaged or of another job.
            MissingBase: it is a delta to a model that this end does not hold.
        """
        with self._lock:
            groups, counted = {}, {}
            for name, part in read_parts(packet, sender).items():
                counted[name] = self._read_counted(name, part, sender)
                receiver = self._receivers.setdefault(name, self._build_receiver(name))
                specs = read_specs(part["arrays"]) if "arrays" in part else None
                message = read_message(part, sender)
                decoded, plan = receiver.decode(message, specs, sender)
                assert receiver.held is not None, "decode() has set it"
                groups[name] = Arrays(receiver.held.specs, receiver.held.vector).to_mapping()
                ledger = Ledger()
                plan = replace(plan, round=decoded.round, sequence=decoded.sequence, kind=decoded.kind)
                ledger.record_received(decoded, plan, self._name, message.size)
                self._record(replace(ledger.lines[0], direction="down"))
            self._current = self._receivers[MODEL].held
            self._counted |= counted
            return groups

    def encode_update(self, groups: Groups, settings: StreamSettings, *, is_delta: bool) -> Packet:
        """Return the packet of an update; groups beside the model are deltas.

        Raises:
            RejectedMessage: no model was received, an array is not one of the model's, or a value is infinite.
            UndefinedScores: a value is NaN.
            CheckpointError: the memory could not be written.
        """
        with self._lock:
            request = self._current
            if request is None:
                raise RejectedMessage("E_NOT_HELD", "model", "a request with a model before the update", "none")
            parts, links = {}, {}
            for name, group in groups.items():
                update, part = align_arrays(group, request.specs)
                link, counted = self._links.get(name, SiteLink()), self._counted.get(name)
                sent = encode_update(
                    update,
                    request,
                    link.recall(counted, None)[0],
                    settings,
                    run=self._run,
                    kind=build_kind(name),
                    is_delta=is_delta or name != MODEL,
                    missing=part.get("missing", ()),
                )
                parts[name] = {"message": sent.encoded.data, **part}
                links[name] = link.add_answer(name_update(request, build_kind(name)), counted, sent.residual)
                ledger = Ledger()
                ledger.record_sent(sent.encoded, sent.plan, self._name, "delta")
                self._record(replace(ledger.lines[0], direction="up"))
            self._links |= links
            self._save()
            return {"parts": parts, "is_delta": is_delta}

    def decode_update(self, packet: Any, site: str) -> tuple[Groups, bool]:
        """Return the arrays of an update, by stream, and whether those of the model are a delta.

        Raises:
            RejectedMessage: the packet is malformed or damaged, or answers another request.
        """
        with self._lock:
            parts, is_delta = read_parts(packet, site), packet.get("is_delta")
            if not isinstance(is_delta, bool):
                raise RejectedMessage("E_KIND", "is_delta", "true or false", type(is_delta).__name__, site)
            request = self._find_request(read_names(read_message(parts[MODEL], site), site).target, site)
            groups = {}
            for name, part in parts.items():
                message = read_message(part, site)
                decoded, plan, vector = decode_update(
                    message,
                    request,
                    run=self._run,
                    kind=build_kind(name),
                    is_delta=is_delta or name != MODEL,
                    site=site,
                )
                groups[name] = restore_arrays(part, request.specs, vector)
                ledger = Ledger()
                ledger.record_received(decoded, plan, site, message.size)
                self._record(ledger.lines[0])
            # After all streams: of an update that is rejected in part, nothing counts.
            for name, sender in self._senders.items():
                if name in parts:
                    sender.accept(site, name_update(request, build_kind(name)))
            return groups, is_delta

    def forget(self, site: str) -> None:
        """Send whole models to a site that has answered with an error: it may have lost what it held."""
        with self._lock:
            for sender in self._senders.values():
                sender.forget(site)

    def _read_counted(self, name: str, part: Any, sender: str) -> str | None:
        """Return the name of this end's last answer in a stream that counts, by the message or else the last one."""
        if "counted" not in part:
            return next(reversed(list(self._links[name].answers)), None) if name in self._links else None
        counted: str | None = part["counted"]
        if counted is not None and not is_name(counted):
            raise RejectedMessage("E_KIND", "counted", "16 hex digits", type(counted).__name__, sender)
        return counted

    def _find_request(self, target: str, site: str) -> HeldModel:
        sender, receiver = self._senders.get(MODEL), self._receivers.get(MODEL)
        models = [] if sender is None else [sender.find_model(target, site), sender.find_model(target)]
        models += [] if receiver is None else [receiver.held]
        for model in models:
            if model is not None and model.target == target:
                return model
        raise RejectedMessage("E_REPLAY", "target", "the model of the last request", target, site)

    def _build_receiver(self, name: str, held: HeldModel | None = None) -> ModelReceiver:
        return ModelReceiver(self._run, build_kind(name), held)

    def _save(self) -> None:
        if self._store is None:
            return
        held = {name: receiver.held for name, receiver in self._receivers.items() if receiver.held is not None}
        # Before the update leaves: a process that restarts after it must know that it was sent.
        self._number += 1
        answers = {name: dict(link.answers) for name, link in self._links.items()}
        counted = {name: answer for name, answer in self._counted.items() if answer is not None}
        self._store.save(self._number, StreamMemory(held, answers, counted))
