"""The task of a MONAI bundle: its network, loss, transforms, inferer and key metric on a site's own cases."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, final

import torch
import yaml
from pydantic import Field, field_validator
from torch import Tensor, nn
from torch.utils.data import Dataset

from ...core.errors import ConfigError, DataError
from ..adaptation import AdaptableTask, AdaptedTaskConfig
from ..data.cases import Case, CaseFiles, Derivative, Suffixes, find_cases, read_cases, read_cohort, split_cases
from ..data.pairs import Pairs
from ..data.segmentation import check_files
from ..task import Cohort, Examples, Metric, SiteData
from .cases import CaseDataset, Item, describe_cause, read_case, strip_metadata
from .components import LOWER_IS_BETTER, Component
from .declaration import KEYS, Declaration, encode_json, find_training_file, read_declaration
from .labels import LabelRange

MAX_CHARACTERS = 400_000
"""Most characters of all configurations of a bundle, as JSON; the larger ones of MONAI's model zoo have 20,000."""
FILE_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}\.(json|yaml|yml)$"
"""Pattern of the names of the files in ``configs/`` that a job carries."""
_SCORE_SEED = 0


class BundleConfig(AdaptedTaskConfig):
    """Configurations of a bundle, and the files of a site's cases; ``task: {bundle: DIR}`` reads them."""

    configs: dict[Annotated[str, Field(pattern=FILE_NAME)], dict[str, Any]] = Field(
        max_length=32,
        description="content of the files in the bundle's configs/, by name; task: {bundle: DIR} reads them",
    )
    suffixes: Suffixes = ("T1w",)
    derivative: Derivative = "*"
    pairs: Pairs | None = Field(
        None, description="patterns of the files where the data is neither BIDS nor a Decathlon folder"
    )
    cache: bool = Field(True, description="keep all cases in memory; false: read the files at each access")
    skip_bad_subjects: bool = Field(
        False, description="skip and count unusable cases; false: refuse to train if there are any"
    )

    @field_validator("configs")
    @classmethod
    def _check_configs(cls, configs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        # A site reads them, too: they come with a job.
        try:
            size = sum(len(encode_json(content, f"configs/{name}")) for name, content in configs.items())
            if size > MAX_CHARACTERS:
                raise ConfigError(f"the configurations have {size:,} characters; expected at most {MAX_CHARACTERS:,}")
            read_configs(configs)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return configs


def read_configs(configs: Mapping[str, Mapping[str, Any]]) -> Declaration:
    """Return what the configurations of a bundle declare.

    Raises:
        ConfigError: as :func:`read_declaration`; or there is no training configuration.
    """
    name = find_training_file(configs)
    return read_declaration(configs[name], f"configs/{name}")[0]


@final
class BundleTask(AdaptableTask):
    """A MONAI bundle for segmentation; a minibatch is two lists of images and label maps, cropped ones are stacked."""

    Config = BundleConfig
    config: BundleConfig
    metric = Metric("val_mean_dice", "", "max", may_be_undefined=True)
    reads = "images and label maps in NIfTI, as task segmentation does; task: {bundle: DIR} names the bundle"

    def __init__(self, config: BundleConfig | Mapping[str, Any] | None = None):
        super().__init__(config)
        self._declaration = read_configs(self.config.configs)
        self.metric = self._declaration.main_metric

    def build_network(self) -> nn.Module:
        network = self._declaration.network.build()
        assert isinstance(network, nn.Module), "the allow list names classes of networks"
        return network

    def cohort(self, path: Path) -> Cohort:
        """Return the cases with the columns of ``participants.tsv``, if the data has one."""
        return read_cohort(self._find_cases(path))

    def _find_cases(self, path: Path) -> dict[str, CaseFiles]:
        return find_cases(path, self.config.suffixes, self.config.derivative, self.config.pairs)

    def load(self, data: SiteData, seed: int) -> Examples:
        """Read and check every case once; the cases of a subject are in the same part of the split."""
        cases, declaration = self._find_cases(data.path), self._declaration
        fixed, _ = self._training_transforms
        labels = LabelRange.from_declaration(declaration, declaration.preprocessing[len(fixed) :])
        is_same = declaration.evaluation_preprocessing == declaration.preprocessing[: len(fixed)]
        evaluation = fixed if is_same else _build(declaration.evaluation_preprocessing)

        axes = 2 if declaration.network.find_argument("spatial_dims") == 2 else 3

        def read_checked_case(files: CaseFiles) -> Item:
            check_files(files, axes)
            item = read_case(files, fixed)
            if labels is not None:
                labels.check(item["label"], files.require_labels().name)
            return item

        examples, skipped = read_cases(
            cases,
            data.select(cases, lambda name: cases[name].subject),
            read_checked_case,
            cache=self.config.cache,
            skip_bad_subjects=self.config.skip_bad_subjects,
            source=data.path,
        )
        split = split_cases({name: cases[name].subject for name in examples}, self.config.split, seed)

        def build_dataset(names: Sequence[str], transforms: Sequence[Any]) -> CaseDataset:
            chosen = [examples[name] for name in names]
            if transforms is not fixed and self.config.cache:
                chosen = [Case(case.files, read_case(case.files, transforms)) for case in chosen]
            return CaseDataset(chosen, transforms)

        train = build_dataset(split.train, fixed)
        validation, test = (build_dataset(names, evaluation) for names in (split.validation, split.test))
        return Examples(train, test, skipped, split.train, split.test, (), validation, split.validation)

    @cached_property
    def _training_transforms(self) -> tuple[list[Any], Any]:
        """The transforms that give the same result for a case every time, and a chain of those after them."""
        from monai.transforms import Compose
        from monai.transforms.traits import RandomizableTrait

        transforms = _build(self._declaration.preprocessing)
        is_random = (isinstance(transform, RandomizableTrait) for transform in transforms)
        first = next((index for index, random in enumerate(is_random) if random), len(transforms))
        return transforms[:first], Compose(transforms[first:])

    def collate(self, examples: Sequence[Item]) -> tuple[list[Tensor], list[Tensor]]:
        """Return images and label maps, as they are: their shapes may differ before the random transforms."""
        return [item["image"] for item in examples], [item["label"] for item in examples]

    def iterate_batches(self, dataset: Dataset[Any], batch_size: int) -> Iterator[Any]:
        """Yield the cases one by one: whole volumes are large, and their shapes differ."""
        return super().iterate_batches(dataset, 1)

    def augment(self, batch: Any, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the images ``(n, C, d, h, w)`` and label maps ``(n, 1, d, h, w)`` that the random transforms give.

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
        """Return predictions and label maps of volumes of one shape, after ``validate::postprocessing``."""
        pairs = [self._predict_case(model, image, label) for image, label in zip(*batch, strict=True)]
        predicted, labels = (torch.stack(part) for part in zip(*pairs, strict=True))
        return predicted, labels

    def _predict_case(self, model: nn.Module, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        from monai.transforms import Compose

        logits = self._declaration.inferer.build()(strip_metadata(image)[None], model)
        item = Compose(_build(self._declaration.postprocessing))({"pred": logits[0], "label": strip_metadata(label)})
        return strip_metadata(item["pred"]), strip_metadata(item["label"])

    def measure(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the key metric of every case ``(B, 1)``, its mean over classes, and voxels with a label ``(B, 1)``.

        Classes for which MONAI leaves it undefined are left out of the mean; a case without any is NaN. A distance of a
        class that is only present or only predicted is the diagonal of the volume, in voxels.
        """
        metric = self._declaration.metric
        background = bool(metric.args.get("include_background", False))
        rows, sizes = [], []
        for image, label in zip(*batch, strict=True):
            predicted, truth = self._predict_case(model, image, label)
            # MONAI warns of an argument that it passes to itself, and of every class that a case does not have.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                values = metric.build()(y_pred=[predicted], y=[truth]).double().flatten()
            if metric.path in LOWER_IS_BETTER:
                values = _complete_distances(values, predicted, truth, background=background)
            rows.append(values[values.isfinite()].mean().reshape(1).cpu())
            sizes.append(strip_metadata(label).count_nonzero().reshape(1).cpu())
        return torch.stack(rows), torch.stack(sizes)

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the mean of the key metric over the cases for which it is defined; nothing without any."""
        defined = predictions[predictions.isfinite()]
        return {self.metric.name: float(defined.mean())} if defined.numel() else {}

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write a bundle, ``configs/`` as it was and the trained weights in ``models/model.pt``, and a base model."""
        super().save(model, folder)
        if self.config.adapter is not None:
            return
        (folder / "configs").mkdir(parents=True, exist_ok=True)
        (folder / "models").mkdir(exist_ok=True)
        for name, content in self.config.configs.items():
            is_json = name.endswith(".json")
            text = json.dumps(content, indent=4) if is_json else yaml.safe_dump(content, sort_keys=False)
            (folder / "configs" / name).write_text(f"{text.rstrip()}\n", encoding="utf-8")
        torch.save(model.state_dict(), folder / "models" / "model.pt")


def _complete_distances(values: Tensor, predicted: Tensor, truth: Tensor, *, background: bool) -> Tensor:
    """Return the distances ``(classes,)`` of a case: the diagonal for a class that only one of the two maps has.

    Where neither has it, the distance is NaN.

    Args:
        values: MONAI's distances. A class that is missed is NaN there, so that a mean without it would reward a model
            that predicts nothing.
        predicted: predictions ``(channels, d, h, w)``.
        truth: label maps, likewise.
        background: whether the first channel has a distance; the only channel always has one.
    """
    start = 0 if background or len(truth) == 1 else 1
    is_predicted, is_present = (part[start:].flatten(1).any(1) for part in (predicted, truth))
    sides = truth.shape[1:]
    completed = values.masked_fill(is_predicted ^ is_present, math.dist(sides, [0] * len(sides)))
    return completed.masked_fill(~is_predicted & ~is_present, math.nan)


def _build(components: Sequence[Component]) -> list[Any]:
    return [component.build() for component in components]
