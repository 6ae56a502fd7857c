"""One exception family for what a user can mend: the CLI prints it as one line and exits with 2."""


class FedCB2OError(Exception):
    """Something the user can mend; its text says what was wrong, where, and what to do."""


class ConfigError(FedCB2OError, ValueError):
    """A setting that cannot be: an unknown key, a value out of range, a plug-in that does not fit."""


class DataError(FedCB2OError, ValueError):
    """A data set that is missing, truncated, in another format, or too small for what is asked."""


class RunError(FedCB2OError, RuntimeError):
    """A run that cannot start, go on or be read: another run's folder, a damaged checkpoint, a full disk."""
