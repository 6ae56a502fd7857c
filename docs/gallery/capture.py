"""Capture of the consensus point as the attackers' share reaches beta, and the cure."""

import warnings

import torch
from matplotlib.figure import Figure

import fedcb2o
from fedcb2o.particles import adversaries, objectives

warnings.simplefilter("ignore", fedcb2o.CaptureWarning)  # expected here
circle, shares = objectives.problem("circle"), (0, 6, 12, 16, 18, 20, 24, 40)
figure = Figure(figsize=(6.4, 4), layout="constrained")
ax = figure.subplots()
for delta_q, style in ((0.0, "o-"), (0.01, "s--")):
    errors = []
    for bad in shares:
        group = [adversaries.static(bad, at=circle.bad)] if bad else []
        settings = {"num_particles": 200 - bad, "adversaries": group}
        settings["dynamics"] = fedcb2o.Paper(delta_q=delta_q)
        problem = (circle.lower, circle.upper, circle.dim)
        result = fedcb2o.minimize(*problem, maxiter=300, runs=3, **settings)
        errors.append((result.x - torch.tensor(circle.target)).norm(dim=-1).median())
    ax.plot([bad / 200 for bad in shares], errors, style, label=f"delta_q = {delta_q:g}")
ax.set(xlabel="share of attackers (beta = 0.1)", ylabel="distance of the answer from the target")
ax.legend()
figure.savefig("capture.png")
