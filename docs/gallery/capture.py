"""How attackers on a minimiser of L capture the consensus as their share reaches beta, and the cure."""

import warnings

import torch
from matplotlib.figure import Figure

import fedcb2o
from fedcb2o.particles import adversaries, objectives

warnings.simplefilter("ignore", fedcb2o.CaptureWarning)  # it is what the picture shows
circle, shares = objectives.problem("circle"), (0, 6, 12, 16, 18, 20, 24, 40)
figure = Figure(figsize=(6.4, 4), layout="constrained")
ax = figure.subplots()
for delta_q, look in ((0.0, "o-"), (0.01, "s--")):
    far = []
    for bad in shares:
        group = [adversaries.static(bad, at=circle.bad)] if bad else []
        settings = {
            "num_particles": 200 - bad,
            "adversaries": group,
            "delta_q": delta_q,
            "maxiter": 300,
            "runs": 3,
        }
        found = fedcb2o.minimize(circle.lower, circle.upper, circle.dim, **settings)
        far.append((found.x - torch.tensor(circle.target)).norm(dim=-1).median())
    ax.plot([bad / 200 for bad in shares], far, look, label=f"delta_q = {delta_q:g}")
ax.set(xlabel="share of attackers (beta = 0.1)", ylabel="distance of the answer from the target")
ax.legend()
figure.savefig("capture.png")
