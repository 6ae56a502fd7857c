"""Variants of an algorithm: the paper's text and the authors' released code."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from fedcb2o.errors import require
from fedcb2o.federated.run_spec import Algorithm
from fedcb2o.plugins import VARIANTS


def with_variants(
    **variants: Mapping[str, Any],
) -> Callable[[Callable[..., Algorithm]], Callable[..., Algorithm]]:
    """Return a decorator that gives each value of the parameter `variant` its defaults."""

    def decorate(function: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
        @functools.wraps(function)
        def make(*, variant: str = "text", **parameters: Any) -> Algorithm:
            require("variant", variant, variant in variants, " or ".join(variants))
            return function(variant=variant, **{**variants[variant], **parameters})

        return VARIANTS(variants)(make)

    return decorate
