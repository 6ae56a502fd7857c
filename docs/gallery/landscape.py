"""Landscape of L and G with particles under attack, and the decay of V."""

import torch
from matplotlib.figure import Figure

import fedcb2o
from fedcb2o.particles import adversaries, problem, theory

circle, ensembles = problem("circle"), []
attack = adversaries.static(60, at=circle.bad)
dynamics = fedcb2o.Paper(beta=0.05, sigma1=0.5, noise="isotropic", delta_q=0.01)
settings = {"num_particles": 540, "adversaries": attack, "dynamics": dynamics, "maxiter": 600}
settings["callback"] = lambda state: ensembles.append(state.theta.clone())
fedcb2o.minimize(circle.lower, circle.upper, circle.dim, **settings)

figure = Figure(figsize=(9, 4), layout="constrained")
left, right = figure.subplots(1, 2)
line = torch.linspace(-3, 3, 181)
grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1)
left.contourf(line, line, circle.lower(grid).clamp(min=1e-3).log(), 15, cmap="Greys_r", alpha=0.6)
left.contour(line, line, circle.upper(grid), 7, colors="#CC79A7", linewidths=0.8)
for n, alpha in ((0, 0.2), (80, 0.4), (180, 0.6), (600, 1.0)):
    left.plot(*ensembles[n].T, ".", color="#0072B2", markersize=3, alpha=alpha)
left.plot(*circle.bad, "X", color="#D55E00"), left.plot(*circle.target, "*k", markersize=12)
left.set(title="L, G and the particles", xlim=(-3, 3), ylim=(-3, 3), aspect="equal")
V = theory.V(torch.stack(ensembles), torch.tensor(circle.target, dtype=torch.float64))
right.semilogy(0.01 * torch.arange(len(V)), V)
right.set(title="V, half the mean squared distance", xlabel="time t")
figure.savefig("landscape.png")
