"""One plan for all sites: nnU-Net's own planner over the merged fingerprint, and what a plan in a job may say."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ...core.environment import set_environment
from ...core.errors import ConfigError
from ...core.settings import Settings, explain
from ..models.segmentation import MAX_PATCH_VOXELS
from .fingerprint import Fingerprint
from .raw import DATASET, Channels

MAX_CHARACTERS = 200_000
"""Most characters of a plan as JSON; nnU-Net's plans have 5,000 to 20,000."""

Blocks = Annotated[int, Field(ge=1, le=32)]
Resampling = Literal["resample_data_or_seg_to_shape", "resample_torch_fornnunet", "no_resampling_hack"]
Normalization = Annotated[str, Field(pattern="^(CT|No|ZScore|RescaleTo01|RGBTo01)Normalization$")]
Imported = Literal["conv_op", "norm_op", "dropout_op", "nonlin"]


class _Section(Settings):
    """A section of a plan.

    nnU-Net imports whatever a plan names: a plan that comes with a job may name the classes in these sections alone,
    and cannot make a site build more than their limits.
    """

    model_config = ConfigDict(strict=True, extra="ignore")


class Network(_Section):
    """Arguments of nnU-Net's network."""

    model_config = ConfigDict(extra="forbid")

    n_stages: Annotated[int, Field(ge=1, le=10)]
    features_per_stage: list[Annotated[int, Field(ge=1, le=4096)]]
    kernel_sizes: list[list[Blocks]]
    strides: list[list[Blocks]]
    n_conv_per_stage: list[Blocks]
    n_conv_per_stage_decoder: list[Blocks]
    conv_op: Literal["torch.nn.modules.conv.Conv2d", "torch.nn.modules.conv.Conv3d"]
    conv_bias: Any = None
    norm_op: Literal["torch.nn.modules.instancenorm.InstanceNorm2d", "torch.nn.modules.instancenorm.InstanceNorm3d"]
    norm_op_kwargs: Any = None
    dropout_op: None = None
    dropout_op_kwargs: Any = None
    nonlin: Literal["torch.nn.LeakyReLU", "torch.nn.ReLU"]
    nonlin_kwargs: Any = None

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        for name in ("features_per_stage", "kernel_sizes", "strides", "n_conv_per_stage", "n_conv_per_stage_decoder"):
            expected = self.n_stages - (name == "n_conv_per_stage_decoder")
            if len(getattr(self, name)) != expected:
                raise ValueError(f"{name}: found {getattr(self, name)}; expected {expected} entries, for n_stages")
        return self


class Architecture(_Section):
    """nnU-Net's network."""

    network_class_name: Literal["dynamic_network_architectures.architectures.unet.PlainConvUNet"]
    imported: list[Imported] = Field(alias="_kw_requires_import", min_length=4, max_length=4)
    arch_kwargs: Network


class Configuration(_Section):
    """One of the configurations that nnU-Net plans."""

    preprocessor_name: Literal["DefaultPreprocessor"]
    resampling_fn_data: Resampling
    resampling_fn_seg: Resampling
    resampling_fn_probabilities: Resampling
    normalization_schemes: list[Normalization]
    patch_size: list[Annotated[int, Field(ge=1)]] = Field(min_length=2, max_length=3)
    spacing: list[Annotated[float, Field(gt=0, lt=1e6)]]
    architecture: Architecture

    @model_validator(mode="after")
    def _check_axes(self) -> Self:
        if prod(self.patch_size) > MAX_PATCH_VOXELS:
            raise ValueError(f"patch_size: found {self.patch_size}, over {MAX_PATCH_VOXELS:,} voxels")
        if len(set(imported := self.architecture.imported)) < len(imported):
            raise ValueError(f"architecture._kw_requires_import: found {imported}; expected each argument once")
        network, axes = self.architecture.arch_kwargs, len(self.patch_size)
        sides: list[Sequence[float]] = [self.spacing, *network.kernel_sizes, *network.strides]
        if wrong := [own for own in sides if len(own) != axes]:
            raise ValueError(f"spacing, kernel_sizes and strides: found {wrong[0]}; expected {axes} numbers")
        return self


def _select_own(configurations: Any) -> Any:
    """Return the configurations that need no other one's result."""
    if not isinstance(configurations, dict):
        return configurations
    return {n: c for n, c in configurations.items() if not (isinstance(c, dict) and "inherits_from" in c)}


class Plans(_Section):
    """nnU-Net's ``plans.json``."""

    dataset_name: str = Field(pattern=r"^Dataset\d{3}_[A-Za-z0-9_-]{1,64}$")
    plans_name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    image_reader_writer: Literal["SimpleITKIO", "NibabelIO", "NibabelIOWithReorient", "Tiff3DIO", "NaturalImage2DIO"]
    label_manager: Literal["LabelManager"]
    configurations: Annotated[dict[str, Configuration], BeforeValidator(_select_own)]


class PlanDataset(Channels):
    """nnU-Net's ``dataset.json`` of a plan."""

    numTraining: Any = None  # noqa: N815  # nnU-Net's name


class Plan(_Section):
    """nnU-Net's plan of all sites."""

    plans: Plans
    dataset: PlanDataset


def build_plan(fingerprint: Fingerprint, name: str) -> dict[str, Any]:
    """Run nnU-Net's planner over a fingerprint; return ``plans`` and ``dataset``, the settings of the task.

    Args:
        fingerprint: that of all sites together.
        name: name of nnU-Net's data set, such as ``Dataset004_Hippocampus``.

    Raises:
        ConfigError: nnU-Net refuses the data, or its plan has what this package does not allow.
    """
    dataset = {
        name: value for name, value in fingerprint.dataset if value is not None and name in Channels.model_fields
    }
    dataset["numTraining"] = fingerprint.cases
    with (
        tempfile.TemporaryDirectory() as folder,
        set_environment({f"nnUNet_{kind}": str(Path(folder, kind)) for kind in ("raw", "preprocessed", "results")}),
        redirect_stdout(StringIO()),
    ):
        from nnunetv2.experiment_planning.experiment_planners.default_experiment_planner import ExperimentPlanner

        raw, preprocessed = (Path(folder, kind, name) for kind in ("raw", "preprocessed"))
        # The planner lists the cases only to find an image that shows how files are read, which the sites have done.
        _write_json(raw / DATASET, {**dataset, "dataset": {}})
        _write_json(preprocessed / "dataset_fingerprint.json", fingerprint.to_nnunet())
        try:
            planner = ExperimentPlanner(name)
            planner.determine_reader_writer = lambda: type(fingerprint.reader, (), {})
            planner.plan_experiment()
        # nnU-Net's checks are assertions, and errors of numpy.
        except Exception as error:
            raise ConfigError(f"nnU-Net makes no plan of these fingerprints: {error!r}") from error
        plans = json.loads((preprocessed / f"{planner.plans_identifier}.json").read_text(encoding="utf-8"))
    plan = {"plans": plans, "dataset": dataset}
    check_plan(plan)
    return plan


def check_plan(plan: Mapping[str, Any]) -> None:
    """Check that a plan is complete and names no code other than nnU-Net's own.

    Raises:
        ConfigError: the text names the entry.
    """
    try:
        size = len(json.dumps(plan, allow_nan=False))
    except ValueError as error:
        raise ConfigError(f"the plan has a number that is not finite: {error}") from error
    if size > MAX_CHARACTERS:
        raise ConfigError(f"the plan has more than {MAX_CHARACTERS:,} characters")
    try:
        Plan.model_validate(plan)
    except ValidationError as error:
        raise ConfigError(f"is no plan that flare-sparse plan wrote: {explain(error, Plan)}") from error


def list_configurations(plan: Mapping[str, Any]) -> list[str]:
    """Return the names of a plan's configurations that need no other one's result."""
    return list(_select_own(plan["plans"]["configurations"]))


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content), encoding="utf-8")
