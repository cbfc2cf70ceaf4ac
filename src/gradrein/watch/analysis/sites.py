"""The places in the script that a record has, and what the script calls its optimizers and model."""

from typing import Any

from ..run.run import Run

Site = dict[str, Any]


def sites_of(run: Run, kind: str) -> list[Site]:
    """Return all places of a kind, in the order of the record: "backward", "step", or "made" of optimizers."""
    return [n for n in run.notes if n.get("site") == kind]


def site_of(run: Run, kind: str) -> Site | None:
    """Return where the script calls `backward`, or `step` of this optimizer, or makes it; None where not known."""
    return next((n for n in sites_of(run, kind) if n.get("opt", run.opt) == run.opt), None)


def library_of(site: Site | None) -> str:
    """Return the package that a place is in; nothing where that is the script."""
    return str(site.get("library", "")) if site is not None else ""


def names_at(site: Site | None) -> dict[str, str]:
    """Return what the script calls the `optimizer` and the `model` there, as far as that is known."""
    names = site.get("names") if site is not None else None
    return {k: v for k, v in names.items() if isinstance(v, str)} if isinstance(names, dict) else {}


def optimizer_names(run: Run) -> list[str]:
    """Return what the script calls each of its optimizers; nothing where a name is not known, or is that of two."""
    steps = sites_of(run, "step")
    names = [names_at(site).get("optimizer", "") for site in steps if not library_of(site)]
    return names if len({*names} - {""}) == run.n_optimizers == len(steps) else []


def label_of(run: Run) -> str:
    """Return what to call an optimizer in a run with several: by the script's own name where it has one."""
    name = names_at(site_of(run, "step"))["optimizer"] if optimizer_names(run) else f"optimizer {run.opt}"
    return f"{name} ({run.optimizer})"


def capitalised(text: str, label: str | None = None) -> str:
    """Return a text as a sentence begins; one that begins with a name of the script stays as it is."""
    return text if label is not None and not label.startswith("optimizer ") else text[:1].upper() + text[1:]
