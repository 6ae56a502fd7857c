"""Algorithm 2, LocalAggregation, for one agent (alg:localAggregation).

In round n, agent j asks at most M peers for their models and moves towards their consensus point:

    1  A       <- ProbSampling(P, M)                        peers to ask
    2  theta^i <- download, i in A                          models received
    3  L^i     <- L_j(theta^i)                              losses on the agent's validation data
    4  P^i     <- (1 - zeta) P^i + zeta exp(-kappa L^i)     likelihood of asking peer i again
    5  G^i     <- G_j(theta^i), Q_beta                      criterion, low is trusted; members
    6  mu^i    <- exp(-alpha G^i) / sum_k exp(-alpha G^k)   weights over Q_beta, by default all
    7  theta   <- theta - lambda1 gamma (theta - m)         m = sum_i mu^i theta^i

`local_aggregation_` is the algorithm, which a real peer runs, with one function per line. A
simulation runs `batched_aggregation`, with an axis over agents. Both have the same lines 5 and 6;
the other lines have counterparts. A test holds the two equal to the bit.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedcb2o import consensus
from fedcb2o.federated import trial, trigger_exchange
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.contacts import AgentState, ContactTable
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.guards.checks import ADMITTED, counted_losses, tolerated
from fedcb2o.federated.mixing import mix_, mixing_matrix
from fedcb2o.federated.plugin_outputs import validated_selection, validated_state
from fedcb2o.federated.ragged import Entries, Members, Positions, Ragged
from fedcb2o.federated.run_spec import Algorithm, RunSpec
from fedcb2o.federated.selection import BATCHED_SELECTION, extra_inputs
from fedcb2o.federated.types import (
    BATCHED,
    STATEFUL,
    Contacts,
    CriterionInput,
    CriterionValues,
    RuleOutput,
    RuleState,
)
from fedcb2o.federated.validation import ValidationOracle, admit, agent_context, own_models
from fedcb2o.plugins import USER_FUNCTION
from fedcb2o.rng import stream

_ONLY_MEMBER = Members(np.zeros(1, np.int64))  # the index of the only agent in its group,
_ONLY_POSITION = Positions(_ONLY_MEMBER)  # and in its batch
_ZERO = np.zeros((), np.int64)  # the same, without an axis over agents

Download = Callable[[Ragged], Inbox]
"""Peers to ask, the ids A of one agent -> the models that arrived from them."""


def local_aggregation_(
    agent: AgentGroup,
    n: int,
    state: AgentState,
    download: Download,
    on_step: Callable[[str], None] = lambda name: None,
    oracle: ValidationOracle | None = None,
) -> tuple[AgentState, Decisions]:
    """Run LocalAggregation (alg:localAggregation) for one agent; its model changes in place.

    It is line 4 of alg:FedCB2O.

    Args:
        agent: Group of one agent, after LocalUpdate.
        n: Round, counted from 0.
        state: The agent's contacts with their likelihoods P, and the state of its rule.
        download: Line 2, the only communication.
        on_step: Called with "aggregate" after line 6 and with "mix" after line 7.
        oracle: Answers about models; by default from the agent's validation data.

    Returns:
        The agent's state after the round, and its decisions for the record.
    """
    algorithm = agent.spec.algorithm
    P = state.contacts[0]
    rule_state = state.rule_states[0]

    # Line 1: A <- ProbSampling(P, M)
    A = sample_peers(agent, P, n)
    # Line 2: download theta^i, i in A
    inbox = download(A)
    rule_state = trigger_exchange.with_received(rule_state, inbox.triggers)
    # Guards: the trial, after which an agent may stay alone
    rule_state = trial.advance(agent, 0, n, rule_state)
    if trial.has_left(rule_state):
        decisions = Decisions.empty(agent.agents, A, inbox)
        rule_state = trial.stay_alone_(decisions, 0, int(agent.layout.own[0]), rule_state)
        on_step("aggregate")
        mix_(agent.models, mixing_matrix(decisions, agent.layout.own), 0, agent.spec.dim)
        on_step("mix")
        return AgentState(state.contacts, (rule_state,)), decisions
    # Guards: the models that are evaluated and weighed
    admission = admit(agent, _ONLY_MEMBER, _ONLY_POSITION, inbox, n)
    is_admitted = admission == ADMITTED
    # Line 3: L^i <- L_j(theta^i)
    inputs = validate(agent, P, inbox.filter(is_admitted), n, oracle)
    # Line 4: P^i <- (1 - zeta) P^i + zeta exp(-kappa L^i)
    P = update_likelihoods(agent.spec, P, A, inbox, admission, inputs)
    # Lines 5 and 6: G^i and Q_beta, and mu^i; `CriterionWeighing` has both lines
    mu, rule_state = algorithm.weigh(inputs, rule_state)
    on_step("aggregate")
    # Line 7: theta <- theta - lambda1 gamma (theta - sum_i mu^i theta^i)
    decisions = mix_towards_consensus_(agent, A, inbox, admission, inputs, mu)
    on_step("mix")

    j, own_loss = int(agent.agents[0]), float(decisions.own_loss[0])
    P, rule_state = track_own_likelihood(algorithm, j, P, rule_state, own_loss)

    return AgentState(ContactTable.from_contacts([P]), (rule_state,)), decisions


def sample_peers(agent: AgentGroup, P: Contacts, n: int) -> Ragged:
    """Sample at most M peers A that the agent asks (alg:localAggregation, line 1)."""
    spec, j = agent.spec, int(agent.agents[0])

    candidates = np.arange(spec.num_agents)
    if spec.neighbours is not None:
        candidates = spec.neighbours[j].sort().values.numpy()
    candidates = candidates[candidates != j]
    # In the released code an agent may sample itself.
    if spec.algorithm.own_candidate:
        candidates = np.union1d(candidates, [j])

    generator = stream(spec.seed, "select", n, j)
    return Ragged.from_arrays([select_peers(spec, j, P, candidates, n, generator)])


def select_peers(
    spec: RunSpec,
    j: int,
    P: Contacts,
    candidates: Int[np.ndarray, " c"],
    n: int,
    generator: np.random.Generator,
) -> Int[np.ndarray, " s"]:
    """Call the algorithm's selection for agent j; validate a user's."""
    select = spec.algorithm.select
    values = {"n": n, "me": j}
    extra = [values[name] for name in extra_inputs(select)]
    keywords = spec.algorithm.guards.selection_keywords

    # A copy, because a user's selection may write into its input.
    candidate_ids = torch.from_numpy(candidates.copy())
    ids = select(P, candidate_ids, spec.agents.budget, generator, *extra, **keywords)
    if BATCHED_SELECTION.get(select) is not None:
        return ids.numpy()
    return validated_selection(select, ids, candidates, spec.agents.budget)


def validate(
    agent: AgentGroup, P: Contacts, inbox: Inbox, n: int, oracle: ValidationOracle | None = None
) -> CriterionInput:
    """Compute the validation losses L^i of admitted models (alg:localAggregation, line 3)."""
    received = inbox.received()
    own = own_models(agent, _ONLY_MEMBER, n)[0]
    oracle = oracle or ValidationOracle(agent, 0)

    losses = own_losses = None
    if agent.spec.algorithm.needs_losses:
        # One evaluation for all models; the agent's own is last.
        both = oracle.losses(received.with_own(own))
        losses, own_losses = both.select(slice(None, -1)), both.select(slice(-1, None))

    return CriterionInput(
        n=n,
        models=agent.models,
        losses=losses,
        own_losses=own_losses,
        received=received,
        own_entry=own,
        losses_of=oracle.losses,
        agent_context=agent_context(oracle, n, lambda: P),
        previous=agent.previous_rows(_ZERO),
        tolerated=tolerated(agent.spec.algorithm.guards, losses, own_losses),
        last_layer=agent.spec.last_layer,
    )


def update_likelihoods(
    spec: RunSpec,
    P: Contacts,
    A: Ragged,
    inbox: Inbox,
    admission: Int[np.ndarray, " m"],
    inputs: CriterionInput,
) -> Contacts:
    """Average the likelihoods of the peers whose models were received (line 4).

    A peer that was asked becomes a contact. Its likelihood is NaN until its first answer. Models
    that are not admitted count as `guards.checks.counted_losses` says.
    """
    known = P.ids.numpy()
    received = inbox.ids.values  # of real peers, others may stand in for late ones
    ids = np.union1d(np.union1d(known, A.values), received)
    likelihood = np.full(len(ids), np.nan)
    likelihood[ids.searchsorted(known)] = P.likelihood.numpy()

    if inputs.losses is not None:
        answered = ids.searchsorted(received)
        L = counted_losses(admission, spec.num_classes)
        L[admission == ADMITTED] = inputs.losses.mean.numpy()
        likelihood[answered] = next_likelihood(spec.algorithm, likelihood[answered], L)
    return Contacts(torch.from_numpy(ids), torch.from_numpy(likelihood))


def next_likelihood(
    algorithm: Algorithm, P: Float[np.ndarray, " m"], L: Float[np.ndarray, " m"]
) -> Float[np.ndarray, " m"]:
    """Compute (1 - zeta) P + zeta exp(-kappa L) (eq:update_sampling_likelihood).

    P is NaN before the first answer. A peer without a likelihood starts from 0, or, in the released
    code, has the likelihood exp(-kappa L). An infinite loss adds 0, whatever kappa is.
    """
    finite = np.isfinite(L)  # 0 * inf is not a number
    decay = torch.exp(-algorithm.kappa * torch.from_numpy(np.where(finite, L, 0.0)))
    gain: np.ndarray = decay.numpy() * finite
    is_first = np.isnan(P)
    average: np.ndarray = (1 - algorithm.zeta) * np.where(is_first, 0.0, P) + algorithm.zeta * gain
    return np.where(is_first, gain, average) if algorithm.first_contact == "whole" else average


def track_own_likelihood(
    algorithm: Algorithm, j: int, P: Contacts, state: RuleState, own_loss: float
) -> tuple[Contacts, RuleState]:
    """Update P_n^{j,j} in every round, as the authors' released code does.

    The text updates it in the rounds in which agent j samples itself: contacts and state then stay.
    """
    if algorithm.own_likelihood == "sampled":
        return P, state
    # The state holds it until agent j samples itself, because an agent that was never sampled is no
    # contact.
    before = state.get("own_likelihood", torch.full((1,), torch.nan, dtype=torch.float64))
    after = torch.from_numpy(next_likelihood(algorithm, before.numpy(), np.array([own_loss])))
    likelihood = torch.where(P.ids == j, after, P.likelihood)
    return Contacts(P.ids, likelihood), {**state, "own_likelihood": after}


@dataclass(frozen=True)
class CriterionWeighing:
    """Lines 5 and 6 of FedCB2O and FedCBO: a criterion, and its weights with sharpness `alpha`.

    With `sees_all` its criterion gets the models that `loss_tolerance` does not tolerate, too.
    """

    function: Callable[[CriterionInput], CriterionValues]
    alpha: float
    sees_all: bool = True
    is_stateful: ClassVar[bool] = False

    @property
    def is_batched(self) -> bool:
        """True if the function is declared `batched`."""
        return bool(BATCHED.get(self.function))

    def __call__(self, inputs: CriterionInput, state: RuleState) -> tuple[RuleOutput, RuleState]:
        """Return the weights mu, and the state unchanged."""
        if USER_FUNCTION.get(self.function) is not None:
            inputs = inputs.copy()  # a user's algorithm may write into its input
        # Line 5: G^i <- G_j(theta^i), and Q_beta
        G = self.function(inputs)
        # Line 6: mu^i <- exp(-alpha G^i) / sum_k exp(-alpha G^k)
        return RuleOutput(consensus_weights(G, self.alpha)), state


def consensus_weights(G: CriterionValues, alpha: float) -> Float[Tensor, "*a k"]:
    """Compute the weights of the consensus point m (line 6).

    mu^i = exp(-alpha G^i), normalised (eq:comp_csp, restricted to Q_beta as in eq:clustered_csp).
    The agent's own model is last. G holds the confidence of an agent of few classes.
    """
    return consensus.weights(torch.cat([G.values, G.own], -1), alpha, G.in_sublevel_set)


@dataclass(frozen=True)
class RuleWeighing:
    """The weights of an aggregation rule, in place of lines 5 and 6."""

    function: Callable[..., Any]
    sees_all: bool = False

    @property
    def is_stateful(self) -> bool:
        """True if the rule declares a state."""
        return STATEFUL.get(self.function) is not None

    @property
    def is_batched(self) -> bool:
        """True if the function is declared `batched`, and keeps no state."""
        return not self.is_stateful and bool(BATCHED.get(self.function))

    def __call__(self, inputs: CriterionInput, state: RuleState) -> tuple[RuleOutput, RuleState]:
        """Return the weights of the rule, or its reduction over coordinates; and its state."""
        rule, tolerated = self.function, inputs.tolerated
        inputs = inputs.tolerated_only()
        if USER_FUNCTION.get(rule) is not None:
            inputs = inputs.copy()  # a user's rule may write into its input
        if self.is_stateful:
            state, output = validated_state(rule, rule(state, inputs))
        else:
            output = rule(inputs)
        output = output if isinstance(output, RuleOutput) else RuleOutput(output)
        # The rule saw the tolerated models only; all other models weigh 0.
        if tolerated is not None and isinstance(output.outcome, Tensor):
            weights = output.outcome
            num_own = len(weights) - int(tolerated.sum())
            is_counted = torch.cat([tolerated, tolerated.new_ones(num_own)])
            all_weights = weights.new_zeros(len(is_counted)).masked_scatter_(is_counted, weights)
            output = dataclasses.replace(output, outcome=all_weights)
        return output, state


def mix_towards_consensus_(
    agent: AgentGroup,
    A: Ragged,
    inbox: Inbox,
    admission: Int[np.ndarray, " m"],
    inputs: CriterionInput,
    mu: RuleOutput,
) -> Decisions:
    """Move the agent's model, theta <- theta - lambda1 gamma (theta - m) (eq:local_agg_update)."""
    spec, layout = agent.spec, agent.layout

    decisions = Decisions.empty(agent.agents, A, inbox, admission)
    entries = Entries(np.flatnonzero(admission == ADMITTED))
    decisions.store_(_ONLY_POSITION, entries, inputs, mu, spec)
    mix_(agent.models, mixing_matrix(decisions, layout.own, layout.previous), 0, spec.dim)
    return decisions
