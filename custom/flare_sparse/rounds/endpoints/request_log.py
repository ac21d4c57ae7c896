"""What a site answers: checks of a request against its own copy of the job, and the record of those that it answered.

The record is a file of the site, so that a restart does not reset any limit. It also holds the digest of every model
that the site received, which sites can compare with each other.

The mean of the sites' deltas is no longer than the longest of them. A model that a server has made up is far from the
last one: a site can see that without the other sites.
"""

import fcntl
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from ...core.checkpoint.writing import write_json
from ...core.errors import FlareSparseError, RequestRefused
from ...core.exchange import EVALUATE, RequestId, Update
from ...core.mask import Mask
from ...core.params import Layout
from ...methods.method import Method
from ...wire.stage import RevealedSum

_METRICS = "metrics "


class AnsweredRequest(BaseModel):
    """One model of one request, and how often the site has answered it.

    Attributes:
        kind, round: id of the request.
        digest: SHA-256 of the received model's live entries and their values, 64 hex digits.
        start: number of the start of the job, from 1.
        answers: number of answers in this start.
        time: Unix time of the first answer.
    """

    model_config = ConfigDict(extra="forbid")

    kind: str
    round: int
    digest: str
    start: int
    answers: int
    time: float


class RunRecord(BaseModel):
    """The record of one run.

    Attributes:
        run: id of the run.
        requests: requests in the order of their first answer.
        questions: Unix time of the first answer to each question of the job's choice: metrics of a model, by kind,
            round and digest; statistics and fingerprints, by their kind and digest.
        sums: sums of padded values that the site has helped to reveal.
    """

    model_config = ConfigDict(extra="forbid")

    run: str
    requests: list[AnsweredRequest] = Field(default_factory=list)
    questions: dict[str, float] = Field(default_factory=dict)
    sums: list[RevealedSum] = Field(default_factory=list)

    @property
    def evaluations(self) -> int:
        """Number of models whose metrics left."""
        return sum(name.startswith(_METRICS) for name in self.questions)

    @property
    def start(self) -> int:
        """Number of the current start of the job; 0 before the first request."""
        return self.requests[-1].start if self.requests else 0


class RequestLog:
    """Refuses requests that the job does not provide for, and records the others.

    The server of a job asks for each request of a round at most ``attempts`` times, and rounds increase. Only a server
    that was started again deviates: it returns to an earlier round or repeats one. Such a deviation therefore counts as
    a new start of the job, and a policy limits the number of starts.

    Args:
        run: id of the run.
        count_requests: how many different requests of a kind the method sends in a round.
        attempts: how often the server may send one request, retries included.
        max_starts: limit on the starts of the job; None: no limit.
        max_model_change: limit on the distance of a model from the last one, see :class:`ChangeLimit`; None: no limit.
        file: the record; None: the record is kept in memory only.
    """

    def __init__(
        self,
        run: str,
        count_requests: Callable[[str, int], int],
        *,
        attempts: int,
        max_starts: int | None = None,
        max_model_change: float | None = None,
        file: Path | None = None,
    ):
        self.run, self.attempts, self.max_starts, self.file = run, attempts, max_starts, file
        self.max_model_change = max_model_change
        self._count_requests = count_requests
        self._record = RunRecord(run=run)

    def admit(self, request: RequestId, digest: str, *, is_regrown: bool = False) -> None:
        """Record an answer to a request before it is computed.

        Args:
            request: kind and round of the request.
            digest: digest of the received model, see :attr:`~flare_sparse.core.exchange.Patch.digest`.
            is_regrown: whether the mask has entries that the method had removed for good.

        Raises:
            RequestRefused: the job does not provide for this request, or the record cannot be read or written.
        """
        with self._open() as record:
            self._count_answer(record, request, digest, is_regrown=is_regrown)

    def release_metrics(self, request: RequestId, digest: str, limit: int | None, lifetime: int | None) -> bool:
        """Return whether the metrics of a model may leave, and record that they do.

        Metrics of a model that have left before may leave again: they are the same.

        Args:
            request: kind and round of the request.
            digest: digest of the received model.
            limit: number of models of this run whose metrics may leave; None: all.
            lifetime: number of models of all runs whose metrics may leave; None: all.

        Raises:
            RequestRefused: the record cannot be read or written.
        """
        key = f"{_METRICS}{request.kind}/{request.round}/{digest}"
        with self._open() as record:
            if key not in record.questions:
                if limit is not None and record.evaluations >= limit:
                    return False
                if not self._has_left(record, lifetime):
                    return False
                record.questions[key] = time.time()
        return True

    def admit_question(self, kind: str, digest: str, lifetime: int | None) -> None:
        """Record a question whose answer is no update, before it is computed. The same question counts once.

        Args:
            kind: what is asked: statistics, a description, a fingerprint.
            digest: digest of the question with all that its answer depends on beside the site's data.
            lifetime: number of questions of all runs that may be answered; None: all.

        Raises:
            RequestRefused: it would be one question too many, or the record cannot be read or written.
        """
        key = f"{kind}/{digest}"
        with self._open() as record:
            if key in record.questions:
                return
            if not self._has_left(record, lifetime):
                raise RequestRefused(
                    f"question {kind!r}: this site has answered max_lifetime_questions {lifetime} questions in all. If "
                    "you trust the coordinating centre of this study, raise the term of the policy"
                )
            record.questions[key] = time.time()

    def admit_sum(self, new: RevealedSum, find_violation: Callable[[Iterable[RevealedSum], RevealedSum], str]) -> None:
        """Check a sum before this site takes part in it and, once its survivors are known, record it.

        Args:
            new: the sum.
            find_violation: returns why it must not follow the earlier ones of this site; empty if it may.

        Raises:
            RequestRefused: this site has helped to reveal another sum over its answer, or the record cannot be read or
                written.
        """
        with self._open() as record:
            if reason := find_violation((known for part in self._list_records(record) for known in part.sums), new):
                raise RequestRefused(
                    f"request {new.kind!r} of round {new.round}: {reason}. Go on with the same sites, or submit a job "
                    f"with another seed. If the difference may be read, remove the record of that run: {self.file}, "
                    "or one beside it"
                )
            if new.survivors and new not in record.sums:
                record.sums.append(new)

    def _count_answer(self, record: RunRecord, request: RequestId, digest: str, *, is_regrown: bool) -> None:
        """Add an answer to the record.

        Raises:
            RequestRefused: it would begin one start of the job too many.
        """
        start = record.start
        current = [entry for entry in record.requests if entry.start == start]
        same_request = [entry for entry in current if (entry.kind, entry.round) == request]
        repeated = next((entry for entry in same_request if entry.digest == digest), None)
        # Only a server that has returned to an earlier mask sends removed entries again, whatever the round's number.
        is_latest = not is_regrown and request.round >= max((entry.round for entry in current), default=0)
        # All requests of a kind in a round share their attempts: successive ones may carry the same model, such as two
        # steps of scores after which the mask is the same.
        count = self._count_requests(*request)
        if repeated and is_latest and sum(entry.answers for entry in same_request) < self.attempts * count:
            repeated.answers += 1
            return
        is_new = is_latest and not repeated and len(same_request) < count
        if not is_new or not start:
            start += 1
        if self.max_starts is not None and start > self.max_starts:
            raise RequestRefused(
                f"request {request.kind!r} of round {request.round}: it repeats an earlier one or returns to an "
                f"earlier round or mask, as after a new start of the job; this site's policy allows max_starts "
                f"{self.max_starts}. If the coordinating centre explains why, raise max_starts or remove {self.file}"
            )
        kind, t = request
        entry = AnsweredRequest(kind=kind, round=t, digest=digest, start=start, answers=1, time=time.time())
        record.requests.append(entry)

    def _has_left(self, record: RunRecord, lifetime: int | None) -> bool:
        """Return whether one more question fits into the lifetime limit."""
        return lifetime is None or sum(len(part.questions) for part in self._list_records(record)) < lifetime

    def _list_records(self, record: RunRecord) -> list[RunRecord]:
        """Return the records of all runs of this site, given that of this run."""
        others = [] if self.file is None else [file for file in self.file.parent.glob("*.json") if file != self.file]
        states = [(file, file.stat()) for file in others]
        return [record, *(_read_unchanged(file, found.st_ino, found.st_mtime_ns) for file, found in states)]

    @contextmanager
    def _open(self) -> Iterator[RunRecord]:
        """Yield the record and write it back; a file is locked meanwhile, since jobs of a site run side by side."""
        if self.file is None:
            yield self._record
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with (self.file.parent / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                record = read_record(self.file) if self.file.is_file() else RunRecord(run=self.run)
                yield record
                write_json(self.file, record.model_dump())
        except (OSError, FlareSparseError) as error:
            if isinstance(error, RequestRefused):
                raise
            raise RequestRefused(f"{self.file}: the record of answered requests cannot be written: {error}") from error


@lru_cache(maxsize=4096)
def _read_unchanged(file: Path, _inode: int, _modified: int) -> RunRecord:
    """Read the record of another run, which is compared with every sum of this one, once for all of them.

    The numbers of its file change whenever a record is replaced by a new one.
    """
    return read_record(file)


def read_record(file: Path) -> RunRecord:
    """Read the record of a run.

    Raises:
        RequestRefused: it cannot be read; a limit that cannot be counted is not granted.
    """
    try:
        return RunRecord.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError, RecursionError) as error:
        raise RequestRefused(f"{file}: the record of answered requests cannot be read: {error}") from error


def check_kind(method: Method[Any, Any], request: RequestId) -> None:
    """Raises:
    RequestRefused: the method sends no such request in this round.
    """
    if not method.count_requests(*request):
        raise RequestRefused(f"{_name_request(request)}: this site's copy of the job has no such request")


def check_trainable(method: Method[Any, Any], request: RequestId, trainable: Mask, live: Mask) -> None:
    """Check that a request asks for entries that the method could ask for.

    A mask of the server's own choice isolates weights, and so does the difference of two masks.

    Args:
        method: the method of this site's copy of the job.
        request: kind and round of the request.
        trainable: entries that the request asks to train or to score.
        live: live entries of the model.

    Raises:
        RequestRefused: the entries are zero in the model, or the method's masks have more or fewer.
    """
    if request.kind in method.idle_kinds:
        return
    fewest, most = method.bound_trainable(*request)
    if not trainable <= live:
        raise RequestRefused(f"{_name_request(request)} asks for entries that are zero in the model")
    if not fewest <= trainable.count <= most:
        count = str(fewest) if fewest == most else f"{fewest} to {most}"
        raise RequestRefused(
            f"{_name_request(request)} asks for {trainable.count} entries; by this site's copy of the job there are "
            f"{count}"
        )


def _name_request(request: RequestId) -> str:
    return f"request {request.kind!r} of round {request.round}"


def is_standstill(update: Update, weights: Tensor, layout: Layout) -> bool:
    """Return whether an update holds parameters, and all of them have the values that the site received.

    Args:
        update: the site's update.
        weights: ``(P,)`` the received model.
        layout: layout of the model; running statistics, which a pass without a step changes, do not count.
    """
    mask = update.patch.mask
    count = layout.num_parameters if mask.is_full else int((mask.indices < layout.num_parameters).sum())
    if update.content not in ("weights", "delta") or not count:
        return False
    values = update.patch.values[:count]
    if update.content == "delta":
        return not values.any()
    return torch.equal(values, mask.take(weights)[:count].to(values.device))


class ChangeLimit:
    """Refuses models that are farther from the last accepted one than the site's own training explains.

    The parameters that are live in the model count, each from the last value that the site saw at it, or from zero:
    running statistics have other scales, and pruning is no step. A model of few live entries replaces these values
    alone, so that it does not reset the others. The limit starts with the site's first delta; a site that is started
    again begins anew.

    Args:
        factor: largest distance, as a multiple of the L2 norm of the site's last delta, for each round between.
        layout: layout of the model.
    """

    def __init__(self, factor: float, layout: Layout):
        self.factor = factor
        self._parameters = Mask.from_tensors(layout, lambda spec: spec.role != "buffer")
        self._accepted: tuple[int, Tensor] | None = None
        self._norm: float | None = None

    def admit(self, request: RequestId, weights: Tensor, live: Mask) -> None:
        """Check a model and remember it.

        Args:
            request: kind and round of the request.
            weights: ``(P,)`` the model; its live entries are copied.
            live: its live entries.

        Raises:
            RequestRefused: the model is too far from the last accepted one, which stays the one to compare with.
        """
        # A request without a model, such as that for statistics of inputs.
        if not live.count:
            return
        t, last = self._accepted or (0, torch.zeros_like(weights))
        if self._norm is not None:
            compared = live & self._parameters
            distance = float(torch.where(compared.bits, weights - last, 0.0).double().norm())
            # A site that took no part in some rounds sees their steps at once; so does one whose server went back.
            limit = self.factor * self._norm * max(1, abs(request.round - t))
            if not distance <= limit:
                raise RequestRefused(
                    f"request {request.kind!r} of round {request.round}: the model is {distance:.3g} from the last "
                    f"one; this site's policy allows max_model_change {self.factor:g} times the length of its own "
                    f"delta, {limit:.3g} here"
                )
        # The evaluation after the last round is no step: it would make all rounds before it look missed.
        self._accepted = t if request.kind == EVALUATE else request.round, torch.where(live.bits, weights, last)

    def measure(self, update: Update, weights: Tensor) -> None:
        """Remember the length of the site's own delta.

        Args:
            update: the site's update.
            weights: ``(P,)`` the model that it was computed from.
        """
        if update.content not in ("weights", "delta"):
            return
        mask, values = update.patch.mask, update.patch.copy_to_host().values
        values = values - (mask.take(weights) if update.content == "weights" else 0.0)
        delta = mask.put(values, torch.zeros(mask.size))
        self._norm = float(torch.where(self._parameters.bits, delta, 0.0).double().norm())
