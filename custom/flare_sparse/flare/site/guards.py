"""A site's guards: they stand in the site's own configuration, so that no job can leave them out or undo them.

``SiteResultPolicy`` is a filter of the site: it sees an answer as ordinary named arrays, makes it fit the policy or
refuses it, and remembers what it approved. FLARE runs a job's filters after a site's, so ``SiteLastGate`` looks at the
message that is about to leave, decodes it by itself and lets out nothing but what was approved.
``SitePlanAuthorizer`` refuses jobs that bring filters or executors of their own or name more of this package than a
job's classes, and a site without the other two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvflare.apis.dxo import from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import Filter
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.apis.shareable import Shareable

from ...encryption import PRECISION
from ...endpoints.site import SiteEndpoint
from ...errors import FlareSparseError, PolicyRefusal
from ...exchange import Patch, Request, Update
from ...policy.policy import POLICY_FILE, read_policy, refuse
from ...wire.codec import Decoded, decode
from ...wire.plan import Plan, ValueFormat
from ..payload import (
    CODE_HEADER,
    NOT_HELD_HEADER,
    UPDATE,
    answer_to_shareable,
    dxo_to_update,
    extract_code,
    extract_hello,
    hello_to_shareable,
    make_refusal,
    shareable_to_message,
    update_to_dxo,
)
from ..session import get_site_session, read_site_policy, write_site_error
from .allow_list import CLASSES, PACKAGE

APPROVED = "flare_sparse.approved"
GUARDS = "flare_sparse.flare.site.guards."
GATE, RESULT_POLICY = f"{GUARDS}SiteLastGate", f"{GUARDS}SiteResultPolicy"
_GUARDED = ("executors", "task_result_filters", "task_data_filters")
_ROUNDING = 2.0**-6


class SiteResultPolicy(Filter):
    """Makes an answer fit the site's policy, or refuses it; stands in every privacy scope."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Never raises: a refusal is a reply with the code ``E_POLICY``; its text stays at the site."""
        fl_ctx.set_prop(APPROVED, None, private=True, sticky=False)
        if shareable.get_return_code() != ReturnCode.OK or UPDATE not in shareable:
            return shareable
        try:
            return self._fitted(shareable, fl_ctx)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong here, nothing leaves
            write_site_error(error, _code_of(error), fl_ctx)
            return make_refusal(_code_of(error), ReturnCode.TASK_RESULT_FILTER_ERROR)

    def _fitted(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        session = get_site_session(fl_ctx)
        endpoint, policy = session.endpoint(fl_ctx), read_site_policy(fl_ctx)
        if policy.methods is not None and endpoint.method.name not in policy.methods:
            raise PolicyRefusal(f"this site's policy: methods: {endpoint.method.name} may not run here")
        request, update, vector = shareable[UPDATE]
        layout = endpoint.site.layout
        update = dxo_to_update(from_shareable(shareable), update, vector, layout)
        if endpoint.site.num_test_examples < policy.min_test_examples:
            update = replace(update, metrics={})
        start = _start(update, endpoint)
        change = Patch(update.patch.values.clone() - start, update.patch.mask)
        soft = policy.softened(update.content, change, layout)
        update = _with(update, update.patch.values.clone() if soft is change.values else soft + start)
        refuse(policy.refusals(update.content, endpoint.site.usage, update.patch.mask, soft, layout))
        fl_ctx.set_prop(APPROVED, update, private=True, sticky=False)
        reply = update_to_dxo(update, layout, vector).to_shareable()
        reply[UPDATE] = (request, update, vector)
        return reply


class SiteLastGate(FLComponent):
    """Looks at what is about to leave, after every filter; blanks it unless it is what the site approved."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.AFTER_TASK_RESULT_FILTER:
            result = fl_ctx.get_prop(FLContextKey.TASK_RESULT)
            if isinstance(result, Shareable):
                self._look(result, fl_ctx)

    def _look(self, result: Shareable, fl_ctx: FLContext) -> None:
        """FLARE swallows what an event handler raises, so a result is blanked in place."""
        try:
            if result.get_return_code() != ReturnCode.OK:
                _blank(result, extract_code(result) or "E_SITE", not_held=result.get_header(NOT_HELD_HEADER) is True)
            elif extract_hello(result) is not None:
                result.clear()  # whatever a filter of the job made of it
                result.update(hello_to_shareable(get_site_session(fl_ctx).hello(fl_ctx)))
            elif not read_site_policy(fl_ctx).foreign_jobs or _is_ours(result):
                approved = self._approved(result, fl_ctx)
                result.clear()  # keys and headers that a filter of the job put beside the answer
                result.update(approved)
        except Exception as error:  # noqa: BLE001 - what it does not understand does not leave
            _blank(result, _code_of(error))  # first: what comes after may fail, too
            write_site_error(error, _code_of(error), fl_ctx)
            self.log_error(
                fl_ctx, f"{_code_of(error)}: an answer was held back; see site_error.txt in the job's folder"
            )

    def _approved(self, result: Shareable, fl_ctx: FLContext) -> Shareable:
        """The message, made anew with what the site approved beside it; FLARE adds its own headers afterwards.

        Raises:
            FlareSparseError: it is not what the site approved.
        """
        endpoint, policy = get_site_session(fl_ctx).endpoint(fl_ctx), read_site_policy(fl_ctx)
        approved = fl_ctx.get_prop(APPROVED)
        if not isinstance(approved, Update) or endpoint.asked is None:
            raise PolicyRefusal(
                "this site's policy: an answer that SiteResultPolicy has not seen (is it in this scope?)"
            )
        message, meta = shareable_to_message(result, endpoint.site.name)
        if set(meta) - {"examples", "metrics"} or set(from_shareable(result).data) != {"message"}:
            raise PolicyRefusal("this site's policy: more beside the message than examples and metrics")
        found = _decoded(message, endpoint, endpoint.asked)
        if policy.encrypted and found.content in ("weights", "delta") and found.values != "ckks":
            raise PolicyRefusal(f"this site's policy: encrypted: {found.content} in the clear; wire.encryption: ckks")
        _same(found, meta, approved)
        change = found.patch.values - (_start(approved, endpoint) if approved.content == "weights" else 0)
        refuse(
            list(
                policy.refusals(
                    found.content, endpoint.site.usage, found.patch.mask, change, endpoint.site.layout, len(message)
                )
            )
        )
        metrics = {name: value for name, value in approved.metrics.items() if name in meta.get("metrics", {})}
        return answer_to_shareable(np.asarray(message), replace(approved, metrics=metrics))


class SitePlanAuthorizer(FLComponent):
    """Before FLARE builds a part of a job, with or without code in it: is it one that may be here?"""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Raises:
        UnsafeComponentError: an executor or filter that is not ours, something of ours that is none of the classes of
            a job, or a site whose guards are not in place.
        """
        if event_type != EventType.BEFORE_BUILD_COMPONENT:
            return
        try:
            self._look(fl_ctx)
        except UnsafeComponentError:
            raise
        except Exception as error:  # FLARE goes on after any other kind
            raise UnsafeComponentError(
                f"E_POLICY: {type(error).__name__} while a part of the job was looked at"
            ) from error

    def _look(self, fl_ctx: FLContext) -> None:
        config, node = fl_ctx.get_prop(FLContextKey.COMPONENT_CONFIG), fl_ctx.get_prop(FLContextKey.COMPONENT_NODE)
        where = str(node.path()) if node is not None else ""
        path = str((config or {}).get("path") or (config or {}).get("class_path") or (config or {}).get("name") or "")
        workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
        local = Path(workspace.get_site_config_dir())
        if where.startswith(_GUARDED) and path not in CLASSES and not read_policy(local / POLICY_FILE).foreign_jobs:
            raise UnsafeComponentError(f"E_POLICY: {where}: {path!r} is not of flare_sparse; this site runs no other")
        for named in _paths(config):
            if named.startswith(PACKAGE) and named not in CLASSES:
                raise UnsafeComponentError(f"E_POLICY: {where}: {named!r} is no class that a job may name")
        if missing := unguarded(local):
            raise UnsafeComponentError(f"E_POLICY: {missing}. Run: flare-sparse site policy")


def _paths(config: Any) -> Iterator[str]:
    """What a part of a job names, at any depth: some of FLARE's own classes build what they find in their arguments."""
    if isinstance(config, dict):
        yield from (str(config[key]) for key in ("path", "class_path") if key in config)
    if isinstance(config, dict | list | tuple):
        for part in config.values() if isinstance(config, dict) else config:
            yield from _paths(part)


def unguarded(local: Path) -> str:
    """What is missing of the guards in a site's ``local`` folder; empty when they stand."""
    file = local / "privacy.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "privacy.json is missing or malformed"
    components = [part.get("path") for part in content.get("components", []) if isinstance(part, dict)]
    if GATE not in components:
        return "privacy.json: components lack SiteLastGate"
    for scope in content.get("scopes", []):
        filters = [part.get("path") for part in scope.get("task_result_filters", [])]
        if RESULT_POLICY not in filters:
            return f"privacy.json: scope {scope.get('name')!r} lacks SiteResultPolicy"
    return "" if content.get("scopes") else "privacy.json has no scope"


def _code_of(error: Exception) -> str:
    return error.code if isinstance(error, FlareSparseError) else "E_POLICY"


def _blank(result: Shareable, code: str, *, not_held: bool = False) -> None:
    """Nothing is left in the result but a return code of FLARE's and one of ours."""
    failed = result.get_return_code()
    known = [value for name, value in vars(ReturnCode).items() if name.isupper() and value != ReturnCode.OK]
    result.clear()
    result.set_return_code(failed if failed in known else ReturnCode.TASK_RESULT_FILTER_ERROR)
    result.set_header(CODE_HEADER, code)
    result.set_header(NOT_HELD_HEADER, not_held)


def _is_ours(result: Shareable) -> bool:
    try:
        shareable_to_message(result, "")
    except FlareSparseError:
        return False
    return True


def _start(update: Update, endpoint: SiteEndpoint) -> Any:
    """What an answer's values are measured against: for weights, those that the site was sent."""
    return update.patch.mask.take(endpoint.site.weights) if update.content == "weights" else 0.0


def _with(update: Update, values: torch.Tensor) -> Update:
    return replace(update, patch=Patch(values, update.patch.mask))


def _decoded(message: Any, endpoint: SiteEndpoint, asked: Request) -> Decoded:
    ciphertext_format = endpoint.cipher.ciphertext_format if endpoint.cipher else None
    plan = Plan(
        endpoint.site.layout,
        endpoint.run,
        base_mask=asked.trainable,
        round=asked.round,
        kind=asked.kind,
        ciphertext_format=ciphertext_format,
    )
    found = decode(message, plan, endpoint.site.name)
    return replace(found, patch=endpoint.opened(found.patch))


def _room(form: ValueFormat, values: torch.Tensor) -> tuple[float, float]:
    """How far a value may lie from the approved one after its way into the message: as a share of it, and besides."""
    if form == "ckks":
        return PRECISION, PRECISION
    if form == "float32" or not values.numel():
        return 0.0, 0.0
    return _ROUNDING, _ROUNDING * float(values.abs().max())


def _same(found: Decoded, meta: dict[str, Any], approved: Update) -> None:
    """Raises:
    PolicyRefusal: a job's filter changed the answer after the site had approved it.
    """
    mine, theirs = approved.patch.values, found.patch.values
    share, room = _room(found.values, mine)
    same = (
        found.content == approved.content
        and found.patch.mask == approved.patch.mask
        and (torch.equal(mine, theirs) if not room else torch.allclose(mine, theirs, rtol=share, atol=room))
        and meta.get("examples") == approved.num_examples
        and set(meta.get("metrics", {})) <= set(approved.metrics)
        and all(approved.metrics[name] == value for name, value in meta.get("metrics", {}).items())
    )
    if not same:
        raise PolicyRefusal(
            "this site's policy: the message is not what the site approved: a filter of the job changed it"
        )
