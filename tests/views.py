"""What a criterion or a rule looks at, made by hand."""

import torch

from fedcb2o.federated.types import Contacts, Judged, Local, Losses, Received
from fedcb2o.streams import stream


def received(ids: torch.Tensor, num_samples: torch.Tensor | None = None) -> Received:
    """Models that lie in the rows of their senders."""
    counts = torch.ones(ids.shape, dtype=torch.float64) if num_samples is None else num_samples
    return Received(ids, ids, counts, torch.zeros_like(ids))


def local(**known) -> Local:
    """What an agent knows that met nobody."""
    nobody = Contacts(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64))
    given = {"losses_of": lambda models, change: None, "contacts": nobody, "draw": stream(0, "judged")}
    return Local(**{**given, **known})


def judged(by_class, own_by_class, present=None, n=0) -> Judged:
    """A round's view with given class losses; the mean loss is their mean over the classes that are present."""
    by_class = torch.tensor(by_class, dtype=torch.float64).reshape(-1, len(own_by_class))
    own = torch.tensor([own_by_class], dtype=torch.float64)
    present = torch.tensor(present or [True] * len(own_by_class))
    m = len(by_class)
    return Judged(
        n,
        torch.zeros(m + 1, 2),
        Losses(by_class[:, present].mean(1), by_class, present, torch.zeros(m, dtype=torch.float64)),
        Losses(own[:, present].mean(1), own, present, torch.zeros(1, dtype=torch.float64)),
        received(torch.arange(m)),
        received(torch.tensor([m])),
        local(),
    )
