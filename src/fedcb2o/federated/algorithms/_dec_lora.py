"""Gossip averages of low-rank adapters: Dec-LoRA and TAD-LoRA."""

import dataclasses

from fedcb2o.errors import require
from fedcb2o.federated.algorithms._by_rule import by_rule
from fedcb2o.federated.run_spec import Algorithm
from fedcb2o.plugins import PluginChoice


def dec_lora(*, selection: PluginChoice = "everyone") -> Algorithm:
    """Average the factors A and B of neighbours with equal weights (Dec-LoRA).

    Ghiasvand, Alizadeh and Pedarsani, "Decentralized Low-Rank Fine-Tuning of Large Language Models"
    (arXiv 2501.15361), after its abstract and introduction. Each agent takes local steps on both
    factors, and then averages each of them. Equal weights are doubly stochastic where all agents
    have equally many neighbours.
    """
    return by_rule(rule="mean", selection=selection)


def tad_lora(*, switching_interval: int = 5, selection: PluginChoice = "everyone") -> Algorithm:
    """Train one factor at a time, and average both in every round (TAD-LoRA).

    Wang, Li, Zhou, Li and Liu, "Stabilizing Decentralized Federated Fine-Tuning via Topology-Aware
    Alternating LoRA" (arXiv 2602.00451), after its abstract and introduction, and those of the same
    authors' ADF-LoRA (arXiv 2511.18291), whose interval is 1. In the paper the interval follows
    from the topology; here it is a parameter.

    Args:
        switching_interval: Rounds in which B alone is trained before A, and A before B; 1 or more.
    """
    require("switching_interval", switching_interval, switching_interval >= 1, "1 or more")
    return dataclasses.replace(
        by_rule(rule="mean", selection=selection), switching_interval=switching_interval
    )
