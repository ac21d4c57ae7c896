"""What a site lets out, as a value: read from the site's own file, checked on values, without a word of FLARE."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from ..errors import ConfigError, PolicyRefusal, suggest
from ..exchange import Content, Patch
from ..mask import Mask
from ..params import Layout, TensorSpec
from ..training import SampleUsage

POLICY_FILE = "flare_sparse_policy.yaml"
"""In the ``local`` folder of the site's startup kit."""
PRESETS = {file.stem: file for file in sorted((Path(__file__).parent / "presets").glob("*.yaml"))}
"""Policies that come with the package, by the name that stands for one: what most sites start from."""


class Policy(BaseModel):
    """What may leave a site. Without a file everything that the package sends may."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    methods: tuple[str, ...] | None = Field(None, description="methods that may run here; none: all")
    contents: tuple[Content, ...] = Field(
        ("weights", "delta", "scores", "metrics"),
        description="what answers may carry; without 'scores' no saliency leaves; 'nothing' is metrics only",
    )
    min_examples: int = Field(
        0, ge=0, description="fewest training examples, each counted once, that an answer with values was computed from"
    )
    min_score_examples: int = Field(0, ge=0, description="the same for scores, such as 64")
    min_score_batches: int = Field(0, ge=0, description="fewest minibatches that scores are of, such as 4")
    min_test_examples: int = Field(0, ge=0, description="fewest test examples that metrics are of; else none leave")
    score_bits: int | None = Field(None, ge=1, le=8, description="coarse scores: so many bits, per tensor")
    channel_scores: bool = Field(False, description="a score for each output channel instead of each weight")
    max_upload_bytes: int | None = Field(None, ge=128, description="largest message")
    max_upload_share: float = Field(1.0, gt=0, le=1, description="largest share of the model's entries in a message")
    tensors: tuple[str, ...] = Field(("*",), description="names of tensors that may leave, with * and ?")
    clip_norm: float | None = Field(
        None, gt=0, description="a change longer than this (L2) is shortened to it before it leaves"
    )
    max_norm: float | None = Field(None, gt=0, description="a change longer than this (L2) does not leave at all")
    noise: float = Field(
        0.0, ge=0, description="Gaussian noise on every value that leaves: its deviation as a share of clip_norm"
    )
    encrypted: bool = Field(False, description="weights and differences leave encrypted, or not at all")
    foreign_jobs: bool = Field(False, description="let results of jobs that are not of this package pass unseen")

    @model_validator(mode="after")
    def _noise_is_of_something(self) -> Policy:
        if self.noise and self.clip_norm is None:
            raise ValueError("noise is a share of clip_norm; give clip_norm")
        return self

    def limits(self) -> dict[str, int | float]:
        """What a site tells the server of its policy, so that nothing is asked of it that may not leave."""
        caps = {"max_upload_bytes": self.max_upload_bytes, "max_upload_share": self.max_upload_share}
        return {name: cap for name, cap in caps.items() if cap not in (None, 1.0)}

    def refusals(
        self, content: Content, used: SampleUsage, on: Mask, change: Tensor, layout: Layout, size: int | None = None
    ) -> Iterator[str]:
        """Why an answer may not leave; nothing when it may.

        Args:
            content: what it carries.
            used: training examples and minibatches that it was computed from.
            on: entries that travel.
            change: ``(on.count,)`` what travels, for weights less what the site was sent.
            layout: of the model.
            size: bytes of the encoded message, where it is known.
        """
        if content not in self.contents:
            yield f"contents: {content} may not leave"
        if size is not None and self.max_upload_bytes is not None and size > self.max_upload_bytes:
            yield f"max_upload_bytes: {size}, allowed are {self.max_upload_bytes}"
        if content == "metrics":
            return
        yield from self.too_few(content, used)
        if on.count > self.max_upload_share * layout.size:
            yield f"max_upload_share: {on.count / layout.size:.1%} of the model, allowed are {self.max_upload_share:.1%}"
        if not on <= Mask.from_tensors(layout, self.may_leave):
            yield f"tensors: one that does not match {', '.join(self.tensors)}"
        if not bool(torch.isfinite(change).all()):
            yield "finite: a value is NaN or infinite"
        elif self.max_norm is not None and content != "scores" and norm(change) > self.max_norm:
            yield f"max_norm: a change of {norm(change):.3g}, allowed is {self.max_norm}"

    def too_few(self, content: str, used: SampleUsage) -> Iterator[str]:
        """Why an answer stands on too little; nothing when it does not, or carries no values."""
        if content == "metrics":
            return
        wanted = [("min_examples", used.examples, self.min_examples)]
        if content == "scores":
            wanted.append(("min_score_examples", used.examples, self.min_score_examples))
            wanted.append(("min_score_batches", used.batches, self.min_score_batches))
        for name, found, least in wanted:
            if found < least:
                yield f"{name}: {content} of {found}, wanted are {least}"

    def may_leave(self, entry: TensorSpec) -> bool:
        """Whether a tensor's name matches."""
        return any(fnmatchcase(entry.name, pattern) for pattern in self.tensors)

    def softened(self, content: Content, patch: Patch, layout: Layout, draw: torch.Generator | None = None) -> Tensor:
        """The values ``(count,)`` that may leave instead of a patch's: scores made coarse, a change clipped and noised.
        The patch's own, the same object, where nothing is to be softened.

        Args:
            content: what they are.
            patch: for weights, less what the site was sent.
            layout: of the model.
            draw: of the noise; None: the operating system's.
        """
        values = patch.values
        if content == "scores":
            coarse = self.channel_scores or self.score_bits is not None
            return patch.mask.take(self._coarse(patch.to_vector(), patch.mask, layout)) if coarse else values
        if self.clip_norm is not None and (length := norm(values)) > self.clip_norm:
            values = values * (self.clip_norm / length)
        if self.noise and self.clip_norm is not None:
            noise = torch.randn(values.shape, generator=draw or _unforeseeable())
            values = values + self.noise * self.clip_norm * noise
        return values

    def _coarse(self, scores: Tensor, on: Mask, layout: Layout) -> Tensor:
        for name, part in layout.unflatten(scores).items():
            here = layout.unflatten(on.bits)[name]
            if self.channel_scores and part.dim() > 1:
                rows, counts = (part * here).flatten(1).sum(1), here.flatten(1).sum(1).clamp_min(1)
                part.copy_((rows / counts).view(-1, *[1] * (part.dim() - 1)).expand_as(part))
            if self.score_bits is not None and float(top := part.abs().max()) > 0:
                part.copy_((part / top * (2**self.score_bits - 1)).round() / (2**self.score_bits - 1) * top)
        return scores


def norm(values: Tensor) -> float:
    """L2, in double precision."""
    return float(values.double().square().sum().sqrt())


def _unforeseeable() -> torch.Generator:
    draw = torch.Generator()
    draw.seed()
    return draw


def policy_file(said: Path) -> Path:
    """The file that a user means: a policy of their own, or a ready one by its name, such as ``careful``.

    Raises:
        ConfigError: neither.
    """
    if said.is_file():
        return said
    if file := PRESETS.get(str(said)):
        return file
    raise ConfigError(f"{said}: no such file, and no ready policy; ready ones, without an ending: {', '.join(PRESETS)}")


def read_policy(file: Path) -> Policy:
    """The policy in a file; all is allowed where there is none.

    Raises:
        ConfigError: the file cannot be read, or a field is unknown or out of range.
    """
    if not file.is_file():
        return Policy()
    try:
        content: Any = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        return Policy.model_validate(content)
    except ValidationError as error:
        raise ConfigError(
            f"{file}: " + "; ".join(_problem(part["loc"], part["msg"]) for part in error.errors())
        ) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: cannot be read as a policy: {error}") from error


def _problem(location: tuple[int | str, ...], message: str) -> str:
    name = ".".join(str(part) for part in location)
    known = Policy.model_fields
    hint = "" if not name or name.split(".")[0] in known else suggest(name, known) + f" It may have: {', '.join(known)}"
    return f"{name or 'content'}: {message}.{hint}"


def refuse(reasons: Iterable[str]) -> None:
    """Raises:
    PolicyRefusal: there are reasons.
    """
    if listed := "; ".join(reasons):
        raise PolicyRefusal(f"this site's policy: {listed}")
