"""Ray's errors as errors of this package."""

import contextlib
from collections.abc import Iterator

import ray

from fedcb2o.errors import RunError
from fedcb2o.simulation.rounds import WorkerLostError

_FULL_ERRORS = (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)


@contextlib.contextmanager
def translate_ray_errors() -> Iterator[None]:
    """Raise Ray's errors as RunError.

    WorkerLostError means that Ray lost a process or node that the work needs. A second attempt
    would repeat any other error: a full store, or an error of the work itself.
    """
    try:
        yield
    except ray.exceptions.RayError as error:
        cause: BaseException = error
        while isinstance(cause, ray.exceptions.RayTaskError):
            cause = cause.cause
        lines = str(cause).strip().splitlines() or [""]
        text = f"{type(cause).__name__}: {lines[0].strip(' .')}"
        if isinstance(cause, _FULL_ERRORS):
            raise RunError(
                f"Ray's store or disk is full on a node ({text}): take more nodes, fewer agents or "
                "a smaller model, or start nodes by `ray start --object-store-memory BYTES ...`"
            ) from error
        # Ray wraps an error that cannot be sent in the base class of its own errors.
        is_ray_error = isinstance(cause, ray.exceptions.RayError)
        if cause is not error and (not is_ray_error or type(cause) is ray.exceptions.RayError):
            raise RunError(f"work on the cluster failed ({text})") from error
        raise WorkerLostError(f"a part of the cluster is lost ({text})") from error
