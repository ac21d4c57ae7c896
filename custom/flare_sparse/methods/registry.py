"""The methods, one module each, close to its paper; a new method adds its line to ``METHODS``."""

from typing import Any

from .dispfl import DisPFL
from .fedavg import FedAvg, FedAvgFT, LocalOnly
from .fedsparsify import FedSparsify
from .ffa_lora import FFALoRA
from .flexlora import FlexLoRA
from .hetlora import HetLoRA
from .lora_a2 import LoRAA2
from .metagater import MetaGater, MetaSNIP
from .method import Method, MethodConfig
from .neurosfl import NeuroSFL
from .per_fedavg import FedAvgOneStep, PerFedAvg
from .scbf import DSSGD, SCBF, FAwP, SCBFwP
from .topk_ef import TopKEF

METHODS: dict[str, type[Method[Any, Any]]] = {
    FedAvg.name: FedAvg,
    FedAvgFT.name: FedAvgFT,
    NeuroSFL.name: NeuroSFL,
    FedSparsify.name: FedSparsify,
    SCBF.name: SCBF,
    SCBFwP.name: SCBFwP,
    FAwP.name: FAwP,
    DSSGD.name: DSSGD,
    MetaGater.name: MetaGater,
    DisPFL.name: DisPFL,
    LoRAA2.name: LoRAA2,
    FFALoRA.name: FFALoRA,
    FlexLoRA.name: FlexLoRA,
    HetLoRA.name: HetLoRA,
    TopKEF.name: TopKEF,
    FedAvgOneStep.name: FedAvgOneStep,
    PerFedAvg.name: PerFedAvg,
    MetaSNIP.name: MetaSNIP,
    LocalOnly.name: LocalOnly,
}

__all__ = ["METHODS", "Method", "MethodConfig"]
