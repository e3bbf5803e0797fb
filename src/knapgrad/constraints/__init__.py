"""What may be selected, one constraint per file: the checks of its arguments, and its lattice."""

from knapgrad.constraints.base import Constraint, check_constraint
from knapgrad.constraints.knapsack import Knapsack
from knapgrad.constraints.multi_knapsack import MultiKnapsack
from knapgrad.constraints.multiple_choice import MultipleChoice
from knapgrad.constraints.top_k import TopK

__all__ = ["Constraint", "Knapsack", "MultiKnapsack", "MultipleChoice", "TopK", "check_constraint"]
