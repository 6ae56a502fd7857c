"""Robust aggregation of models: lists, NumPy arrays, tensors and state dicts.

Each rule is a class, whose objects are called with m models, and a function. The aggregate has the
type of the models. Names and defaults are those of ByzFL where it has the rule. Too few models for
`f` attackers, models that are not finite, and models of different shapes are errors.

Example:
    >>> import numpy as np
    >>> models = np.array([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0], [1.0, 1.0], [90.0, -9.0]])
    >>> MultiKrum(f=1)(models)
    array([1., 1.])
    >>> multi_krum(models, f=1)
    array([1., 1.])
    >>> MultiKrum(f=2)(models)
    Traceback (most recent call last):
    ...
    fedcb2o.errors.ConfigError: `f` = 2 attackers are more than krum admits among 5 models: ...
    >>> TrMean(f=1)(NNM(f=1)(models))
    array([1., 1.])
"""

from fedcb2o.aggregators._base import Aggregator, function_of
from fedcb2o.aggregators._local_rules import (
    FLAME,
    LPETSR,
    UBAR,
    Balance,
    ClippedGossip,
    CSPlus,
    FLTrust,
    LFighter,
    LossClustering,
    NormClipping,
    Sageflow,
    WeightedAverage,
)
from fedcb2o.aggregators._preaggregators import ARC, NNM, Bucketing, Clipping
from fedcb2o.aggregators._rules import (
    CAF,
    MDA,
    SMEA,
    Average,
    Bulyan,
    CenteredClipping,
    DnC,
    GeometricMedian,
    Krum,
    Meamed,
    Median,
    MoNNA,
    MultiKrum,
    TrMean,
)

# Functions have the names of the rules in a configuration.
mean = function_of("mean", Average)
by_num_samples = function_of("by_num_samples", WeightedAverage)
coordinate_median = function_of("coordinate_median", Median)
trimmed_mean = function_of("trimmed_mean", TrMean)
meamed = function_of("meamed", Meamed)
geometric_median = function_of("geometric_median", GeometricMedian)
krum = function_of("krum", Krum)
multi_krum = function_of("multi_krum", MultiKrum)
bulyan = function_of("bulyan", Bulyan)
mda = function_of("mda", MDA)
smea = function_of("smea", SMEA)
dnc = function_of("dnc", DnC)
caf = function_of("caf", CAF)
centred_clipping = function_of("centred_clipping", CenteredClipping)
monna = function_of("monna", MoNNA)
clipped_gossip = function_of("clipped_gossip", ClippedGossip)
cs_plus = function_of("cs_plus", CSPlus)
balance = function_of("balance", Balance)
ubar = function_of("ubar", UBAR)
fltrust = function_of("fltrust", FLTrust)
norm_clipping = function_of("norm_clipping", NormClipping)
flame = function_of("flame", FLAME)
lfighter = function_of("lfighter", LFighter)
loss_clustering = function_of("loss_clustering", LossClustering)
lpe_tsr = function_of("lpe_tsr", LPETSR)
sageflow = function_of("sageflow", Sageflow)
nnm = function_of("nnm", NNM)
bucketing = function_of("bucketing", Bucketing)
clipping = function_of("clipping", Clipping)
arc = function_of("arc", ARC)

__all__ = [
    "ARC",
    "CAF",
    "FLAME",
    "LPETSR",
    "MDA",
    "NNM",
    "SMEA",
    "UBAR",
    "Aggregator",
    "Average",
    "Balance",
    "Bucketing",
    "Bulyan",
    "CSPlus",
    "CenteredClipping",
    "ClippedGossip",
    "Clipping",
    "DnC",
    "FLTrust",
    "GeometricMedian",
    "Krum",
    "LFighter",
    "LossClustering",
    "Meamed",
    "Median",
    "MoNNA",
    "MultiKrum",
    "NormClipping",
    "Sageflow",
    "TrMean",
    "WeightedAverage",
    "arc",
    "balance",
    "bucketing",
    "bulyan",
    "by_num_samples",
    "caf",
    "centred_clipping",
    "clipped_gossip",
    "clipping",
    "coordinate_median",
    "cs_plus",
    "dnc",
    "flame",
    "fltrust",
    "geometric_median",
    "krum",
    "lfighter",
    "loss_clustering",
    "lpe_tsr",
    "mda",
    "meamed",
    "mean",
    "monna",
    "multi_krum",
    "nnm",
    "norm_clipping",
    "sageflow",
    "smea",
    "trimmed_mean",
    "ubar",
]
