"""One round of decentralised clustered federated learning (paper, Section 3).

Nothing in this package knows files, sockets or processes. `algorithm2` is Algorithm 2 for one
agent; `batched_aggregation` has the same lines for many. The catalogues are `algorithms`,
`criteria`, `aggregation` and `attacks`; `selection`, `losses`, `optimisers`, `topology` and
`evaluation.metrics` are small ones. `guards` has the checks of received models.

Words:

- agent: a participant; peer: another agent, from the view of one.
- malicious agents are attackers. They collude, if the configuration says so. Fellows of an attacker
  are the other attackers of its cluster.
- group: the agents of one process (`AgentGroup`), with a model buffer.
- model buffer: one tensor; a row is a model. `BufferLayout` assigns the rows.
- members: agents as indices into a group; batch: members that one call computes.
- positions: agents as indices into a batch.
- n: the round, from 0.
- contacts: peers that an agent has asked, with their likelihoods P_n^j.
- inbox, outbox: models received and models published in a round.
- criterion: G, one value per received model; rule: weights of models, or a reduction of their
  coordinates.
- decisions: weights and mixing factors of a round, before they are applied.
"""

from fedcb2o.federated.adversary import (
    THREAT,
    Adversary,
    Attack,
    AttackView,
    Threat,
    knows,
)
from fedcb2o.federated.agent_group import (
    AgentData,
    AgentGroup,
    BufferLayout,
)
from fedcb2o.federated.contacts import (
    AgentState,
    CandidatePeers,
    ContactTable,
)
from fedcb2o.federated.decisions import (
    Decisions,
    Inbox,
)
from fedcb2o.federated.evaluation.metrics import (
    AttackGoal,
    EvaluationResult,
    false_positive_share,
)
from fedcb2o.federated.evaluation.models import (
    agent_network,
    confusion_matrices,
    evaluate_models,
    measure_samples,
    predicted_class,
    sample_loss,
)
from fedcb2o.federated.guards.acceptance import (
    MAX_VALUE,
    Message,
    is_acceptable,
    max_abs,
    rejection_reason,
)
from fedcb2o.federated.inference import (
    SAMPLES_PER_PASS,
    batched_forward,
    dense_layers,
    input_gradients,
    logits,
    logits_per_model,
    model_losses,
)
from fedcb2o.federated.local_update import (
    MAX_BATCH_PARAMETERS,
    allow_tf32,
    autocast,
    batched_local_update_,
    local_update_,
    mini_batches,
    plan_training_batches,
    train_,
    training_batches,
)
from fedcb2o.federated.mixing import (
    REDUCTION_TILE_COLUMNS,
    MixingMatrix,
    dense_product,
    mix_,
    mixing_matrix,
)
from fedcb2o.federated.plugin_outputs import (
    STATE_DTYPES,
    apply_sample_transform,
    validated_row_weights,
    validated_state,
    validated_weights,
)
from fedcb2o.federated.publishing import (
    Outbox,
    Peek,
    craft_models_,
    deceptive_outbox,
    make_outbox,
)
from fedcb2o.federated.ragged import (
    Indices,
    Ragged,
)
from fedcb2o.federated.run_spec import (
    Algorithm,
    ClusterModels,
    ConvolutionKernel,
    KernelConfig,
    LinearKernel,
    RunSpec,
    Training,
)
from fedcb2o.federated.sections import (
    AgentsSection,
    Component,
    Precision,
)
from fedcb2o.federated.selection import (
    select_colluding_peers,
)
from fedcb2o.federated.types import (
    AgentContext,
    Contacts,
    CriterionInput,
    Losses,
    Received,
    Reduction,
    RuleOutput,
    RuleState,
    batched,
    stateful,
)
from fedcb2o.federated.validation import (
    ValidationOracle,
)

__all__ = [
    "MAX_BATCH_PARAMETERS",
    "MAX_VALUE",
    "REDUCTION_TILE_COLUMNS",
    "SAMPLES_PER_PASS",
    "STATE_DTYPES",
    "THREAT",
    "Adversary",
    "AgentContext",
    "AgentData",
    "AgentGroup",
    "AgentState",
    "AgentsSection",
    "Algorithm",
    "Attack",
    "AttackGoal",
    "AttackView",
    "BufferLayout",
    "CandidatePeers",
    "ClusterModels",
    "Component",
    "ContactTable",
    "Contacts",
    "ConvolutionKernel",
    "CriterionInput",
    "Decisions",
    "EvaluationResult",
    "Inbox",
    "Indices",
    "KernelConfig",
    "LinearKernel",
    "Losses",
    "Message",
    "MixingMatrix",
    "Outbox",
    "Peek",
    "Precision",
    "Ragged",
    "Received",
    "Reduction",
    "RuleOutput",
    "RuleState",
    "RunSpec",
    "Threat",
    "Training",
    "ValidationOracle",
    "agent_network",
    "allow_tf32",
    "apply_sample_transform",
    "autocast",
    "batched",
    "batched_forward",
    "batched_local_update_",
    "confusion_matrices",
    "craft_models_",
    "deceptive_outbox",
    "dense_layers",
    "dense_product",
    "evaluate_models",
    "false_positive_share",
    "input_gradients",
    "is_acceptable",
    "knows",
    "local_update_",
    "logits",
    "logits_per_model",
    "make_outbox",
    "max_abs",
    "measure_samples",
    "mini_batches",
    "mix_",
    "mixing_matrix",
    "model_losses",
    "plan_training_batches",
    "predicted_class",
    "rejection_reason",
    "sample_loss",
    "select_colluding_peers",
    "stateful",
    "train_",
    "training_batches",
    "validated_row_weights",
    "validated_state",
    "validated_weights",
]
