"""CLAIR: a shared subspace of low-rank updates, and agents outside of it."""

from collections.abc import Sequence
from typing import Annotated

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from fedcb2o.federated.aggregation.robust_rule import as_reduction
from fedcb2o.federated.types import CriterionInput, RuleOutput
from fedcb2o.nn import low_rank

__all__ = ["clair"]

_STEPS = 60
_TOLERANCE = 1e-4


def clair(
    inputs: CriterionInput,
    *,
    rank: Annotated[int, Field(ge=1)] | None = None,
    penalty: Annotated[float, Field(gt=0)] = 1.0,
) -> RuleOutput:
    """Keep the agent's own update in a shared subspace, and average the rest (CLAIR).

    He, Chen and Feng, "Federated LoRA Fine-Tuning for LLMs via Collaborative Alignment" (arXiv
    2605.21217), its idea without a server. Only the abstract and a summary were available: the
    differences of products B A between agents are of low rank plus block-sparse, agents with a
    block are contaminated, and the others average what is outside of the shared subspace.

    Here each agent decomposes the differences D_i = B_i A_i - B A to its own products, side by side
    for each adapter, by min |L|_* + lambda sum_i |S_i|_F, L + S = D (outlier pursuit: Xu, Caramanis
    and Sanghavi, NIPS 2010). The block S_i extends over all adapters. U holds the leading `rank`
    left singular vectors of L. The new product is U U^T B A + (I - U U^T) mean of the agents
    without a block, its own included.

    Args:
        rank: Dimension of the shared subspace; by default the rank r of the adapters.
        penalty: lambda in units of r^(1/2) m^(-1/4) for m models: between the costs of a block in a
            shared subspace and of one outside.

    Returns:
        A reduction, with equal weights of the models without a block.

    Raises:
        ConfigError: The model has no low-rank adapters.
    """
    pairs = inputs.context.factor_pairs
    low_rank.require_pairs(pairs, "the rule `clair`")
    # Without weights the agent keeps its own model.
    if not len(inputs.received.ids):
        return RuleOutput(torch.zeros(0, dtype=torch.float64))

    # 1. The differences of the products, [out, in] for each model and adapter.
    rows = inputs.received.with_own(inputs.own_entry).rows
    vectors = low_rank.to_products(inputs.models[rows.to(inputs.models.device)].cpu(), pairs)
    sizes = [pair.outputs * pair.inputs for pair in pairs]
    num_outside = vectors.shape[1] - sum(sizes)
    columns = torch.split(vectors[:, num_outside:].double(), sizes, 1)
    products = [
        part.view(len(part), pair.outputs, pair.inputs)
        for part, pair in zip(columns, pairs, strict=True)
    ]
    differences = [product[:-1] - product[-1] for product in products]

    # 2. The agents without a block, and the shared subspace of each adapter.
    m, r = len(rows) - 1, max(pair.rank for pair in pairs)
    low, is_contaminated = decompose(differences, penalty * r**0.5 * m**-0.25)
    counts = torch.cat([~is_contaminated, torch.tensor([True])])
    weights = counts.double() / counts.sum()

    # 3. The average outside of the subspace, the agent's own product inside.
    result = weights.to(vectors) @ vectors
    parts = [result[:num_outside]]
    for product, common, pair in zip(products, low, pairs, strict=True):
        basis = _left_vectors(common, rank or pair.rank)
        mean = torch.einsum("k,koi->oi", weights, product)
        parts.append((mean + basis @ (basis.T @ (product[-1] - mean))).flatten().to(vectors))
    theta = low_rank.from_products(torch.cat(parts), inputs.theta.cpu(), pairs)
    return RuleOutput(as_reduction(rows, theta, weights))


def decompose(
    differences: Sequence[Float[Tensor, "m o i"]], penalty: float
) -> tuple[list[Float[Tensor, "m o i"]], Bool[Tensor, " m"]]:
    """Decompose differences into a part of low rank and one of few blocks (outlier pursuit).

    The program is solved by the alternating direction method of multipliers. `penalty` is lambda,
    the weight of the blocks' norms. The second result tells whether each agent has a block.
    """
    m = len(differences[0])
    square = sum(float(d.square().sum()) for d in differences)
    if not square > 0:
        return list(differences), torch.zeros(m, dtype=torch.bool)
    # Scaled to a root mean square norm of 1 per block, so that the step and the tolerance have no
    # unit.
    scale = (m / square) ** 0.5
    data = [d * scale for d in differences]
    blocks = [torch.zeros_like(d) for d in data]
    dual = [torch.zeros_like(d) for d in data]
    step = 1.0
    low = data
    factor = torch.ones(m, dtype=torch.float64)

    for _ in range(_STEPS):
        # The part of low rank: singular values shrink by 1 / step.
        low = [
            _shrink_singular_values(d - s + y / step, 1 / step)
            for d, s, y in zip(data, blocks, dual, strict=True)
        ]
        # The blocks: the norm of each shrinks by penalty / step.
        rest = [d - part + y / step for d, part, y in zip(data, low, dual, strict=True)]
        norms = sum(r.square().sum((1, 2)) for r in rest).sqrt()
        factor = (1 - penalty / (step * norms)).nan_to_num(0.0, 0.0, 0.0).clamp(min=0.0)
        blocks = [factor.view(-1, 1, 1) * r for r in rest]
        # The multipliers of L + S = D.
        gap = [d - part - s for d, part, s in zip(data, low, blocks, strict=True)]
        dual = [y + step * g for y, g in zip(dual, gap, strict=True)]
        if sum(float(g.square().sum()) for g in gap) < _TOLERANCE**2 * m:
            break
    return [part / scale for part in low], factor > 0


def _shrink_singular_values(x: Float[Tensor, "m o i"], amount: float) -> Float[Tensor, "m o i"]:
    """Shrink the singular values of blocks side by side, [o, m i]."""
    # The eigenvectors of X X^T are the left singular vectors of X.
    values, vectors = torch.linalg.eigh(torch.einsum("koi,kpi->op", x, x))
    singular = values.clamp(min=0.0).sqrt()
    kept = ((singular - amount).clamp(min=0.0) / singular.clamp(min=1e-300)).sqrt()
    basis = vectors * kept
    return torch.einsum("op,kpi->koi", basis @ basis.T, x)


def _left_vectors(x: Float[Tensor, "m o i"], rank: int) -> Float[Tensor, "o r"]:
    """Return leading left singular vectors of blocks side by side, where values are not 0."""
    values, vectors = torch.linalg.eigh(torch.einsum("koi,kpi->op", x, x))
    is_kept = values[-rank:] > 1e-12 * values[-1].clamp(min=1e-300)
    leading: Tensor = vectors[:, -rank:][:, is_kept]
    return leading
