"""What a shell offers where the Tab key is pressed: names that are built in, and files, without PyTorch."""

from importlib import resources
from pathlib import Path

TRACKERS = ("tensorboard", "mlflow")


def presets(incomplete: str) -> list[str]:
    """The presets and TOML files that a word may become."""
    return _named("presets", incomplete) + _files(incomplete)


def grids(incomplete: str) -> list[str]:
    """The built-in grids and TOML files that a word may become."""
    return _named("grids", incomplete) + _files(incomplete)


def trackers(incomplete: str) -> list[str]:
    """The trackers that a word may become."""
    return [name for name in TRACKERS if name.startswith(incomplete)]


def _named(folder: str, incomplete: str) -> list[str]:
    found = resources.files("fedcb2o") / "experiments" / folder  # `fedcb2o.experiments` would import PyTorch
    names = sorted(path.name.removesuffix(".toml") for path in found.iterdir() if path.name.endswith(".toml"))
    return [name for name in names if name.startswith(incomplete)]


def _files(incomplete: str) -> list[str]:
    folder, _, start = incomplete.rpartition("/")
    where = Path(f"{folder}/" if folder or incomplete.startswith("/") else ".")
    names = sorted(path.name for path in where.glob("*.toml")) if where.is_dir() else []
    return [f"{incomplete.removesuffix(start)}{name}" for name in names if name.startswith(start)]
