"""Low-rank adapters (LoRA) in a model: factors A [r, n] and B [m, r] of an update B A.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (ICLR 2022). The same product has
many factors: (B R)(R^-1 A) = B A for every invertible R. So the average of factors is not that of
products, and agents may compare and average products in place of factors.

Example:
    >>> pair = FactorPair(a_start=0, b_start=2, rank=1, inputs=2, outputs=1)
    >>> theta = torch.tensor([[3.0, 4.0, 2.0]])
    >>> to_products(theta, (pair,)).tolist()
    [[6.0, 8.0]]
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from fedcb2o.errors import ConfigError
from fedcb2o.nn.parameters import shared_tensors

DOWN = "lora_A"
"""Part of the names of factors A, as PEFT names them."""
UP = "lora_B"
"""Part of the names of factors B."""


@dataclass(frozen=True)
class FactorPair:
    """Place of one adapter's factors A and B in theta.

    A is [rank, inputs] and B [outputs, rank]. `a_start` and `b_start` are the indices of their
    first numbers.
    """

    a_start: int
    b_start: int
    rank: int
    inputs: int
    outputs: int

    def a(self, thetas: Shaped[Tensor, "*k d"]) -> Shaped[Tensor, "*k r n"]:
        """Return the factors A of models, as a view."""
        size = self.rank * self.inputs
        columns = thetas[..., self.a_start : self.a_start + size]
        return columns.view(*thetas.shape[:-1], self.rank, self.inputs)

    def b(self, thetas: Shaped[Tensor, "*k d"]) -> Shaped[Tensor, "*k m r"]:
        """Return the factors B of models, as a view."""
        size = self.outputs * self.rank
        columns = thetas[..., self.b_start : self.b_start + size]
        return columns.view(*thetas.shape[:-1], self.outputs, self.rank)


def factor_pairs(module: nn.Module) -> tuple[FactorPair, ...]:
    """Find the adapters of a network by PEFT's names of parameters.

    An adapter counts if both of its factors are in theta.
    """
    starts = {}
    shapes = {}
    start = 0
    for name, tensor in shared_tensors(module).items():
        starts[name] = start
        shapes[name] = tensor.shape
        start += tensor.numel()

    pairs = []
    for name, (rank, *inputs) in shapes.items():
        other = name.replace(DOWN, UP)
        # Dense layers only: factors of convolutions have more axes.
        if DOWN in name and other in shapes and len(inputs) == 1:
            outputs = shapes[other][0]
            pairs.append(FactorPair(starts[name], starts[other], rank, inputs[0], outputs))
    return tuple(pairs)


def require_pairs(pairs: Sequence[FactorPair], user: str) -> None:
    """Refuse a model without adapters, by ConfigError; `user` is what needs them."""
    if not pairs:
        raise ConfigError(
            f"{user} needs a model with low-rank adapters: trained parameters named `{DOWN}` and "
            f"`{UP}`, as PEFT makes them"
        )


def to_products(thetas: Float[Tensor, "k d"], pairs: Sequence[FactorPair]) -> Float[Tensor, "k p"]:
    """Replace the factors of models by their products B A.

    Numbers that are not of an adapter come first, and then the products. A product takes m n
    numbers in place of r (m + n).
    """
    products = [(pair.b(thetas) @ pair.a(thetas)).flatten(1) for pair in pairs]
    return torch.cat([thetas[:, _outside(thetas.shape[1], pairs)], *products], 1)


def from_products(
    vector: Float[Tensor, " p"], own: Float[Tensor, " d"], pairs: Sequence[FactorPair]
) -> Float[Tensor, " d"]:
    """Return the model of rank r that is nearest to products (Eckart and Young).

    `vector` is a row of `to_products`, and `own` the agent's own model. Of all factors of the
    truncated product, A has orthogonal rows of one norm, that of an agent's own A on average, and
    is turned to be nearest to it. So A and B stay comparable with the agent's own, and directions
    without a singular value can still be trained.
    """
    theta = own.clone()
    is_outside = _outside(len(own), pairs)
    theta[is_outside] = vector[: int(is_outside.sum())]
    start = int(is_outside.sum())
    for pair in pairs:
        size = pair.outputs * pair.inputs
        product = vector[start : start + size].view(pair.outputs, pair.inputs).double()
        start += size
        _store_product(theta, own, pair, *_leading_directions(product, pair.rank))
    return theta


def average_products(
    thetas: Float[Tensor, "k d"],
    weights: Float[Tensor, " k"],
    own: Float[Tensor, " d"],
    pairs: Sequence[FactorPair],
) -> Float[Tensor, " d"]:
    """Return the model of rank r that is nearest to the weighted sum of models' products.

    It is `from_products` of the sum of `to_products`. Models without weight may have any values.
    """
    counts = weights != 0
    thetas = thetas[counts].double()
    weights = weights[counts].double()
    theta = own.clone()
    is_outside = _outside(len(own), pairs)
    theta[is_outside] = (weights @ thetas[:, is_outside]).to(theta)
    # Without products of full size: the sum of k products has at most the rank r k.
    for pair in pairs:
        # sum_i w_i B_i A_i = [w_1 B_1, ..., w_k B_k] [A_1; ...; A_k] = Q_b (R_b R_a^T) Q_a^T.
        b = pair.b(thetas * weights[:, None]).permute(1, 0, 2).flatten(1)
        a = pair.a(thetas).flatten(0, 1)
        q_b, r_b = torch.linalg.qr(b)
        q_a, r_a = torch.linalg.qr(a.T)
        u, s, vt = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
        u, s, vt = q_b @ u[:, : pair.rank], s[: pair.rank], vt[: pair.rank] @ q_a.T
        _store_product(theta, own, pair, u, s, vt)
    return theta


def _store_product(
    theta: Float[Tensor, " d"],
    own: Float[Tensor, " d"],
    pair: FactorPair,
    u: Float[Tensor, "m r"],
    s: Float[Tensor, " r"],
    vt: Float[Tensor, "r n"],
) -> None:
    """Write factors of the product U S V^T into a model, as `from_products` says.

    A is scale R V^T, where the rotation R minimises the distance to the agent's own A.
    """
    reference = pair.a(own).double()
    # An A of zeros sets no scale.
    scale = float(reference.norm()) / len(s) ** 0.5 or 1.0
    left, _, right = torch.linalg.svd(reference @ vt.T, full_matrices=False)
    rotation = left @ right
    pair.a(theta).copy_(scale * rotation @ vt)
    pair.b(theta).copy_((u * s) @ rotation.T / scale)


def _leading_directions(
    product: Float[Tensor, "m n"], rank: int
) -> tuple[Float[Tensor, "m r"], Float[Tensor, " r"], Float[Tensor, "r n"]]:
    """Return leading U, singular values (descending) and V^T of a matrix.

    The matrix is in float64, on the CPU; the rank is at most its smaller side.
    """
    from scipy import linalg

    # The Gram matrix is that of the smaller side.
    if product.shape[0] > product.shape[1]:
        v, s, ut = _leading_directions(product.T, rank)
        return ut.T, s, v.T
    size = len(product)
    largest = (size - rank, size - 1)
    # Some eigenvectors of the smaller Gram matrix take a fifth of the time of all singular vectors.
    # They square the singular values: where the least of those asked for is small, all are
    # computed.
    squares, vectors = linalg.eigh((product @ product.T).numpy(), subset_by_index=largest)
    u = torch.from_numpy(vectors).flip(1)
    s = torch.from_numpy(squares).flip(0).clamp(min=0).sqrt()
    if s[-1] > 1e-4 * s[0]:
        return u, s, (u.T @ product) / s[:, None]
    u, s, vt = torch.linalg.svd(product, full_matrices=False)
    return u[:, :rank], s[:rank], vt[:rank]


def _outside(d: int, pairs: Sequence[FactorPair]) -> Bool[Tensor, " d"]:
    """Return which numbers of a model are not of an adapter."""
    is_outside = torch.ones(d, dtype=torch.bool)
    for pair in pairs:
        pair.a(is_outside).fill_(False)
        pair.b(is_outside).fill_(False)
    return is_outside
