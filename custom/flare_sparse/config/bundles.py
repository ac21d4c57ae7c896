"""``task: {bundle: DIR}``: the lead resolves a MONAI bundle to plain settings of the task ``bundle``.

MONAI's own ``ConfigParser`` reads ``configs/train.json`` and evaluates its ``$`` expressions, as ``monai.bundle run``
does: who names a bundle runs its code, here and nowhere else. Each ``_target_`` is recorded instead of built, so that
what comes out is a tree of classes and plain values. A job carries this tree, and a site evaluates nothing
(:mod:`flare_sparse.tasks.bundles.declaration`); ``eval()`` at a site is MONAI's advisory GHSA-x6pr-233j-x5cw.

``task.override`` replaces items by their ids, as ``--override`` of ``monai.bundle run`` does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from ..core.errors import ConfigError, abbreviate, describe_exception, list_first, suggest
from ..tasks.bundles.components import OPTIMIZERS, Refusal, is_known, iterate_components, shorten
from ..tasks.bundles.declaration import SCORES, find_purpose, get_target, read_declaration
from .choice import KEYS, find_conflict
from .user_code import check_trust, find_module, import_user_module

ITEMS = {
    "network": ("network_def", "network", "net"),
    "loss": ("loss", "loss_function", "lossfn", "train::trainer::loss_function", "trainer::loss_function"),
    "metric": ("validate::key_metric", "validate::evaluator::key_val_metric", "evaluator::key_val_metric"),
    "preprocessing": ("train::preprocessing", "train::dataset::transform", "train_dataset::transform"),
    "evaluation": (
        "validate::preprocessing", "validate::dataset::transform", "val_dataset::transform", "eval_dataset::transform",
    ),
    "inferer": ("validate::inferer", "validate::evaluator::inferer", "evaluator::inferer"),
    "postprocessing": ("validate::postprocessing", "validate::evaluator::postprocessing", "evaluator::postprocessing"),
    "optimizer": ("optimizer", "train::trainer::optimizer", "trainer::optimizer"),
    "batch_size": ("train::dataloader::batch_size", "train_dataloader::batch_size"),
    "trainer": ("train::trainer", "trainer"),
}  # fmt: skip
"""Ids of each part: those of most bundles, then those of the template in MONAI's model zoo. The first one counts."""
DROPPED = ("device", "sw_device", "output_transform", "params")
"""Arguments that are left out unread: the site chooses where it computes, and the package connects the parts."""
LEFT_OUT = ("Invertd",)
"""Transforms without effect here: predictions are compared on the grid that the deterministic transforms give."""
_SETTINGS = {"lr": "lr", "weight_decay": "weight_decay", "momentum": "momentum", "amsgrad": "amsgrad"}
_DEFAULTS = {
    "betas": ([0.9, 0.999], [0.9, 0.98]), "eps": (1e-8,), "grad_averaging": (False,), "nesterov": (False,),
    "dampening": (0,), "maximize": (False,),
}  # fmt: skip
"""Arguments of optimisers that a bundle may write down, if they have the value that they have anyway."""
_INTERACTIONS = ("iteration_update", "prepare_batch")
"""Arguments with which a trainer does something else with a minibatch than to train on it."""
_REMEDY = "write its value with task.override, or use a task of your own (docs/bundles.md)"


def insert_bundle(data: Mapping[str, Any]) -> dict[str, Any]:
    """Replace ``task.bundle`` by what the bundle declares; return settings without it as they are.

    Optimiser, learning rate and batch size of the bundle become ``method.training``, where that does not set them.

    Args:
        data: settings of a configuration, with an absolute path of the bundle.

    Raises:
        ConfigError: the bundle cannot be read or used; the text names the file and the item.
    """
    task = data.get("task")
    if not isinstance(task, Mapping) or "bundle" not in task:
        return dict(data)
    if conflict := find_conflict(("bundle", *KEYS["task"]), task):
        raise ConfigError(f"task: {conflict}")
    bundle = _Bundle(Path(str(task["bundle"])), task.get("override", {}))
    method = data.get("method")
    training = method.get("training", {}) if isinstance(method, Mapping) else None
    # Malformed sections are left to the schema.
    given = training if isinstance(training, Mapping) else {"batch_size": 0, "optimizer": ""}
    with bundle.locate_refusals():
        parts, declared = bundle.resolve({"batch_size", "optimizer"} - set(given))
        code = bundle.list_code(parts)
        read_declaration(parts, bundle.source, dict.fromkeys(code))
    settings = {key: value for key, value in task.items() if key not in ("bundle", "override")}
    settings |= {"name": "bundle", "declaration": parts}
    if code:
        settings |= {"code": code, "folder": bundle.folder}
    result = {**data, "task": settings}
    if isinstance(method, Mapping) and isinstance(training, Mapping):
        result["method"] = {**method, "training": {**declared, **training}}
    return result


class _Declared(dict[str, Any]):
    """A component as the bundle declares it, a section in the place of the object that MONAI would build."""

    def to(self, *_: Any, **__: Any) -> _Declared:
        """Return itself: ``$@network_def.to(@device)`` leaves the device to the site."""
        return self


class _Bundle:
    """A bundle in a folder at the lead.

    Args:
        folder: the folder, with ``configs/train.json`` or the same in YAML.
        override: items that replace its own, by id.

    Raises:
        ConfigError: there is no such file, it is malformed, or it has no such item.
    """

    def __init__(self, folder: Path, override: Any):
        from monai.bundle import ConfigParser

        file = _find_training_file(folder)
        try:
            content = ConfigParser.load_config_file(file)
        # JSON and YAML raise errors of many classes.
        except Exception as error:
            raise ConfigError(f"{file}: cannot be read as {file.suffix[1:].upper()}: {error}") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{file}: expected a section of items, found {type(content).__name__}")
        self.folder, self.source = folder, str(file)
        self._written = ConfigParser({**content, "bundle_root": str(folder)})
        self._override(override)
        self._ids = {
            part: next((name for name in ids if self._written.get(name) is not None), None)
            for part, ids in ITEMS.items()
        }
        _import_code(folder, file.read_text(encoding="utf-8"))
        self._parser = ConfigParser(_record(self._written.config))
        if (metadata := folder / "configs" / "metadata.json").is_file():
            self._parser.read_meta(metadata)

    def _override(self, items: Any) -> None:
        """Set items by their ids, such as ``train::dataloader::batch_size``.

        Raises:
            ConfigError: an item has nothing to stand in.
        """
        if not isinstance(items, Mapping):
            raise ConfigError(f"task.override: expected a section of items by their ids, found {items!r}")
        for name, value in items.items():
            try:
                self._written[str(name).replace("#", "::")] = value
            except (LookupError, ValueError, TypeError) as error:
                raise ConfigError(
                    f"task.override: the bundle has no item {name}; expected ids such as train::dataloader::batch_size"
                ) from error

    @contextmanager
    def locate_refusals(self) -> Iterator[None]:
        """Name the item of the bundle's own file where one of a declaration is refused."""
        try:
            yield
        except Refusal as refusal:
            part, separator, rest = refusal.path.partition("::")
            path = f"{self._ids.get(part) or part}{separator}{rest}"
            raise Refusal(self.source, path, refusal.problem) from refusal

    def resolve(self, wanted: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the parts of the bundle as plain values, and settings of ``method.training`` that it declares.

        Args:
            wanted: which of the settings ``batch_size`` and ``optimizer``.

        Raises:
            ConfigError: the bundle is for something else, or an item cannot be resolved.
        """
        purpose = find_purpose(self.source, *(self._name_class(part) for part in ("loss", "metric")))
        self._check_trainer()
        names = ["network", "loss", "preprocessing", "evaluation", "inferer", "metric"]
        parts = self._resolve_all(names + ["postprocessing"] * (purpose == "segmentation"))
        settings = self._resolve_all(wanted)
        return parts, settings | self._read_optimizer(settings.pop("optimizer", None))

    def list_code(self, parts: Any) -> list[str]:
        """Return the classes off the allow list that the bundle's folder has a module for, in the order of names."""
        found: set[str] = set()
        for target in map(get_target, iterate_components(parts)):
            known = is_known(target) or shorten(target).rpartition(".")[2] in SCORES
            if not known and find_module(self.folder, target.partition(".")[0]) is not None:
                found.add(target)
        return sorted(found)

    def _resolve_all(self, parts: Collection[str]) -> dict[str, Any]:
        return {part: self._resolve(part, name) for part in parts if (name := self._ids[part]) is not None}

    def _resolve(self, part: str, name: str) -> Any:
        """Return a part as plain values: lists of transforms without ``Compose``, and the first metric alone.

        Raises:
            Refusal: MONAI cannot resolve it, or it is no plain value.
        """
        try:
            value = self._parser.get_parsed_content(name)
        # What an expression raises is up to the bundle; exit() is among it.
        except (Exception, SystemExit) as error:
            # MONAI wraps what an expression raises in a RuntimeError.
            cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
            text = f"MONAI cannot resolve it: {describe_exception(cause).splitlines()[0]}; {_REMEDY}"
            raise Refusal(self.source, part, text) from error
        if part in ("preprocessing", "evaluation", "postprocessing"):
            value = list(self._flatten(value, part))
        elif part == "metric" and isinstance(value, Mapping):
            value = dict(list(value.items())[:1])
        return _make_plain(value, partial(self._refuse, part))

    def _refuse(self, part: str, path: str, problem: str) -> NoReturn:
        raise Refusal(self.source, f"{part}{path}", f"{problem}; {_REMEDY}")

    def _flatten(self, value: Any, part: str) -> Iterator[Any]:
        """Yield the transforms of a list or a ``Compose``, which may stand in each other."""
        target = shorten(get_target(value))
        if target == "Compose":
            yield from self._flatten(value.get("transforms", []), part)
            return
        if target:
            if target not in LEFT_OUT:
                yield value
            return
        if not isinstance(value, (list, tuple)):
            raise Refusal(self.source, part, "expected Compose with a list of transforms")
        for item in value:
            yield from self._flatten(item, part)

    def _name_class(self, part: str) -> str:
        """Return the class of the loss or the first metric; of one that cannot be resolved, what is written."""
        if (name := self._ids[part]) is None:
            return ""
        try:
            value = self._resolve(part, name)
        except Refusal:
            return abbreviate(str(self._written.get(name)))
        return get_target(
            next(iter(value.values()), None) if part == "metric" and isinstance(value, Mapping) else value
        )

    def _check_trainer(self) -> None:
        """Check that the bundle trains in the way that this package does.

        Raises:
            Refusal: the trainer does something else than to train on minibatches.
        """
        name = self._ids["trainer"]
        trainer = self._written.get(name) if name else None
        if not isinstance(trainer, Mapping):
            return
        item, problem, target = "trainer", "", get_target(trainer)
        if target.rpartition(".")[2] != "SupervisedTrainer":
            problem = f"found {target!r}; expected SupervisedTrainer: no other way of training is read"
        elif keys := [key for key in _INTERACTIONS if key in trainer]:
            item, problem = f"trainer::{keys[0]}", "the trainer does more than to train on a minibatch"
        if problem:
            raise Refusal(self.source, item, f"{problem}; use a task of your own (docs/bundles.md)")

    def _read_optimizer(self, value: Any) -> dict[str, Any]:
        """Return settings of ``method.training`` for an optimiser; none for None.

        Raises:
            Refusal: it is none of the package's, or has an argument that is not supported.
        """
        if value is None:
            return {}
        target = get_target(value)
        kind = OPTIMIZERS.get(target.rpartition(".")[2])
        if kind is None:
            choice = f"expected one of {', '.join(OPTIMIZERS)}, or set method.training.optimizer"
            raise Refusal(self.source, "optimizer", f"found {target!r}; {choice}")
        settings = {"optimizer": kind}
        for key, part in value.items():
            if key in _SETTINGS:
                settings[_SETTINGS[key]] = part
            elif key != "_target_" and part not in _DEFAULTS.get(key, ()):
                problem = "not supported; remove it, or set method.training.optimizer"
                raise Refusal(self.source, f"optimizer::{key}", problem)
        return settings


def _find_training_file(folder: Path) -> Path:
    """Return the training configuration of a bundle.

    Raises:
        ConfigError: there is no such folder, or not exactly one such file.
    """
    names = ("train.json", "train.yaml", "train.yml")
    files = [file for name in names if (file := folder / "configs" / name).is_file()]
    if len(files) == 1:
        return files[0]
    others = [path.parent.name for path in folder.parent.glob("*/configs") if path.parent.name != folder.name]
    raise ConfigError(
        f"task.bundle: {folder}: expected the folder of a MONAI bundle, with one of {', '.join(names)} in configs, "
        f"found {list_first(file.name for file in files or sorted(folder.glob('configs/*'))) or 'none'}."
        f"{suggest(folder.name, others)}"
    )


def _import_code(folder: Path, text: str) -> None:
    """Import the packages of a bundle that its configuration names, so that MONAI finds these and not another's."""
    for name in sorted(path.stem for path in folder.iterdir()):
        if f"{name}." in text and find_module(folder, name) is not None:
            check_trust([folder], name)
            # An item that needs a package raises the package's error once more.
            with suppress(Exception):
                import_user_module(name, [folder])


def _record(value: Any) -> Any:
    """Return a configuration whose components MONAI records instead of building them, without :data:`DROPPED`."""
    if isinstance(value, list):
        return [_record(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    target = value.get("_target_")
    if not isinstance(target, str):
        return {key: _record(part) for key, part in value.items()}
    section = {key: _record(part) for key, part in value.items() if key not in DROPPED}
    # MONAI starts a debugger for it.
    if section.get("_mode_") == "debug":
        del section["_mode_"]
    return {**section, "_target_": partial(_Declared, _target_=target)}


def _make_plain(value: Any, refuse: Any, path: str = "") -> Any:
    """Return a resolved value as plain ones, components as sections with ``_target_``.

    Args:
        value: the value.
        refuse: raises the error of an item, of its path and its problem.
        path: its item below the part.
    """
    if isinstance(value, Mapping):
        return {str(key): _make_plain(part, refuse, f"{path}::{key}") for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_make_plain(part, refuse, f"{path}::{index}") for index, part in enumerate(value)]
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return {"_target_": "numpy.array", "object": value.tolist()}
    plain = _convert_scalar(value)
    if not isinstance(plain, (str, int, float, type(None))):
        refuse(path, f"its value is of the class {type(value).__name__}, and a job carries numbers, text and lists")
    return plain


def _convert_scalar(value: Any) -> Any:
    """Return a number of NumPy, an enumerated value or a number format as a plain value; anything else as it is."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.dtype):
        return str(value)
    is_format = isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, (np.generic, float, int)))
    return f"numpy.{np.dtype(value).name}" if is_format else value
