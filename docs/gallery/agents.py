"""Every benign agent by itself: its accuracy, over the samples of the attacked class that it can judge by."""

from matplotlib.figure import Figure

import fedcb2o

figure = Figure(figsize=(6.4, 4), layout="constrained")
ax = figure.subplots()
for name, colour in (("digits-fedcbo", "#D55E00"), ("digits-fedcb2o", "#0072B2")):
    run = fedcb2o.run(name, out=f"runs/{name}", seeds=[0], resume=True)
    last = run.records.query(f"round == {run.config['rounds']} and not malicious")
    ax.plot(last.source_in_validation, last.source_accuracy, "o", color=colour, alpha=0.6, label=run.title)
ax.set(xlabel="nines in the agent's validation data", ylabel="nines taken for nines", ylim=(0, 1.02))
ax.legend()
figure.savefig("agents.png")
