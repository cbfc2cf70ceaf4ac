import math
import re
from statistics import median

from ...run.run import Run
from ..finding import Chart, Finding
from ..statistics import slope

_LAYERS = 4
_FACTOR = 100.0
_CORRELATION = 0.9


def depth(run: Run) -> Finding | None:
    """Find gradients that shrink or grow by orders of magnitude from layer to layer."""
    family, layers = _numbered_layers(run)
    if len(layers) < _LAYERS or len(run.steps) < 10:
        return None
    sizes = []
    for where in layers.values():
        elements = sum(run.sizes[i] for i in where)
        norms = (math.hypot(*(row[i] or 0.0 for i in where)) / math.sqrt(elements) for row in run.norms)
        kept = [n for n in norms if 0 < n < math.inf]
        if not kept:
            return None
        sizes.append(median(kept))
    per_layer, fit = slope([float(i) for i in range(len(sizes))], [math.log(s) for s in sizes])
    factor = math.exp(abs(per_layer) * (len(sizes) - 1))
    if factor < _FACTOR or abs(fit) < _CORRELATION:
        return None
    shrinking = per_layer > 0  # the first layers are the last that the backward pass reaches
    kind = "vanish" if shrinking else "explode"
    return Finding(
        name="depth",
        title=f"gradients {kind} on their way to the first layers: a factor of {factor:.3g} over {len(sizes)} layers",
        weight=min(0.8, 0.3 + 0.1 * math.log10(factor)),
        criterion=f"root mean square of the gradient in the numbered layers `{family}`: a straight line in its "
        f"logarithm (correlation above {_CORRELATION}) that spans more than a factor of {_FACTOR:g}",
        evidence={
            "per layer, towards the input": math.exp(-per_layer),
            "layers": len(sizes),
            "correlation": abs(fit),
            "first layer": sizes[0],
            "last layer": sizes[-1],
        },
        advice="Normalise between layers, add residual connections, or rescale the initial weights so that each layer "
        "keeps the size of what passes through it. Clipping does not help: it scales all layers alike.",
        chart=Chart("root mean square of the gradient, by layer",
                        {"rms": sizes}, [float(i) for i in layers], log=True, x_label="layer"),
    )  # fmt: skip


def _numbered_layers(run: Run) -> tuple[str, dict[int, list[int]]]:
    """Return the longest family of weights whose names differ in one number, such as `blocks.3.`, without biases."""
    families: dict[str, dict[int, list[int]]] = {}
    for i, name in enumerate(run.names):
        found = re.match(r"^(.*?)\b(\d+)\b", name)
        if found and not name.endswith("bias") and run.sizes[i] > 1:
            families.setdefault(f"{found[1]}*", {}).setdefault(int(found[2]), []).append(i)
    family = max(families, key=lambda f: len(families[f]), default="")
    return family, dict(sorted(families.get(family, {}).items()))
