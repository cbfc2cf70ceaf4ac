"""Read the graph that autograd recorded, without changing it.

Every forward pass leaves a complete record of itself: the nodes that autograd will run backwards. These
functions never run a node, a hook, or a second forward pass, unless a docstring says so.
"""

from .._torch.nodes import (
    base_of,
    current_sequence_nr,
    edge_of,
    is_custom,
    is_leaf,
    is_relayout,
    leaf_tensor,
    memory_of,
    op,
    sequence_nr,
    walk,
)
from ._graph import Graph, OutputInfo, describe, read
from ._locations import NodeLocation, locate_nodes, record_modules
from ._names import Names, find_names, live_models, live_tensors, variable_name
from ._param_uses import ParameterUse, parameter_uses
from ._saved import SavedValue, saved

__all__ = [
    "Graph",
    "Names",
    "NodeLocation",
    "OutputInfo",
    "ParameterUse",
    "SavedValue",
    "base_of",
    "current_sequence_nr",
    "describe",
    "edge_of",
    "find_names",
    "is_custom",
    "is_leaf",
    "is_relayout",
    "leaf_tensor",
    "live_models",
    "live_tensors",
    "locate_nodes",
    "memory_of",
    "op",
    "parameter_uses",
    "read",
    "record_modules",
    "saved",
    "sequence_nr",
    "variable_name",
    "walk",
]
