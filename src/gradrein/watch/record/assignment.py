"""Find the statement of a script that makes an object, from the name it has there."""

import ast
import linecache
from dataclasses import dataclass

_MOST_CHARACTERS = 1_000_000
_MOST_TEXT = 300


@dataclass(frozen=True)
class Assignment:
    """A statement `name = call(...)`: its lines, its indent, and what it says, in one line."""

    line: int
    end: int
    indent: int
    text: str


def find_assignment(file: str, name: str) -> Assignment | None:
    """Return the only statement of a file that binds a name, such as "opt" or "self.opt", if that is by a call."""
    source = "".join(linecache.getlines(file))
    if len(source) > _MOST_CHARACTERS:
        return None
    tree = ast.parse(source)
    nodes = [*ast.walk(tree)]
    bound = [n for n in nodes if isinstance(n, (ast.Name, ast.Attribute)) and isinstance(n.ctx, ast.Store)]
    targets = [n for n in bound if ast.unparse(n) == name]
    made = [n for n in nodes if isinstance(n, ast.Assign) and n.targets == targets and isinstance(n.value, ast.Call)]
    if len(made) != 1:
        return None
    text, before = ast.unparse(made[0]), source.splitlines()[made[0].lineno - 1][: made[0].col_offset]
    if before.strip() or len(text) > _MOST_TEXT:
        return None
    return Assignment(made[0].lineno, made[0].end_lineno or made[0].lineno, made[0].col_offset, text)
