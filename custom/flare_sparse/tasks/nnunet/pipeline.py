"""nnU-Net's own preprocessing, patches, augmentation, loss and inference, as one plan describes them."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...core.errors import ConfigError, DataError, require_extra
from ...core.seeds import seed_torch
from ..data.bids import CaseFiles
from ..data.nifti import round_labels
from .raw import check_alignment, explain_reader_error

TRAINER = "nnUNetTrainer"
MAX_VOXELS = 2**30
"""Most voxels of a case on the plan's grid: a job cannot ask a site to allocate more."""


@contextmanager
def _blame_plan() -> Iterator[None]:
    """Report errors of nnU-Net, whose checks are assertions, as those of the plan."""
    try:
        yield
    except Exception as error:
        raise ConfigError(f"task.plan: nnU-Net does not read it: {error!r}") from error


@dataclass(frozen=True, eq=False)
class Prepared:
    """One case after nnU-Net's preprocessing.

    Attributes:
        image: float32 ``(channels, d, h, w)`` on the plan's grid.
        labels: label map ``(1, d, h, w)`` on that grid; -1 outside of the subject.
        properties: what nnU-Net needs to find the way back, and positions of each class.
        truth: label map ``(d, h, w)`` on the image's own grid; empty without labels.
    """

    image: np.ndarray
    labels: np.ndarray
    properties: dict[str, Any]
    truth: np.ndarray


class Pipeline:
    """nnU-Net for one configuration of a plan.

    Args:
        plan: ``plans`` and ``dataset``, checked.
        configuration: such as ``3d_fullres``.

    Raises:
        ConfigError: nnU-Net is not installed, or does not read the plan.
    """

    def __init__(self, plan: Mapping[str, Any], configuration: str):
        with require_extra("task nnunet", "nnunet"):
            from nnunetv2.utilities.plans_handling.plans_handler import PlansManager
        self.name, self.dataset = configuration, copy.deepcopy(dict(plan["dataset"]))
        with _blame_plan():
            self.plans = PlansManager(copy.deepcopy(plan["plans"]))
            self.configuration = self.plans.get_configuration(configuration)
            self.labels = self.plans.get_label_manager(self.dataset)

    @property
    def regions(self) -> dict[str, tuple[int, ...]]:
        """Values of the label map by name of each foreground class or region, in nnU-Net's order."""
        labels = {name: np.ravel(value).tolist() for name, value in self.dataset["labels"].items() if name != "ignore"}
        return {name: tuple(values) for name, values in labels.items() if any(values)}

    def build_network(self) -> nn.Module:
        """Return the plan's network with an output at every resolution, as nnU-Net trains it.

        Raises:
            ConfigError: nnU-Net does not build the network.
        """
        from nnunetv2.utilities.get_network_from_plans import get_network_from_plans

        manager = self.configuration
        with _blame_plan():
            network: nn.Module = get_network_from_plans(
                manager.network_arch_class_name,
                manager.network_arch_init_kwargs,
                manager.network_arch_init_kwargs_req_import,
                len(self.dataset["channel_names"]),
                self.labels.num_segmentation_heads,
                allow_init=True,
                deep_supervision=True,
            )
        return network

    def prepare(self, files: CaseFiles, *, needs_labels: bool = True) -> Prepared:
        """Read, crop, normalise and resample a case with nnU-Net's preprocessor.

        Raises:
            DataError: a file is missing or damaged, or the files do not fit each other or the plan.
        """
        if files.problem:
            raise DataError(files.problem)
        labels_file = files.require_labels() if needs_labels else None
        reader = self.plans.image_reader_writer_class()
        check_alignment(files, type(reader).__name__, needs_labels=needs_labels)
        preprocessor = self.configuration.preprocessor_class(verbose=False)
        # nnU-Net's readers raise errors of their libraries, and its checks are assertions.
        try:
            with redirect_stdout(StringIO()):
                image, properties = reader.read_images([*map(str, files.images)])
                # nnU-Net's preprocessing cuts the digits after the point off.
                truth = None if labels_file is None else round_labels(labels_file, reader.read_seg(str(labels_file))[0])
                self._check_voxels(files, image, truth)
                self._check_size(image, properties["spacing"])
                prepared, labels, properties = preprocessor.run_case_npy(
                    image, truth, properties, self.plans, self.configuration, self.dataset
                )
        except DataError:
            raise
        except Exception as error:
            text = explain_reader_error(error)
            raise DataError(f"{files.images[0].name}: nnU-Net's preprocessing fails: {text}") from error
        values = np.zeros(0, np.int16) if truth is None else truth[0].astype(np.int16)
        return Prepared(prepared.astype(np.float32), labels.astype(np.int16), properties, values)

    def _check_size(self, image: np.ndarray, spacing: Sequence[float]) -> None:
        axes = [int(axis) for axis in self.plans.transpose_forward]
        # A configuration in 2D keeps the first axis as it is.
        pairs = zip(reversed(axes), reversed(self.configuration.spacing), strict=False)
        voxels = prod(image.shape[1:]) * prod(spacing[axis] / target for axis, target in pairs)
        if voxels > MAX_VOXELS:
            raise DataError(
                f"{voxels:.1e} voxels of {self.configuration.spacing} mm, as the plan asks; the limit is {MAX_VOXELS:,}"
            )

    def _check_voxels(self, files: CaseFiles, image: np.ndarray, truth: np.ndarray | None) -> None:
        if not np.isfinite(image).all():
            raise DataError(f"{files.images[0].name}: voxels are NaN or infinite")
        if truth is None:
            return
        if truth.shape[1:] != image.shape[1:]:
            raise DataError(f"label map of {truth.shape[1:]} voxels; the image has {image.shape[1:]}")
        known = {0, *self.labels.all_labels} | ({self.labels.ignore_label} if self.labels.has_ignore_label else set())
        if unknown := sorted(set(np.unique(truth).tolist()) - known):
            raise DataError(f"{files.require_labels().name}: label {unknown[0]:g} is none of dataset.json's labels")

    def draw_patches(self, cases: Sequence[Prepared], seed: int, *, augments: bool) -> tuple[Tensor, list[Tensor]]:
        """Return a minibatch with one patch of each case, from nnU-Net's data loader.

        Args:
            cases: the cases, in order: of the last third the patch has a voxel of a class.
            seed: seed of positions and augmentation.
            augments: nnU-Net's augmentation; False: patches as they are.

        Returns:
            Images ``(B, channels, *patch)``, and for each output of the network its targets ``(B, 1, ...)``.
        """
        from nnunetv2.training.dataloading.data_loader import nnUNetDataLoader

        transforms, size = self._transforms[augments]
        loader = nnUNetDataLoader(
            _Cases(cases),
            len(cases),
            size,
            self.configuration.patch_size,
            self.labels,
            oversample_foreground_percent=_FOREGROUND_SHARE,
            transforms=transforms,
        )
        loader.get_indices = lambda: [str(number) for number in range(len(cases))]
        with seed_torch(seed), _seed_numpy(seed):
            batch = loader.generate_train_batch()
        return batch["data"], batch["target"]

    @cached_property
    def _trainer(self) -> Any:
        """nnU-Net's trainer, for the parts that it builds from a plan; it trains nothing and writes nothing."""
        from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

        # Its constructor creates folders and log files.
        trainer = nnUNetTrainer.__new__(nnUNetTrainer)
        trainer.plans_manager, trainer.configuration_manager = self.plans, self.configuration
        trainer.label_manager, trainer.dataset_json = self.labels, self.dataset
        trainer.device, trainer.is_ddp, trainer.is_cascaded = torch.device("cpu"), False, False
        trainer.enable_deep_supervision = True
        trainer.print_to_log_file = lambda *_, **__: None
        return trainer

    @cached_property
    def loss(self) -> nn.Module:
        """nnU-Net's loss of the outputs at all resolutions."""
        loss: nn.Module = self._trainer._build_loss()
        return loss

    @cached_property
    def mirror_axes(self) -> tuple[int, ...]:
        """Axes that are mirrored in training and prediction."""
        return tuple(self._trainer.configure_rotation_dummyDA_mirroring_and_inital_patch_size()[3])

    @cached_property
    def _transforms(self) -> dict[bool, tuple[Any, Any]]:
        """Transforms of patches and the patches' size before them: with nnU-Net's augmentation, and without."""
        trainer, labels, patch = self._trainer, self.labels, self.configuration.patch_size
        rotation, is_2d, size, axes = trainer.configure_rotation_dummyDA_mirroring_and_inital_patch_size()
        scales = trainer._get_deep_supervision_scales()
        arguments = {
            "foreground_labels": labels.foreground_labels,
            "regions": labels.foreground_regions if labels.has_regions else None,
            "ignore_label": labels.ignore_label,
        }
        mask = self.configuration.use_mask_for_norm
        augmenting = trainer.get_training_transforms(
            patch, rotation, scales, axes, is_2d, use_mask_for_norm=mask, **arguments
        )
        for transform in augmenting.transforms:
            inner = getattr(transform, "transform", transform)
            # nnU-Net times two ways to blur and takes the faster one: their last bits differ.
            if hasattr(inner, "benchmark"):
                inner.benchmark = False
        return {True: (augmenting, size), False: (trainer.get_validation_transforms(scales, **arguments), patch)}

    def segment(self, network: nn.Module, case: Prepared) -> np.ndarray:
        """Return the label map ``(d, h, w)`` on the image's own grid, by mirrored sliding windows with a Gaussian."""
        from nnunetv2.inference.export_prediction import convert_predicted_logits_to_segmentation_with_correct_shape
        from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

        device, benchmark = next(network.parameters()).device, torch.backends.cudnn.benchmark
        with redirect_stdout(StringIO()):
            predictor = nnUNetPredictor(device=device, allow_tqdm=False)
        # The predictor lets cuDNN choose by time, and the last bits would differ between two runs.
        torch.backends.cudnn.benchmark = benchmark
        full = _FullResolution(network).train(network.training)
        predictor.manual_initialization(
            full, self.plans, self.configuration, None, self.dataset, TRAINER, self.mirror_axes
        )
        labels: np.ndarray = convert_predicted_logits_to_segmentation_with_correct_shape(
            predictor.predict_sliding_window_return_logits(torch.from_numpy(case.image)).cpu(),
            self.plans,
            self.configuration,
            self.labels,
            case.properties,
            num_threads_torch=torch.get_num_threads(),
        )
        return labels

    def write_labels(self, labels: np.ndarray, file: Path, case: Prepared) -> None:
        """Write a label map with the grid of the image that it belongs to."""
        self.plans.image_reader_writer_class().write_seg(labels, str(file), case.properties)


_FOREGROUND_SHARE = 0.33
"""``oversample_foreground_percent`` of nnU-Net's trainer."""


class _FullResolution(nn.Module):
    """The first output of a network with deep supervision."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor:
        outputs = self.network(image)
        full: Tensor = outputs[0] if isinstance(outputs, (list, tuple)) else outputs
        return full


class _Cases:
    """Cases as nnU-Net's data loader reads them; by position, because a minibatch may have a case twice."""

    def __init__(self, cases: Sequence[Prepared]):
        self._cases = cases
        self.identifiers = [str(number) for number in range(len(cases))]

    def load_case(self, identifier: str) -> tuple[np.ndarray, np.ndarray, None, dict[str, Any]]:
        case = self._cases[int(identifier)]
        return case.image, case.labels, None, case.properties


@contextmanager
def _seed_numpy(seed: int) -> Iterator[None]:
    """Seed NumPy's global generator within the context, which nnU-Net draws from; restore its state on exit."""
    state = np.random.get_state()  # noqa: NPY002
    np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(state)  # noqa: NPY002
