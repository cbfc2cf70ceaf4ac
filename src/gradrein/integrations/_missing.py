from ..errors import MissingDependencyError


def missing(package: str, integration: str) -> MissingDependencyError:
    """Return the error for a missing package, with the line that installs it."""
    return MissingDependencyError(
        f"gradrein.integrations.{integration} needs the package {package}, which is not installed: "
        f"pip install {package}."
    )
