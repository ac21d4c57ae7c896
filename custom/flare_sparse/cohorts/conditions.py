"""Conditions by which a job chooses rows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """A condition on one column: its value is among some texts, or is not.

    Attributes:
        column: name of the column.
        values: texts, such as codes of missing values.
        keeps: whether rows with these values are meant, or all others.
    """

    column: str
    values: frozenset[str]
    keeps: bool = False
