"""What a shell offers where the Tab key is pressed: names that are built in, and files, without PyTorch."""

from importlib import resources
from pathlib import Path

_TRACKERS = ("tensorboard", "mlflow")


def presets(incomplete: str) -> list[str]:
    """The presets and TOML files that a word may become."""
    return _builtin_names("presets", incomplete) + _toml_files(incomplete)


def grids(incomplete: str) -> list[str]:
    """The built-in grids and TOML files that a word may become."""
    return _builtin_names("grids", incomplete) + _toml_files(incomplete)


def trackers(incomplete: str) -> list[str]:
    """The trackers that a word may become."""
    return [name for name in _TRACKERS if name.startswith(incomplete)]


def _builtin_names(folder: str, incomplete: str) -> list[str]:
    found = (
        resources.files("fedcb2o") / "experiments" / folder
    )  # `fedcb2o.experiments` would import PyTorch
    names = sorted(
        path.name.removesuffix(".toml") for path in found.iterdir() if path.name.endswith(".toml")
    )
    return [name for name in names if name.startswith(incomplete)]


def _toml_files(incomplete: str) -> list[str]:
    folder, _, start = incomplete.rpartition("/")
    where = Path(f"{folder}/" if folder or incomplete.startswith("/") else ".")
    names = sorted(path.name for path in where.glob("*.toml")) if where.is_dir() else []
    return [f"{incomplete.removesuffix(start)}{name}" for name in names if name.startswith(start)]
