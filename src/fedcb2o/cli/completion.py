"""Shell completion of built-in names and files, without PyTorch."""

from importlib import resources
from pathlib import Path

_TRACKERS = ("tensorboard", "mlflow")


def presets(incomplete: str) -> list[str]:
    """Complete the name of a preset or a TOML file."""
    return _builtin_names("presets", incomplete) + _toml_files(incomplete)


def grids(incomplete: str) -> list[str]:
    """Complete the name of a built-in grid or a TOML file."""
    return _builtin_names("grids", incomplete) + _toml_files(incomplete)


def trackers(incomplete: str) -> list[str]:
    """Complete the name of a tracker."""
    return [name for name in _TRACKERS if name.startswith(incomplete)]


def _builtin_names(folder: str, incomplete: str) -> list[str]:
    # A path, because an import of `fedcb2o.experiments` would import PyTorch.
    files = (resources.files("fedcb2o") / "experiments" / folder).iterdir()
    names = sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))
    return [name for name in names if name.startswith(incomplete)]


def _toml_files(incomplete: str) -> list[str]:
    folder, _, start = incomplete.rpartition("/")
    root = "/" if incomplete.startswith("/") else ""
    path = Path(f"{folder}/" if folder else root or ".")
    if not path.is_dir():
        return []
    names = sorted(file.name for file in path.glob("*.toml"))
    # The shell replaces the whole word, so that names keep the folder that was typed.
    prefix = incomplete.removesuffix(start)
    return [f"{prefix}{name}" for name in names if name.startswith(start)]
