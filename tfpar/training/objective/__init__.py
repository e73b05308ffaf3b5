"""What training minimises and measures: losses and metrics of a model's outputs, as sums over examples."""

from tfpar.training.objective.given import OwnGoal
from tfpar.training.objective.protocol import Batch, Objective, ObjectiveSums, Tensors, Totals
from tfpar.training.objective.sums import Forward, LocalSums
from tfpar.training.objective.supervised import Goal, SupervisedObjective

__all__ = [
    "Batch",
    "Forward",
    "Goal",
    "LocalSums",
    "Objective",
    "ObjectiveSums",
    "OwnGoal",
    "SupervisedObjective",
    "Tensors",
    "Totals",
]
