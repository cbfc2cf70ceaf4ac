"""The reader of torch's recorded graph, on which everything else stands.

Every forward pass leaves a complete record of itself: the nodes that autograd will run backwards. These
functions read it and change nothing. They never run a node, a hook, or a second forward pass, unless a
docstring says so.
"""

from ._live import live_models, live_tensors
from ._modules import ModuleRecord, Place, places, record_modules
from ._names import Names, find_names, variable_name
from ._read import Consumer, Described, Graph, describe, edge_of, reachable, read
from ._saved import Saved, State, saved
from ._torch import (
    base_of,
    current_sequence_nr,
    is_custom,
    is_leaf,
    is_relayout,
    leaf_tensor,
    memory_of,
    op,
    sequence_nr,
)
from ._uses import Use, uses

__all__ = [
    "Consumer",
    "Described",
    "Graph",
    "ModuleRecord",
    "Names",
    "Place",
    "Saved",
    "State",
    "Use",
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
    "memory_of",
    "op",
    "places",
    "reachable",
    "read",
    "record_modules",
    "saved",
    "sequence_nr",
    "uses",
    "variable_name",
]
