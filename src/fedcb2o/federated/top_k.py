"""Top-k differences in two bits, with error feedback: the encoding `top_k` of models.

An agent publishes sent_n = sent_{n-1} + Q(theta_n - sent_{n-1}), with sent_{-1} = theta_0. Of 4096
consecutive numbers Q keeps the 256 largest ones, each as its sign and one of two magnitudes, as in
SparseLoCo (Sarfi, Therien, Lidin and Belilovsky 2025, arXiv 2508.15706). All that Q leaves out is
in theta_n - sent_n, and is sent later. SparseLoCo keeps 64 numbers, with which attacks gain here,
and lets the residual decay, because its workers add differences to one model. Here receivers judge
and average sent_n itself, and a decay would keep it away from theta_n for good.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK = 4096  # numbers that share two magnitudes
_SHARE = 16  # numbers of which one is kept
INDEX_BITS = 12
CODE_BITS = INDEX_BITS + 2  # of a position in its chunk, a sign and a magnitude
HISTORY = 32  # differences that a sender offers, which take less than a model


def kept_counts(dim: int) -> Int[Tensor, " c"]:
    """Return the number of differences that each chunk keeps."""
    sizes = torch.full((-(-dim // CHUNK),), CHUNK)
    sizes[-1] -= -dim % CHUNK
    return -(-sizes // _SHARE)


def message_bytes(dim: int) -> int:
    """Return the bytes of a round's differences: two magnitudes per chunk, then 14 bits each."""
    counts = kept_counts(dim)
    return 8 * len(counts) + -(-CODE_BITS * int(counts.sum()) // 8)


def download_bytes(dim: int, behind: int) -> int:
    """Return the bytes that a receiver needs whose last model is `behind` rounds older."""
    differences = behind * message_bytes(dim)
    return differences if behind <= HISTORY and differences < 4 * dim else 4 * dim


def top_k(
    difference: Float[Tensor, " d"],
) -> tuple[Int[Tensor, " k"], Int[Tensor, " k"], Float[Tensor, "c 2"]]:
    """Return the ascending positions of the kept numbers, their codes, and magnitudes.

    A code is 2 for a negative number, plus 1 for the larger magnitude. The two magnitudes of a
    chunk are those with the least squared error.
    """
    dim = len(difference)
    counts = kept_counts(dim)
    missing = (0, -dim % CHUNK)
    padded = torch.nn.functional.pad(difference, missing).view(-1, CHUNK)
    width = int(counts.max())
    # What is not there is less than 0, and therefore behind all that a shorter chunk keeps.
    sizes = torch.nn.functional.pad(difference.abs(), missing, value=-1.0).view(-1, CHUNK)
    magnitudes, columns = sizes.topk(width, dim=1)
    if counts[-1] < width:
        magnitudes[-1, counts[-1] :] = 0

    # 1. The split of the descending magnitudes: it maximises the sum of squared means by counts.
    sums = magnitudes.double().cumsum(1)
    ranks = torch.arange(1, width + 1, device=sums.device)
    left = counts.to(sums.device)[:, None] - ranks
    rest = sums[:, -1:] - sums
    gain = sums**2 / ranks + torch.where(left > 0, rest**2 / left.clamp(min=1), 0)
    gain[left < 0] = -1
    split = gain.argmax(1, keepdim=True)
    high = sums.gather(1, split) / (split + 1)
    low = rest.gather(1, split) / left.gather(1, split).clamp(min=1)
    levels = torch.cat([low, high], 1).to(difference)

    # 2. The kept numbers in the order of their positions.
    is_high = (torch.arange(width, device=sums.device) <= split).long()
    codes = 2 * (padded.gather(1, columns) < 0) + is_high
    is_kept = left >= 0
    starts = CHUNK * torch.arange(len(counts), device=sums.device)
    positions = (columns + starts[:, None])[is_kept]
    order = positions.argsort()
    return positions[order], codes[is_kept][order], levels


def add_(
    sent: Float[Tensor, " d"],
    positions: Int[Tensor, " k"],
    codes: Int[Tensor, " k"],
    levels: Float[Tensor, "c 2"],
) -> None:
    """Add the differences of a message to a model."""
    sizes = levels[positions // CHUNK, codes % 2]
    # A difference of 0 changes no bit, of -0.0 neither.
    positions, codes, sizes = (part[sizes != 0] for part in (positions, codes, sizes))
    sent[positions] += torch.where(codes >= 2, -sizes, sizes)


def advance_(sent: Float[Tensor, " d"], theta: Float[Tensor, " d"]) -> None:
    """Move the published model towards the agent's model, by what one message holds."""
    add_(sent, *top_k(theta - sent))
