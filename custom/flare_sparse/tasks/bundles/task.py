"""The task of a MONAI bundle: its network, loss, transforms, inferer and key metric on a site's own cases."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self, final

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.utils.data import Dataset

from ...core.errors import ConfigError, DataError
from ..adaptation import AdaptableTask, AdaptedTaskConfig
from ..data.bids import CaseFiles, index_cases
from ..data.cases import FileSettings, describe_left_out, find_classes, load_cases
from ..task import Cohort, Examples, Metric, SiteData
from .components import DTYPES, build_all, iterate_components
from .declaration import KEYS, read_declaration
from .targets import Classes, Item, LabelMaps, describe_cause, strip_metadata

MAX_CHARACTERS = 400_000
"""Most characters of a declaration, as JSON; the largest one of MONAI's model zoo has 9,000."""
SOURCE = "task.declaration"
_SCORE_SEED = 0


class BundleConfig(FileSettings, AdaptedTaskConfig):
    """The parts of a bundle, and the files of a site's cases; ``task: {bundle: DIR}`` resolves a bundle to them."""

    declaration: dict[str, Any]
    """network, loss, transforms, inferer and metric of the bundle, as plain values: no expression, and no class off the
    allow list; task: {bundle: DIR} writes it"""
    code: tuple[str, ...] = Field((), max_length=32)
    """classes of the bundle's own code, which travels with deployment.packaging: byoc alone"""
    folder: Path | None = Field(None, strict=True, exclude=True)
    """folder of the bundle's own code at the lead; no file can set it, and no job carries it"""

    def list_folders(self) -> list[Path]:
        """Return the folder of the bundle's own code as a list of one; empty where the lead's is not at hand."""
        return [] if self.folder is None else [self.folder]

    @model_validator(mode="after")
    def _check_declaration(self) -> Self:
        # A site reads it, too: it comes with a job.
        try:
            size = len(json.dumps(self.declaration, allow_nan=False))
            if size > MAX_CHARACTERS:
                raise ConfigError(f"{SOURCE}: found {size:,} characters; expected at most {MAX_CHARACTERS:,}")
            if unused := set(self.code) - {part["_target_"] for part in iterate_components(self.declaration)}:
                raise ConfigError(f"task.code: {', '.join(sorted(unused))}: the declaration names no such class")
            read_declaration(self.declaration, SOURCE, dict.fromkeys(self.code))
        except (ConfigError, TypeError, RecursionError) as error:
            raise ValueError(str(error)) from error
        return self


@final
class BundleTask(AdaptableTask):
    """A MONAI bundle; a minibatch is two lists of images and labels, which are stacked after the random transforms.

    Attributes:
        code: classes of the bundle's own code, by name.

    Args:
        config: the settings.
        code: classes of the bundle's own code in the order of ``config.code``, or objects of them. FLARE builds these
            as parts of the job's component, so that the site's allow-list decides about each.

    Raises:
        ConfigError: a class of the bundle's own code has not come with the job.
    """

    Config = BundleConfig
    config: BundleConfig
    metric = Metric("val_mean_dice", "", "max", may_be_undefined=True)
    reads = (
        "images and label maps in NIfTI, as task segmentation does, or images and their classes; task: {bundle: DIR} "
        "names the bundle"
    )

    def __init__(self, config: BundleConfig | Mapping[str, Any] | None = None, **code: object):
        super().__init__(config)
        own = [part if isinstance(part, type) else type(part) for part in code.values()]
        if len(own) != len(self.config.code):
            raise ConfigError(
                f"task.bundle: {', '.join(self.config.code)}: this is code of the bundle's own, and {len(own)} of "
                f"{len(self.config.code)} classes have come with the job: submit it with deployment.packaging: byoc "
                "to sites whose policy allows code, or replace the items that name it (docs/bundles.md)"
            )
        self.code = dict(zip(self.config.code, own, strict=True))
        self._declaration = read_declaration(self.config.declaration, SOURCE, self.code)
        self._segments = self._declaration.purpose == "segmentation"
        # It is undefined for cases without any label.
        self.metric = Metric(self._declaration.metric_name, "", "max", may_be_undefined=True)
        self.kind = None if self._segments else "classes"

    def build_network(self) -> nn.Module:
        network = self._declaration.network.build()
        if not isinstance(network, nn.Module):
            raise ConfigError(
                f"{self._declaration.network.location}: expected a torch nn.Module, found {type(network)}"
            )
        return network

    def cohort(self, path: Path) -> Cohort:
        """Return the cases with the columns of ``participants.tsv``, if the data has one."""
        return index_cases(self._find_cases(path))

    def _find_cases(self, path: Path) -> dict[str, CaseFiles]:
        return self.config.find_cases(path) if self._segments else find_classes(path, self.config.suffixes)

    @cached_property
    def _target(self) -> LabelMaps:
        declaration, (fixed, _) = self._declaration, self._training_transforms
        return (LabelMaps if self._segments else Classes)(declaration, declaration.preprocessing[len(fixed) :])

    def load(self, data: SiteData, seed: int) -> Examples:
        """Read and check every case once; the cases of a subject are in the same part of the split."""
        files = self._find_cases(data.path)
        training, evaluation = self._training_transforms[0], self._evaluation_transforms
        read = partial(self._target.read_case, transforms=training)
        # What was read with the transforms of training is not read again for the same ones.
        own = None if evaluation is training else partial(self._target.read_case, transforms=evaluation)
        warnings = describe_left_out(files, data.path)
        return load_cases(
            self.config, data, seed, files, read, screen=self._read_checked_case, read_evaluated=own, warnings=warnings
        )

    def _read_checked_case(self, files: CaseFiles) -> Item:
        self._target.check_files(files)
        item = self._target.read_case(files, self._training_transforms[0])
        self._target.check_range(item["label"], files)
        return item

    @cached_property
    def _evaluation_transforms(self) -> list[Any]:
        """The transforms of validation and test cases: the very list of training if they do the same."""
        declaration, (fixed, _) = self._declaration, self._training_transforms
        is_same = declaration.evaluation_preprocessing == declaration.preprocessing[: len(fixed)]
        return fixed if is_same else build_all(declaration.evaluation_preprocessing)

    @cached_property
    def _training_transforms(self) -> tuple[list[Any], Any]:
        """The transforms that give the same result for a case every time, and a chain of those after them."""
        from monai.transforms import Compose
        from monai.transforms.traits import RandomizableTrait

        transforms = build_all(self._declaration.preprocessing)
        is_random = (isinstance(transform, RandomizableTrait) for transform in transforms)
        first = next((index for index, random in enumerate(is_random) if random), len(transforms))
        return transforms[:first], Compose(transforms[first:])

    def collate(self, examples: Sequence[Item]) -> tuple[list[Tensor], list[Tensor]]:
        """Return images and labels, as they are: their shapes may differ before the random transforms."""
        return [item["image"] for item in examples], [item["label"] for item in examples]

    def iterate_batches(self, dataset: Dataset[Any], batch_size: int) -> Iterator[Any]:
        """Yield the cases one by one: whole volumes are large, and their shapes differ."""
        return super().iterate_batches(dataset, 1)

    def augment(self, batch: Any, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the images ``(n, C, d, h, w)`` and labels that the random transforms give.

        Label maps are ``(n, 1, d, h, w)``, classes ``(n, 1)``.

        A transform with several samples of a case gives as many rows.

        Raises:
            DataError: a transform fails, or the images differ in shape.
        """
        _, random = self._training_transforms
        random.set_random_state(seed=int(torch.randint(2**31, (), generator=generator)))
        try:
            # MONAI's transforms may change the sections that they are given, never the tensors in them.
            rows = [random(dict(zip(KEYS, pair, strict=True))) for pair in zip(*batch, strict=True)]
        except Exception as error:
            raise DataError(f"the random transforms of the bundle fail: {describe_cause(error)}") from error
        items = [item for row in rows for item in (row if isinstance(row, list) else [row])]
        images, labels = ([strip_metadata(item[key]) for item in items] for key in KEYS)
        if len({image.shape for image in images}) > 1:
            raise DataError(
                "the images of a minibatch differ in shape after train::preprocessing; add RandCropByPosNegLabeld or "
                "Resized to it, or set method.training.batch_size: 1"
            )
        return torch.stack(images), torch.stack(labels)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the bundle's loss, a scalar.

        Minibatches of whole cases, as scores have them, go through the random transforms with a fixed seed first.

        Raises:
            ConfigError: the network has several outputs.
        """
        images, labels = batch
        if not isinstance(images, Tensor):
            images, labels = self.augment(batch, torch.Generator().manual_seed(_SCORE_SEED))
        logits = model(images)
        if not isinstance(logits, Tensor):
            raise ConfigError("task.bundle: the network has several outputs; switch its deep supervision off")
        if isinstance(self._loss, nn.CrossEntropyLoss):
            labels = labels[:, 0].long()
        # Sums over all voxels of a patch need more digits than bfloat16 has.
        loss: Tensor = self._loss(logits.float(), labels)
        return loss

    @cached_property
    def _loss(self) -> Any:
        return self._declaration.loss.build()

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return predictions and labels of images of one shape.

        Label maps are those after ``validate::postprocessing``; of classes, predictions are probabilities ``(B, C)``.
        """
        return _stack(self._target.predict(model, image, label) for image, label in zip(*batch, strict=True))

    def measure(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the key metric of every case and its voxels with a label, both ``(B, 1)``, or as :meth:`predict`."""
        return _stack(self._target.measure(model, image, label) for image, label in zip(*batch, strict=True))

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the key metric; nothing where it is undefined for every case."""
        return self._target.compute_metrics(predictions, targets)

    def tabulate(self, batch: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("images of a bundle may differ in shape")

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the trained weights into a bundle's ``models/model.pt``, and as a base model.

        A folder without ``configs/`` becomes a bundle, whose ``train.json`` has the declared parts.
        """
        super().save(model, folder)
        if self.config.adapter is not None:
            return
        (folder / "models").mkdir(exist_ok=True)
        torch.save(model.state_dict(), folder / "models" / "model.pt")
        if not (folder / "configs").is_dir():
            (folder / "configs").mkdir()
            text = json.dumps(_format_bundle(self.config.declaration), indent=4)
            # MONAI evaluates a number format, as it does a class.
            text = re.sub(f'"({"|".join(map(re.escape, DTYPES))})"', r'"$\1"', text)
            (folder / "configs" / "train.json").write_text(f"{text}\n", encoding="utf-8")


def _format_bundle(declaration: Mapping[str, Any]) -> dict[str, Any]:
    """Return a declaration as the training configuration of a bundle."""

    def compose(part: str) -> dict[str, Any]:
        return {"_target_": "Compose", "transforms": declaration.get(part) or declaration["preprocessing"]}

    validate = {"preprocessing": compose("evaluation"), "key_metric": declaration["metric"]}
    if "inferer" in declaration:
        validate["inferer"] = declaration["inferer"]
    if "postprocessing" in declaration:
        validate["postprocessing"] = compose("postprocessing")
    train = {"preprocessing": compose("preprocessing")}
    return {"network_def": declaration["network"], "loss": declaration["loss"], "train": train, "validate": validate}


def _stack(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    first, second = (torch.stack(part) for part in zip(*pairs, strict=True))
    return first, second
