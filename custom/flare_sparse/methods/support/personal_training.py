"""The divergence of a site's own training after the last round, told apart from that of the received model."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ...core.errors import FlareSparseError, MetricsError
from ...training.loop import TrainingDiverged


class PersonalTrainingDiverged(FlareSparseError):
    """A site's own training after the last round diverged from a received model that it could compute with."""

    code = "E_PERSONAL"


@contextmanager
def attribute_divergence(training: str, settings: str) -> Iterator[None]:
    """Attribute a divergence inside the block to this training; one in its first step is due to the received model.

    The server discards the commit of a model that most sites cannot compute with (docs/reliability.md); it must not do
    so because of settings of the training that follows.

    Args:
        training: its name, such as ``"fine-tuning"``.
        settings: the settings to lower.

    Raises:
        PersonalTrainingDiverged: a later step or the resulting model diverged.
        TrainingDiverged: the first step did.
    """
    try:
        yield
    except TrainingDiverged as error:
        if error.is_first_step:
            raise
        raise PersonalTrainingDiverged(_explain(training, error, settings)) from error
    except MetricsError as error:
        raise PersonalTrainingDiverged(_explain(training, error, settings)) from error


def check_finite(weights: Tensor) -> Tensor:
    """Return the weights ``(P,)`` of a finished training.

    Raises:
        TrainingDiverged: one is NaN or infinite; the last step has no loss that would show it.
    """
    if not bool(weights.isfinite().all()):
        raise TrainingDiverged("the last step ends in weights that are not finite")
    return weights


def _explain(training: str, error: Exception, settings: str) -> str:
    return f"the {training} after the last round diverged; lower {settings}: {error}"
