"""Share of nines that each benign agent classifies as nines, over the rounds."""

from matplotlib.figure import Figure

import fedcb2o

figure = Figure(figsize=(9, 3.4), layout="constrained")
for ax, name in zip(
    figure.subplots(1, 2, sharey=True), ("digits-fedcbo", "digits-fedassay"), strict=True
):
    run = fedcb2o.run(name, out=f"runs/{name}", seeds=[0], resume=True)
    for (_, sees), lines in run.records.query("not malicious").groupby(
        ["agent", "source_in_validation"]
    ):
        colour = "#0072B2" if sees else "0.6"  # grey: it has no nine to judge by
        ax.plot(lines["round"], lines.source_accuracy, color=colour, alpha=0.7)
    ax.set(title=run.title, xlabel="round", ylim=(-0.02, 1.02))
figure.axes[0].set_ylabel("nines taken for nines")
figure.savefig("agents.png")
