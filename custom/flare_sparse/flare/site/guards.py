"""A site's guards: components of the site's own configuration that enforce its policy and that no job can remove.

``SiteResultPolicy`` is a filter of the site. It sees an update as ordinary named arrays, makes it comply with the
policy or refuses it, and remembers the approved update. FLARE runs a job's filters after a site's, so a filter of the
job could still change the update. ``SiteLastGate`` therefore encodes the approved update again after all filters and
lets only that message leave. The third guard, which checks jobs, is in :mod:`~flare_sparse.flare.site.authorizer`.
"""

import copy
from collections.abc import Iterator
from contextlib import suppress
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
from nvflare.apis.shareable import Shareable
from torch import nn

from ...config.policy.initial import find_changed_tensor
from ...config.policy.isolation import MAX_EXAMPLES, withhold_isolated_units
from ...config.policy.policy import Policy, raise_refusals
from ...core.errors import FlareSparseError, PolicyRefusal
from ...core.exchange import Patch, Request, RequestId, Update
from ...core.mask import Mask
from ...privacy.dp.mechanism import LEAST_NOISE
from ...rounds.endpoints.site import SiteEndpoint
from ...tasks.data.source import read_withdrawn
from ...tasks.task import EPSILON, TEST_EXAMPLES, VALIDATION_EXAMPLES, get_count_name
from ...training import SampleUsage
from ...wire.codec import Encoded
from .. import payload
from ..egress import install_recorder, iterate_buffers
from ..questions import ADMITTED
from ..running import hold_data
from ..session import get_site_session, read_job, read_site_policy
from ..workspace import find_job_file, get_workspace, write_site_error

APPROVED = "flare_sparse.approved"
"""Key of the approved update in FLARE's context; the property is private, so it does not leave the site."""


class SiteResultPolicy(Filter):
    """Makes an update comply with the site's policy or refuses it; a filter in every privacy scope."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the approved update, or a refusal with the error code only; its text stays at the site."""
        # Reset first: the gate must never accept an update that was approved for an earlier task.
        fl_ctx.set_prop(APPROVED, None, private=True, sticky=False)
        is_description = _is_description(shareable, fl_ctx)
        if shareable.get_return_code() != ReturnCode.OK or not (is_description or payload.UPDATE in shareable):
            return shareable
        try:
            return _approve_description(shareable, fl_ctx) if is_description else self._apply_policy(shareable, fl_ctx)
        # Fail closed: whatever goes wrong, nothing leaves.
        except Exception as error:  # noqa: BLE001
            write_site_error(error, _get_code(error), fl_ctx)
            return payload.build_refusal(_get_code(error), ReturnCode.TASK_RESULT_FILTER_ERROR)

    def _apply_policy(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        session = get_site_session(fl_ctx)
        endpoint, policy = session.get_endpoint(fl_ctx), read_site_policy(fl_ctx)
        if policy.methods is not None and endpoint.method.name not in policy.methods:
            raise PolicyRefusal(f"this site's policy: methods: {endpoint.method.name} may not run at this site")
        request, update = shareable[payload.UPDATE]
        layout = endpoint.site.layout
        if (
            policy.privacy_budget is not None
            and update.content != "metrics"
            and endpoint.site.trainer.mechanism is None
        ):
            raise PolicyRefusal(
                "this site's policy: epsilon: the job has no privacy section, so what it tells about a subject has no "
                "bound; ask the lead to add one, or remove epsilon from the policy"
            )
        update = payload.dxo_to_update(from_shareable(shareable), update, layout)
        update = replace(update, patch=update.patch.copy_to_host())
        raise_refusals(policy.find_request_refusals(request.kind, request.trainable.count))
        if update.content == "scores":
            raise_refusals(policy.find_score_refusals(request.trainable, update.patch.mask, layout))
        if policy.verify_initial_model and endpoint.method.sends_initial_model(request.kind, request.round):
            raise_refusals(_find_initial_refusals(endpoint, session.build_initial_weights(fl_ctx)))
        if policy.is_question(update.content) and endpoint.requests is not None:
            endpoint.requests.admit_question(update.content, endpoint.run, policy.max_lifetime_questions)
        update = replace(update, metrics=_select_metrics(update.metrics, policy, endpoint, request))
        reference = _get_reference(update, endpoint)
        # Clones, because the patch's values may share memory with the DXO's arrays, which a later filter may change.
        delta = Patch(update.patch.values.clone() - reference, update.patch.mask)
        sanitized = policy.sanitize_values(update.content, delta, layout)
        # Which changes are withheld depends on the data, so it would undo differential privacy, which bounds them all.
        mechanism = endpoint.site.trainer.mechanism
        is_hidden = mechanism is not None and mechanism.noise_multiplier >= LEAST_NOISE
        is_bounded = is_hidden or policy.privacy_budget is not None
        if policy.withhold_isolated and not is_bounded and update.content in ("weights", "delta"):
            inputs = endpoint.site.trainer.collect_inputs(endpoint.site.weights, nn.Linear, MAX_EXAMPLES)
            sanitized, _ = withhold_isolated_units(sanitized, update.patch.mask, layout, inputs)
        # Unchanged values are not recomputed as delta + reference: that would round and change the model's bits.
        values = update.patch.values.clone() if sanitized is delta.values else sanitized + reference
        update = replace(update, patch=Patch(values, update.patch.mask))
        raise_refusals(
            policy.find_refusals(update.content, _count_usage(endpoint), update.patch.mask, sanitized, layout)
        )
        fl_ctx.set_prop(APPROVED, update, private=True, sticky=False)
        reply = payload.update_to_dxo(update, layout).to_shareable()
        reply[payload.UPDATE] = (request, update)
        return reply


class SiteLastGate(FLComponent):
    """Checks a result after all filters have run; strips it to error codes unless the site approved it."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        # Also in jobs of other packages, which have no session of this one.
        if event_type == EventType.START_RUN:
            install_recorder(fl_ctx)
            hold_data(fl_ctx)
        if event_type == EventType.AFTER_TASK_RESULT_FILTER:
            result = fl_ctx.get_prop(FLContextKey.TASK_RESULT)
            if isinstance(result, Shareable):
                self._check_result(result, fl_ctx)

    def _check_result(self, result: Shareable, fl_ctx: FLContext) -> None:
        """Replace the result in place by the approved update or by error codes.

        FLARE sends the result even if an event handler raises, so an exception would not stop it.
        """
        try:
            if result.get_return_code() != ReturnCode.OK:
                _discard_withheld(fl_ctx)
                missing_base = result.get_header(payload.MISSING_BASE_HEADER) is True
                payload.strip_to_codes(result, payload.extract_code(result) or "E_SITE", missing_base=missing_base)
            elif (rebuilt := self._rebuild(result, fl_ctx)) is not None:
                # clear() removes keys and headers that a filter of the job added to the message.
                result.clear()
                result.update(rebuilt)
        # Fail closed: a result that the gate cannot read does not leave the site.
        except Exception as error:  # noqa: BLE001
            # The result is stripped first, because writing and logging may fail, too.
            payload.strip_to_codes(result, _get_code(error))
            _discard_withheld(fl_ctx)
            write_site_error(error, _get_code(error), fl_ctx)
            self.log_error(fl_ctx, f"{_get_code(error)}: a result was withheld; see site_error.txt in the job's folder")

    def _rebuild(self, result: Shareable, fl_ctx: FLContext) -> Shareable | None:
        """Return what to send instead, rebuilt from this site's state; None: another package's result, as it is.

        Raises:
            FlareSparseError: the result may not leave.
        """
        if payload.extract(payload.HELLO, result) is not None:
            return payload.wrap(payload.HELLO, get_site_session(fl_ctx).build_hello(fl_ctx))
        if payload.extract(payload.SUM, result) is not None:
            # Used once: a job must not send the same reply again.
            if (reply := get_site_session(fl_ctx).get_endpoint(fl_ctx).stage.take_reply()) is None:
                raise PolicyRefusal("this site's policy: a message of a sum that this site has not made")
            return payload.wrap(payload.SUM, reply)
        if _is_description(result, fl_ctx):
            approved = fl_ctx.get_prop(APPROVED)
            if not isinstance(approved, Shareable):
                raise PolicyRefusal("this site's policy: SiteResultPolicy did not approve these statistics")
            return approved
        policy = read_site_policy(fl_ctx)
        # A job of another package names no permit.
        if not policy.foreign_jobs or policy.permit or _is_package_message(result):
            return self._rebuild_approved(result, fl_ctx)
        if policy.privacy_budget is not None:
            raise PolicyRefusal(
                "this site's policy: epsilon: a job of another package charges nothing, so what it tells about "
                "a subject has no bound; let the script train in a configuration with a privacy section"
            )
        if gone := read_withdrawn(Path(get_workspace(fl_ctx).get_site_config_dir())):
            raise PolicyRefusal(
                f"{len(gone)} subjects have withdrawn, and a job of another package reads the data by itself; "
                "remove them from the data, and then from the site's list"
            )
        return None

    def _rebuild_approved(self, result: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the message and the approved numbers in a new shareable; FLARE adds its headers afterwards.

        Raises:
            FlareSparseError: the message does not contain the approved update.
        """
        endpoint, policy = get_site_session(fl_ctx).get_endpoint(fl_ctx), read_site_policy(fl_ctx)
        approved = fl_ctx.get_prop(APPROVED)
        if not isinstance(approved, Update) or endpoint.request is None:
            raise PolicyRefusal(
                "this site's policy: SiteResultPolicy did not approve this result; is it in the job's privacy scope? "
                "Run: flare-sparse site setup KIT"
            )
        message, meta = payload.shareable_to_message(result, endpoint.site.name)
        if set(meta) - {"examples", "metrics", payload.EVENTS} or set(from_shareable(result).data) != {"message"}:
            raise PolicyRefusal(
                "this site's policy: a filter of the job added something to the message, the examples and the metrics"
            )
        expected = _encode_approved(approved, endpoint, policy)
        # Compare bytes: a message is a function of its update, the request and what the site has left to send.
        stated = meta.get("metrics", {})
        if not (
            np.array_equal(np.asarray(message), expected.data)
            and meta.get("examples") == approved.num_examples
            and all(name in approved.metrics and approved.metrics[name] == value for name, value in stated.items())
        ):
            raise PolicyRefusal(
                "this site's policy: the message is not the update that the site approved: a filter of the job changed "
                "it"
            )
        # Checked again on the encoded message: only now is its size known, and rounding may have changed the norm.
        rounded = None if endpoint.stage.hides_values else expected.received
        values = approved.patch.values if rounded is None else rounded
        values = values - (_get_reference(approved, endpoint) if approved.content == "weights" else 0)
        size = max(len(message), endpoint.stage.message_bytes)
        mask, layout = approved.patch.mask, endpoint.site.layout
        raise_refusals(policy.find_refusals(approved.content, _count_usage(endpoint), mask, values, layout, size))
        metrics = {name: value for name, value in approved.metrics.items() if name in stated}
        # The endpoint's own events: a filter of the job may have changed those of the message.
        return payload.update_to_shareable(np.asarray(message), replace(approved, metrics=metrics), endpoint.events)


def _is_description(result: Shareable, fl_ctx: FLContext) -> bool:
    """Return whether a result holds statistics of a job of this package; another package's has no settings of ours."""
    return payload.is_statistics(result) and find_job_file(fl_ctx).is_file()


def _approve_description(shareable: Shareable, fl_ctx: FLContext) -> Shareable:
    """Return statistics that may leave, and remember a copy, which the gate sends whatever the job's filters do.

    Raises:
        PolicyRefusal: a term of the policy forbids them.
    """
    policy = read_site_policy(fl_ctx)
    raise_refusals(policy.find_description_refusals(permit=read_job(fl_ctx).permit))
    if fl_ctx.get_prop(ADMITTED) is None:
        raise PolicyRefusal("this site's policy: statistics that answer no question of this site's copy of the job")
    parts = iterate_buffers(from_shareable(shareable).data)
    size = sum(len(part) if isinstance(part, bytes) else part.nbytes for part in parts)
    if policy.max_upload_bytes is not None and size > policy.max_upload_bytes:
        raise PolicyRefusal(
            f"this site's policy: max_upload_bytes: the statistics have {size} bytes, the limit is "
            f"{policy.max_upload_bytes}"
        )
    fl_ctx.set_prop(APPROVED, copy.deepcopy(shareable), private=True, sticky=False)
    return shareable


def _discard_withheld(fl_ctx: FLContext) -> None:
    """Drop the update that waits for a sum: values of a result that did not leave must not leave in a sum."""
    # A site whose endpoint cannot be built has no such update.
    with suppress(Exception):
        get_site_session(fl_ctx).get_endpoint(fl_ctx).stage.discard()


def _encode_approved(approved: Update, endpoint: SiteEndpoint, policy: Policy) -> Encoded:
    """Return the message of the approved update, without values if these wait for a sum.

    Raises:
        PolicyRefusal: the values that wait are not the approved ones, or values of a single site would be readable.
    """
    assert endpoint.request is not None, "an update answers a request"
    if approved.content != "metrics":
        raise_refusals(policy.find_value_refusals(is_hidden=endpoint.stage.hides_values))
        if not endpoint.stage.holds(approved.patch):
            raise PolicyRefusal("this site's policy: a filter of the job changed the values that wait for the sum")
    return endpoint.encode_message(endpoint.request, approved)


def _get_code(error: Exception) -> str:
    return error.code if isinstance(error, FlareSparseError) else "E_POLICY"


def _is_package_message(result: Shareable) -> bool:
    try:
        payload.shareable_to_message(result, "")
    except FlareSparseError:
        return False
    return True


def _select_metrics(
    metrics: dict[str, float], policy: Policy, endpoint: SiteEndpoint, request: Request
) -> dict[str, float]:
    """Return the metrics that may leave: rounded or none, and none of a model beyond the limits on evaluated models."""
    site, requests, release = endpoint.site, endpoint.requests, endpoint.site.release
    counts = {TEST_EXAMPLES: site.trainer.num_test_examples, VALIDATION_EXAMPLES: site.trainer.num_validation_examples}
    if release is not None:
        # A part without examples has no metrics, and no number either.
        stated = {TEST_EXAMPLES: release.numbers.test, VALIDATION_EXAMPLES: release.numbers.validation}
        counts = {name: stated[name] if count else 0 for name, count in counts.items()}
        present = {name: float(count) for name, count in counts.items() if name in metrics}
        metrics = release.state_counts({**metrics, **present})
    metrics = policy.sanitize_metrics(metrics, counts, release.numbers.groups if release else {})
    is_limited = policy.max_evaluations is not None or policy.max_lifetime_questions is not None
    # What is spent is no metric of a model: it is not counted, and leaves past every limit.
    spent = {name: value for name, value in metrics.items() if name == EPSILON}
    if metrics != spent and is_limited:
        config = endpoint.method.config
        # Without a record nothing can be counted, so nothing may leave.
        if requests is None or not policy.allows_metrics(request.round, config.rounds, config.evaluate_every):
            return spent
        is_released = requests.release_metrics(
            RequestId(request.kind, request.round),
            endpoint.compute_model_digest(),
            limit=policy.max_evaluations,
            lifetime=policy.max_lifetime_questions,
        )
        metrics = metrics if is_released else spent
    if release is None or metrics == spent:
        return metrics
    people = {name: counts[get_count_name(name)] for name in metrics if name not in (EPSILON, *counts)}
    return release.publish_metrics(metrics, people, endpoint.compute_model_digest())


def _count_usage(endpoint: SiteEndpoint) -> SampleUsage:
    """Return the examples that an update read; all of the site's are the number that its release states.

    So no minimum of the policy decides by an exact number of people.
    """
    usage, site = endpoint.site.trainer.usage, endpoint.site
    is_whole = site.release is not None and usage.examples >= site.trainer.num_examples > 0
    return replace(usage, examples=site.num_examples) if is_whole else usage


def _find_initial_refusals(endpoint: SiteEndpoint, initial: torch.Tensor) -> Iterator[str]:
    """Yield the reason why the received model is not the initial one of the job ``(P,)``; nothing if it is."""
    site = endpoint.site
    mask = Mask.full(site.layout.size) if site.live_patch is None else site.live_patch.mask
    if name := find_changed_tensor(site.weights, initial, mask, site.layout, endpoint.values):
        yield (
            f"verify_initial_model: tensor {name!r} of the received model is not the one that the job's settings and "
            "seed define here; if the versions of torch differ, install those of constraints.txt"
        )


def _get_reference(update: Update, endpoint: SiteEndpoint) -> Any:
    """Return what to subtract from an update's values: for weights, those that the site received; else 0."""
    return update.patch.mask.take(endpoint.site.weights) if update.content == "weights" else 0.0
