"""Built-in tasks by name. A user task is a class in the user's own module (docs/own-task.md)."""

from .brain import BrainAge, SexClassification
from .bundles.task import BundleTask
from .images import ImageClassification
from .nnunet.task import Nnunet
from .segmentation import Segmentation
from .table import TableTask
from .task import Task
from .text import TextClassification

__all__ = ["TASKS"]

TASKS: dict[str, type[Task]] = {
    "brain_age": BrainAge,
    "sex_classification": SexClassification,
    "image_classification": ImageClassification,
    "segmentation": Segmentation,
    "bundle": BundleTask,
    "nnunet": Nnunet,
    "table": TableTask,
    "text_classification": TextClassification,
}
