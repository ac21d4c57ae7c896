"""One plan for all sites: nnU-Net's own planner over the merged fingerprint, and what a plan in a job may say."""

import json
import re
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from math import prod
from pathlib import Path
from typing import Any

from ...core.environment import set_environment
from ...core.errors import ConfigError
from ..models.segmentation import MAX_PATCH_VOXELS
from .fingerprint import Fingerprint
from .planner import Planner
from .raw import DATASET, check_shared

MAX_CHARACTERS = 200_000
"""Most characters of a plan as JSON; nnU-Net's plans have 5,000 to 20,000."""
MAX_STAGES, MAX_BLOCKS, MAX_FEATURES = 10, 32, 4096
"""Most stages of a network, convolutions or blocks of a stage, and channels: a job cannot make a site build more."""

_ARCHITECTURES = "dynamic_network_architectures.architectures.unet"
# nnU-Net imports whatever a plan names: a plan that comes with a job may name these alone.
_ALLOWED: dict[str, set[Any]] = {
    "image_reader_writer": {"SimpleITKIO", "NibabelIO", "NibabelIOWithReorient", "Tiff3DIO", "NaturalImage2DIO"},
    "label_manager": {"LabelManager"},
    "preprocessor_name": {"DefaultPreprocessor"},
    "network_class_name": {f"{_ARCHITECTURES}.PlainConvUNet", f"{_ARCHITECTURES}.ResidualEncoderUNet"},
    "conv_op": {f"torch.nn.modules.conv.Conv{axes}d" for axes in (2, 3)},
    "norm_op": {f"torch.nn.modules.instancenorm.InstanceNorm{axes}d" for axes in (2, 3)},
    "nonlin": {"torch.nn.LeakyReLU", "torch.nn.ReLU"},
    "dropout_op": {None},
}
_RESAMPLING = {"resample_data_or_seg_to_shape", "resample_torch_fornnunet", "no_resampling_hack"}
_NORMALIZATION = {
    f"{name}Normalization" for name in ("CT", "No", "ZScore", "RescaleTo01", "RGBTo01")
}  # fmt: skip
_ARCHITECTURE_KEYS = {
    "n_stages", "features_per_stage", "conv_op", "kernel_sizes", "strides", "n_conv_per_stage", "n_blocks_per_stage",
    "n_conv_per_stage_decoder", "conv_bias", "norm_op", "norm_op_kwargs", "dropout_op", "dropout_op_kwargs", "nonlin",
    "nonlin_kwargs",
}  # fmt: skip
_DATASET_KEYS = {"channel_names", "labels", "file_ending", "regions_class_order", "numTraining"}


def build_plan(fingerprint: Fingerprint, name: str, planner: Planner = "ExperimentPlanner") -> dict[str, Any]:
    """Run nnU-Net's planner over a fingerprint; return ``plans`` and ``dataset``, the settings of the task.

    Args:
        fingerprint: that of all sites together.
        name: name of nnU-Net's data set, such as ``Dataset004_Hippocampus``.
        planner: class of nnU-Net's planner.

    Raises:
        ConfigError: nnU-Net refuses the data, or its plan has what this package does not allow.
    """
    dataset = {key: value for key, value in fingerprint.dataset.items() if key in _DATASET_KEYS}
    dataset["numTraining"] = fingerprint.cases
    with (
        tempfile.TemporaryDirectory() as folder,
        set_environment({f"nnUNet_{kind}": str(Path(folder, kind)) for kind in ("raw", "preprocessed", "results")}),
        redirect_stdout(StringIO()),
    ):
        raw, preprocessed = (Path(folder, kind, name) for kind in ("raw", "preprocessed"))
        # The planner lists the cases only to find an image that shows how files are read, which the sites have done.
        _write_json(raw / DATASET, {**dataset, "dataset": {}})
        _write_json(preprocessed / "dataset_fingerprint.json", fingerprint.to_nnunet())
        try:
            instance = _get_planner(planner)(name)
            instance.determine_reader_writer = lambda: type(fingerprint.reader, (), {})
            instance.plan_experiment()
        # nnU-Net's checks are assertions, and errors of numpy.
        except Exception as error:
            raise ConfigError(f"nnU-Net's {planner} makes no plan of these fingerprints: {error!r}") from error
        plans = json.loads((preprocessed / f"{instance.plans_identifier}.json").read_text(encoding="utf-8"))
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
        plans, dataset = plan["plans"], plan["dataset"]
        if unknown := set(dataset) - _DATASET_KEYS:
            raise ConfigError(f"dataset.{min(unknown)}: is not used by this task; leave it out")
        try:
            check_shared(dataset)
        except ValueError as error:
            raise ConfigError(f"dataset.{error}") from error
        _check_text("dataset.file_ending", dataset["file_ending"], r"\.[A-Za-z0-9.]{1,15}")
        _check_text("plans.dataset_name", plans["dataset_name"], r"Dataset\d{3}_[A-Za-z0-9_-]{1,64}")
        _check_text("plans.plans_name", plans["plans_name"], r"[A-Za-z0-9_-]{1,64}")
        for name in ("image_reader_writer", "label_manager"):
            _check_name(f"plans.{name}", plans[name], _ALLOWED[name])
        for name, configuration in plans["configurations"].items():
            if "inherits_from" not in configuration:
                _check_configuration(f"plans.configurations.{name}", configuration)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"is no plan that flare-sparse plan wrote: {type(error).__name__}: {error}") from error


def list_configurations(plan: Mapping[str, Any]) -> list[str]:
    """Return the names of a plan's configurations that need no other one's result."""
    return [name for name, entry in plan["plans"]["configurations"].items() if "inherits_from" not in entry]


def _check_configuration(path: str, configuration: Mapping[str, Any]) -> None:
    architecture = configuration["architecture"]
    _check_name(f"{path}.preprocessor_name", configuration["preprocessor_name"], _ALLOWED["preprocessor_name"])
    for kind in ("data", "seg", "probabilities"):
        _check_name(f"{path}.resampling_fn_{kind}", configuration[f"resampling_fn_{kind}"], _RESAMPLING)
    for scheme in configuration["normalization_schemes"]:
        _check_name(f"{path}.normalization_schemes", scheme, _NORMALIZATION)
    name = "network_class_name"
    _check_name(f"{path}.architecture.{name}", architecture[name], _ALLOWED[name])
    if unknown := set(architecture["arch_kwargs"]) - _ARCHITECTURE_KEYS:
        raise ConfigError(f"{path}.architecture.arch_kwargs.{min(unknown)}: is none of nnU-Net's planners")
    imported = architecture["_kw_requires_import"]
    if sorted(imported) != ["conv_op", "dropout_op", "nonlin", "norm_op"]:
        raise ConfigError(f"{path}.architecture._kw_requires_import: found {imported}")
    _check_sizes(path, configuration)
    for name in ("conv_op", "norm_op", "dropout_op", "nonlin"):
        _check_name(f"{path}.architecture.arch_kwargs.{name}", architecture["arch_kwargs"].get(name), _ALLOWED[name])


def _check_sizes(path: str, configuration: Mapping[str, Any]) -> None:
    """Check what decides the memory and the time that a site needs."""
    axes, arguments = len(configuration["patch_size"]), configuration["architecture"]["arch_kwargs"]
    _check_numbers(f"{path}.patch_size", configuration["patch_size"], (2, 3), MAX_PATCH_VOXELS)
    if prod(configuration["patch_size"]) > MAX_PATCH_VOXELS:
        raise ConfigError(f"{path}.patch_size: found {configuration['patch_size']}, over {MAX_PATCH_VOXELS:,} voxels")
    spacing = configuration["spacing"]
    if len(spacing) != axes or not all(isinstance(side, (int, float)) and 0 < side < 1e6 for side in spacing):
        raise ConfigError(f"{path}.spacing: found {spacing}; expected {axes} positive numbers")
    stages = arguments["n_stages"]
    _check_numbers(f"{path}.architecture.arch_kwargs.n_stages", [stages], (1,), MAX_STAGES)
    blocks = {name: stages for name in ("n_conv_per_stage", "n_blocks_per_stage") if name in arguments}
    for name, length in {**blocks, "n_conv_per_stage_decoder": stages - 1, "features_per_stage": stages}.items():
        limit = MAX_FEATURES if name == "features_per_stage" else MAX_BLOCKS
        _check_numbers(f"{path}.architecture.arch_kwargs.{name}", arguments[name], (length,), limit)
    for name in ("kernel_sizes", "strides"):
        if len(arguments[name]) != stages:
            raise ConfigError(f"{path}.architecture.arch_kwargs.{name}: expected {stages} entries")
        for sides in arguments[name]:
            _check_numbers(f"{path}.architecture.arch_kwargs.{name}", sides, (axes,), MAX_BLOCKS)


def _check_numbers(path: str, found: Any, lengths: tuple[int, ...], limit: int) -> None:
    if not isinstance(found, (list, tuple)) or len(found) not in lengths:
        raise ConfigError(f"{path}: found {found}; expected {' or '.join(map(str, lengths))} numbers")
    if not all(type(number) is int and 1 <= number <= limit for number in found):
        raise ConfigError(f"{path}: found {found}; expected whole numbers from 1 to {limit:,}")


def _check_name(path: str, found: Any, allowed: set[Any]) -> None:
    if found not in allowed:
        raise ConfigError(f"{path}: found {found!r}; expected one of {', '.join(sorted(map(str, allowed)))}")


def _check_text(path: str, found: Any, pattern: str) -> None:
    if not isinstance(found, str) or not re.fullmatch(pattern, found):
        raise ConfigError(f"{path}: found {found!r}; expected text like {pattern}")


def _get_planner(name: Planner) -> Any:
    from nnunetv2.experiment_planning.experiment_planners import default_experiment_planner
    from nnunetv2.experiment_planning.experiment_planners.residual_unets import residual_encoder_unet_planners

    module = default_experiment_planner if name == "ExperimentPlanner" else residual_encoder_unet_planners
    return getattr(module, name)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content), encoding="utf-8")
