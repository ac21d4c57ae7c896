"""nnU-Net's planners, in a module that the command line imports at once."""

from typing import Literal

Planner = Literal["ExperimentPlanner", "nnUNetPlannerResEncM", "nnUNetPlannerResEncL", "nnUNetPlannerResEncXL"]
