from ...run.run import Run
from ..finding import Finding
from ..sites import library_of, site_of
from .outliers import loss_correlation

# What a squared error is of: `y - p`, `1 - p`, and the residual of an equation, `u + f` with f on the other side.
_DIFFERENCES = ("Sub", "Rsub", "Add", "Abs")


def loss_power(run: Run) -> Finding | None:
    """Find a loss raised to a power: large errors count out of proportion."""
    site = site_of(run, "backward")
    graph = site.get("loss_graph", {}) if site is not None else {}
    power, base = graph.get("power", 1.0), graph.get("of", "")
    if power <= 1 or (power <= 2 and base in _DIFFERENCES):  # a squared error is what everybody uses
        return None
    weighted = bool(graph.get("weighted"))
    ten = 10 ** (power - 1)
    return Finding(
        name="loss_power",
        title=f"the loss raises its terms to the power {power:g}{' and weights them' if weighted else ''}: a term ten "
        f"times larger pulls {ten:.3g} times harder than with power 1",
        weight=0.91,  # above `outliers`, which follow from it
        criterion="the graph of the loss holds a power above 1 (of a difference or a sum: above 2)",
        evidence={
            "power": power,
            "of": base or "unknown",
            "weighted": "yes" if weighted else "no",
            **(
                {}
                if site is None or library_of(site)
                else {"its backward pass": f"{site['file']}, line {site['line']}"}
            ),
            "correlation of a batch's loss and norm (logarithms)": loss_correlation(run),
        },
        advice="Clip by norm, or let the loss grow more slowly: power 1, a Huber loss, smaller weights. Which samples "
        "pull hardest: `gradrein.per_sample(losses, model).norms()`, given to `monitor.per_sample`.",
        plain=f"the loss is raised to the power {power:g}{' and weighted' if weighted else ''}, so a few hard samples "
        "pull the weights far harder than all others",
    )
