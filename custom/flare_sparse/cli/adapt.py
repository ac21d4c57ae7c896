"""``flare-sparse adapt``: adapt the model of a finished run to a new site."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.checkpoint.writing import write_json
from ..core.errors import ConfigError, DataError
from .console import build_table
from .console import out as console
from .options import Overrides

if TYPE_CHECKING:
    from torch import Tensor

    from ..config.assemble import Assembly
    from ..core.mask import Mask
    from ..training import Site


def adapt(
    run_dir: Annotated[Path, typer.Argument(help="Result folder of a finished run", show_default=False)],
    data: Annotated[Path, typer.Option(help="Data of the new site: the folder or file that its site file would name")],
    set_: Overrides = None,
) -> None:
    """Adapt a run's model to a site that took no part in the run.

    The model is adapted on 80 % of the site's examples and evaluated on the others, before and after. Writes the
    adapted model and adaptation.json. Nothing leaves this machine.

    [dim]flare-sparse adapt runs/metagater_cifar10 --data new_hospital.npz[/]
    """
    from ..compute.kernels.threads import limit_kernel_threads
    from ..config.assemble import open_site
    from ..config.study import Study
    from ..config.user_code import mark_received
    from ..config.withdrawals import open_data
    from ..core.seeds import limit_threads
    from ..results.runs.record import CONFIG

    site = data.resolve().name.split(".")[0]
    folder = (run_dir / "adapted" / site).resolve()
    config_file = run_dir / CONFIG
    if not config_file.is_file():
        raise ConfigError(f"{run_dir}: there is no config.yaml here; give the result folder of a finished run")
    mark_received(run_dir)
    study = Study.load(config_file, set_ or ())
    config, assembly = study.config, study.assembly
    with limit_threads(config.torch_threads), limit_kernel_threads(config.federation.threads):
        target_site = open_site(assembly, open_data(run_dir, data, site))
        figures = adapt_at_site(assembly, target_site, run_dir, folder)
    _show(figures, assembly)
    console.print(f"model:  {folder / 'model.safetensors'}")
    console.print(f"record: {folder / 'adaptation.json'}")


def adapt_at_site(assembly: Assembly, site: Site, run_dir: Path, folder: Path) -> dict[str, Any]:
    """Adapt the model in ``run_dir`` to a site, write the result to ``folder`` and return the figures.

    Raises:
        ConfigError: the model does not belong to this job, or the method does not adapt.
        DataError: the site has no training examples.
    """
    from ..core.params import compute_digest
    from ..results.runs.model_files import read_mask, read_model, save_model

    if not site.num_examples:
        raise DataError(f"site {site.name!r} has no training examples; adaptation needs some")
    weights = read_model(run_dir / "model.safetensors", assembly.layout)
    live = read_mask(run_dir / "model.safetensors", assembly.layout)
    site.weights = weights.clone()
    before = site.evaluate(weights)
    began = time.perf_counter()
    adapted = assembly.method.adapt(site, live).cpu()
    seconds = time.perf_counter() - began
    folder.mkdir(parents=True, exist_ok=True)
    after = site.evaluate(adapted)
    assert site.evaluated is not None, "the adapted model was evaluated"
    save_model(folder / "model.safetensors", *site.evaluated)
    figures = {
        "method": assembly.method.name,
        "site": site.name,
        "training_examples": site.num_examples,
        "before": before,
        "after": after,
        "sparsity": 1 - _count_nonzero(adapted, live) / adapted.numel(),
        "adaptation_seconds": seconds,
        "sha256_before": compute_digest(weights),
        "sha256_after": compute_digest(adapted),
    }
    write_json(folder / "adaptation.json", figures)
    return figures


def _count_nonzero(weights: Tensor, live: Mask) -> int:
    """Count the live weights that are not zero; an adaptation may prune further."""
    return int((live.take(weights) != 0).sum())


def _show(figures: dict[str, Any], assembly: Assembly) -> None:
    rows = []
    unit = assembly.task.metric.unit
    for name, after in sorted(figures["after"].items()):
        label = f"{name} ({unit})" if unit and name == assembly.task.metric.name else name
        rows.append([label, f"{figures['before'][name]:.3f}", f"{after:.3f}"])
    console.print(build_table(f"{figures['method']} at {figures['site']}", ("", "before", "after"), rows))
    console.print(
        f"{figures['training_examples']} training examples, {figures['adaptation_seconds']:.2f} s; "
        f"{figures['sparsity']:.1%} of the weights are zero"
    )
