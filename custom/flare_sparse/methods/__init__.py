"""The methods, one module each, close to its paper; a new one adds its line to ``METHODS``."""

from __future__ import annotations

from typing import Any

from .dispfl import DisPFL
from .fedavg import FedAvg
from .fedavg_ft import FedAvgFT
from .fedavg_one_step import FedAvgOneStep
from .fedsparsify import FedSparsify
from .local_only import LocalOnly
from .metagater import MetaGater
from .metasnip import MetaSNIP
from .method import Method, MethodConfig
from .neurosfl import NeuroSFL
from .per_fedavg import PerFedAvg
from .topk_ef import TopKEF

METHODS: dict[str, type[Method[Any]]] = {
    FedAvg.name: FedAvg,
    FedAvgFT.name: FedAvgFT,
    NeuroSFL.name: NeuroSFL,
    FedSparsify.name: FedSparsify,
    MetaGater.name: MetaGater,
    DisPFL.name: DisPFL,
    TopKEF.name: TopKEF,
    FedAvgOneStep.name: FedAvgOneStep,
    PerFedAvg.name: PerFedAvg,
    MetaSNIP.name: MetaSNIP,
    LocalOnly.name: LocalOnly,
}

__all__ = ["METHODS", "Method", "MethodConfig"]
