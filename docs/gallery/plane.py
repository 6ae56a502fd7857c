"""Particles in the plane agree on the point of the unit circle nearest to (2, 0)."""

from matplotlib.figure import Figure

import fedcb2o

seen = {}
fedcb2o.minimize(
    lambda x: (x.square().sum(-1) - 1).square(),
    lambda x: (x[..., 0] - 2).square() + x[..., 1].square(),
    dim=2,
    dynamics="paper",
    callback=lambda state: seen.setdefault(state.n, state.theta.clone()) is None,
)
figure = Figure(figsize=(9, 3.2), layout="constrained")
for ax, n in zip(figure.subplots(1, 3, sharey=True), (0, 60, 240), strict=True):
    ax.plot(*seen[n].T, ".", color="#0072B2", alpha=0.5)
    ax.plot(1, 0, "*", color="#D55E00", markersize=12)
    ax.set(title=f"step {n}", xlim=(-3, 3), ylim=(-3, 3), aspect="equal")
figure.savefig("plane.png")
