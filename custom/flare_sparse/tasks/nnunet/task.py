"""The task of an nnU-Net plan: nnU-Net's pipeline on a site's cases, trained by any method."""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.utils.data import Dataset

from ...core.errors import ConfigError, DataError
from ...core.needs import Need, Needs
from ..data.bids import CaseFiles, index_cases
from ..data.cases import CaseSettings, Derivative, describe_left_out, find_bids_cases, load_cases, select_cases
from ..task import Cohort, Column, Examples, Metric, SiteData, Task, is_metric_name
from .pipeline import TRAINER, Pipeline, Prepared
from .plan import PlanDataset, check_plan, list_configurations
from .raw import TURNING_READER, find_channels, find_raw_cases, list_orientations, note_missing_channels, read_dataset

CHECKPOINT = "checkpoint_final.pth"
_SCORE_SEED = 0


class NnunetConfig(CaseSettings):
    """The plan of all sites, and which of its configurations is trained."""

    plan: dict[str, Any] | None = None
    """one plan for all sites: the file that flare-sparse plan wrote, or its content; null: none yet, for flare-sparse
    plan STUDY alone"""
    configuration: Literal["2d", "3d_fullres", "3d_lowres"] = "3d_fullres"
    """configuration to train"""
    derivative: Derivative = "*"

    @classmethod
    def read_files(cls, settings: dict[str, Any], data: str | None) -> dict[str, Any]:
        """Replace the path of the plan by its content, so that a job carries it."""
        path = settings.get("plan")
        if not isinstance(path, str):
            return settings
        try:
            return {**settings, "plan": json.loads(Path(path).read_text(encoding="utf-8"))}
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"task.plan: cannot be read: {error}; flare-sparse plan DATA writes it (docs/nnunet.md)"
            ) from error

    @model_validator(mode="after")
    def _check_plan(self) -> Self:
        if self.plan is None:
            return self
        try:
            check_plan(self.plan)
        except ConfigError as error:
            raise ValueError(f"plan: {error}") from error
        if self.configuration not in (names := list_configurations(self.plan)):
            raise ValueError(f"configuration is {self.configuration}; the plan has {', '.join(names)}")
        if bad := [name for name in self.plan["dataset"]["labels"] if not is_metric_name(f"dice_{name}")]:
            raise ValueError(f"plan: label {bad[0]!r} cannot name a metric; rename it in dataset.json")
        return self

    def require_plan(self) -> dict[str, Any]:
        """Return the plan.

        Raises:
            ConfigError: there is none yet.
        """
        if self.plan is None:
            raise ConfigError(
                "task.plan is missing: flare-sparse plan STUDY makes one of the data of all sites (docs/nnunet.md)"
            )
        return self.plan

    def needs(self) -> Needs:
        """The plan comes from all cases, and no budget was charged for it."""
        return frozenset({Need.JOINT_SUBJECTS.because("task.plan: was computed from all subjects without noise")})


class Nnunet(Task):
    """nnU-Net; a minibatch of cases is a list of :class:`Prepared`, one of patches is images and their targets."""

    Config = NnunetConfig
    config: NnunetConfig
    metric = Metric("dice", "", "max")
    reads = (
        "nnU-Net's raw data: imagesTr/CASE_0000.nii.gz, labelsTr/CASE.nii.gz and dataset.json; or BIDS with such a "
        "dataset.json, whose channel_names are the suffixes"
    )

    @cached_property
    def _pipeline(self) -> Pipeline:
        return Pipeline(self.config.require_plan(), self.config.configuration)

    @cached_property
    def _dataset(self) -> PlanDataset:
        return PlanDataset.model_validate(self.config.require_plan()["dataset"])

    def model(self) -> nn.Module:
        return self._pipeline.build_network()

    def cohort(self, path: Path) -> Cohort:
        """Return the training cases, with the columns of ``participants.tsv`` if the data is BIDS and has one."""
        return index_cases(find_raw_cases(path, self.config.derivative))

    def load(self, data: SiteData, seed: int) -> Examples:
        """Prepare every case once and keep it in memory; the cases of a subject are in the same part of the split."""
        self._check_dataset(data.path)
        files = find_raw_cases(data.path, self.config.derivative)
        warnings = describe_left_out(files, data.path)
        return load_cases(self.config, data, seed, files, self._pipeline.prepare, warnings=warnings)

    def describe_columns(self, data: SiteData) -> list[Column]:
        """Return the orientations that a site's images are stored in, where nnU-Net reads voxels as they are stored."""
        if self.config.plan is None or self.config.plan["plans"].get("image_reader_writer") == TURNING_READER:
            return []
        files = find_raw_cases(data.path, self.config.derivative)
        names = [name for name in data.select(files, lambda name: files[name].subject) if name in files]
        return list_orientations([files[name].images[0] for name in names if files[name].images])

    def _check_dataset(self, folder: Path) -> None:
        """Refuse data that the plan was not made for.

        Raises:
            DataError: the data is not what the plan was made for.
        """
        dataset = read_dataset(folder)
        for name in ("channel_names", "labels", "file_ending"):
            if (found := getattr(dataset, name)) != (expected := getattr(self._dataset, name)):
                raise DataError(f"{folder}: dataset.json: {name} is {found}; the plan is for {expected}")

    def collate(self, examples: Sequence[Prepared]) -> list[Prepared]:
        """Return the cases as they are: shapes differ."""
        return list(examples)

    def iterate_batches(self, dataset: Dataset[Any], batch_size: int) -> Iterator[Any]:
        """Yield the cases one by one: predictions are of whole volumes."""
        return super().iterate_batches(dataset, 1)

    def augment(self, batch: Any, generator: torch.Generator) -> Any:
        """Return one patch of each case, with nnU-Net's sampling and augmentation."""
        seed = int(torch.randint(2**31, (), generator=generator))
        return self._pipeline.draw_patches(batch, seed, augments=True)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return nnU-Net's loss over all resolutions, a scalar.

        Scores are computed of minibatches of whole cases: a patch of each is drawn with a fixed seed, not augmented.
        """
        if isinstance(batch, list) and isinstance(batch[0], Prepared):
            device = next(model.parameters()).device
            images, targets = self._pipeline.draw_patches(batch, _SCORE_SEED, augments=False)
            batch = images.to(device), [target.to(device) for target in targets]
        images, targets = batch
        # Sums over all voxels of a patch need more digits than bfloat16 has.
        loss: Tensor = self._pipeline.loss([output.float() for output in model(images)], targets)
        return loss

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return predicted and true label maps ``(B, d, h, w)`` of volumes of one shape."""
        predicted = [torch.from_numpy(self._pipeline.segment(model, case).astype("int16")) for case in batch]
        return torch.stack(predicted), torch.stack([torch.from_numpy(case.truth) for case in batch])

    def measure(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return Dice of each class or region ``(B, n)`` on the images' own grids, and its voxels ``(B, n)``."""
        ignored, regions = self._pipeline.labels.ignore_label, self._pipeline.regions.values()
        rows, sizes = [], []
        for case in batch:
            maps = np.stack([self._pipeline.segment(model, case), case.truth])
            counted = np.ones_like(case.truth, bool) if ignored is None else case.truth != ignored
            pairs = [np.isin(maps, region) & counted for region in regions]
            rows.append([_compute_dice(pair) for pair in pairs])
            sizes.append([int(pair[1].sum()) for pair in pairs])
        return torch.tensor(rows, dtype=torch.float64), torch.tensor(sizes)

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return Dice by class or region, means over cases, and the mean over classes."""
        means = predictions.mean(dim=0)
        by_region = dict(zip(self._pipeline.regions, means.tolist(), strict=True))
        return {"dice": float(means.mean()), **{f"dice_{name}": value for name, value in by_region.items()}}

    @torch.no_grad()
    def write_predictions(self, model: nn.Module, data: SiteData, out: Path) -> Iterator[Path]:
        """Write what ``nnUNetv2_predict`` does: CASE.nii.gz for each image, ``dataset.json`` and ``plans.json``."""
        ending, channels = self._dataset.file_ending, len(self._dataset.channel_names)
        cases = select_cases(data, self._find_images(data.path))
        if not cases:
            raise DataError(f"{data.path}: no images CASE_0000{ending}, CASE_0001{ending}, ..., and none in BIDS")
        self._write_plan(out)
        for name, case in cases.items():
            files = note_missing_channels(case, channels)
            try:
                prepared = self._pipeline.prepare(files, needs_labels=False)
            except DataError as error:
                raise DataError(f"{name}: {error}") from error
            file = out / f"{name}{ending}"
            self._pipeline.write_labels(self._pipeline.segment(model, prepared), file, prepared)
            yield file

    def _find_images(self, path: Path) -> dict[str, CaseFiles]:
        """Return the cases to predict: of one file, of a folder of images, of a raw data set, or in BIDS."""
        folder = path.parent if path.is_file() else path
        places = [folder, *(folder / name for name in ("imagesTs", "imagesTr"))]
        found = next((found for place in places if (found := find_channels(place, self._dataset.file_ending))), {})
        cases = {name: CaseFiles(images, None, subject=name) for name, images in found.items()}
        if path.is_file():
            return {name: case for name, case in cases.items() if path in case.images}
        return cases or find_bids_cases(folder, self._dataset.suffixes)

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write a model folder of nnU-Net's; ``nnUNetv2_predict_from_modelfolder -f all -m FOLDER`` loads it."""
        self._write_plan(folder)
        (folder / "fold_all").mkdir(exist_ok=True)
        plan, configuration = self.config.require_plan(), self.config.configuration
        checkpoint = {
            "network_weights": model.state_dict(),
            "trainer_name": TRAINER,
            "init_args": {
                "plans": plan["plans"],
                "configuration": configuration,
                "fold": "all",
                "dataset_json": plan["dataset"],
            },
            "inference_allowed_mirroring_axes": self._pipeline.mirror_axes,
        }
        torch.save(checkpoint, folder / "fold_all" / CHECKPOINT)

    def _write_plan(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("plans", "dataset"):
            content = json.dumps(self.config.require_plan()[name], indent=4)
            (folder / f"{name}.json").write_text(content, encoding="utf-8")


def _compute_dice(pair: np.ndarray) -> float:
    """Return the Dice of two masks ``(2, d, h, w)``; 1 where both are empty."""
    total = int(pair.sum())
    return 2.0 * int(pair.all(axis=0).sum()) / total if total else 1.0
