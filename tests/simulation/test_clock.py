"""The clock: times by hand, by plain loops, and of whole runs."""

import json
import math

import numpy as np
import pytest
from matplotlib.figure import Figure
from safetensors.torch import load_file
from tests.tiny import tiny

from fedcb2o import Run
from fedcb2o.errors import ConfigError, FedCB2OError, RunError
from fedcb2o.experiments import load, run
from fedcb2o.federated.decisions import Inbox
from fedcb2o.federated.ragged import Ragged
from fedcb2o.report._figures import curve_panels, learning_curves
from fedcb2o.simulation.clock import Clock
from fedcb2o.simulation.traces import ClockSection, Traces, make_traces, read_traces


def traces_of(count, **columns):
    values = {
        "seconds_per_sample": 1.0,
        "latency": 0.0,
        "upload": 100.0,
        "download": 100.0,
        **columns,
    }
    arrays = {
        name: np.broadcast_to(np.array(values[name], float), count).copy()
        for name in ("seconds_per_sample", "latency", "upload", "download")
    }
    sessions = values.get("sessions")
    if sessions is None:
        return Traces(**arrays, starts_online=np.ones(count, bool))
    changes = Ragged.from_arrays([np.array(own, float) for own in sessions])
    starts = np.zeros(count, bool)
    return Traces(**arrays, starts_online=starts, changes=changes, period=values["period"])


def inbox_of(lists):
    ids = Ragged.from_arrays([np.array(own, int) for own in lists])
    count = len(ids.values)
    return Inbox(ids, ids.values.copy(), np.ones(count), np.zeros(count, int))


def round_of(clock, asked):
    """Let all agents that train ask some peers; return the peers whose models arrive."""
    clock.begin_()
    trains, answers = clock.trains.tolist(), clock.answers.tolist()
    lists = [[i for i in asked[j] if answers[i]] if trains[j] else [] for j in range(len(asked))]
    (inbox,) = clock.deliver_([np.arange(len(asked))], [inbox_of(lists)])
    clock.end_()
    return inbox.ids.tolist()


def test_a_round_by_hand():
    """Agents 0 and 1 train for 2 and 6 seconds; 0 asks 1 and 2, and 1 asks 2."""
    traces = traces_of(
        3,
        seconds_per_sample=[1, 3, 2],
        latency=[0.5, 0.25, 0],
        upload=[10, 40, 50],
        download=[40, 100, 10],
    )
    clock = Clock(ClockSection(), traces, np.full(3, 2.0), 100)
    assert round_of(clock, [[1, 2], [2], []]) == [[1, 2], [2], []]
    # 1 -> 0: from second 6, 0.75 of latency, 100 bytes at min(40 / 1, 40 / 2) = 20 bytes a second.
    # 2 -> 0: from second 4, 0.5, at min(50 / 2, 40 / 2) = 20. 2 -> 1: from 6, 0.25, at 25.
    assert clock.now == max(6 + 0.75 + 5, 4 + 0.5 + 5, 6 + 0.25 + 4)
    assert clock.record == {"bytes": 300, "undelivered": 0, "hours": clock.now / 3600, "trained": 3}


def test_a_deadline_by_hand():
    """Agent 1 needs 7 seconds, and rounds end after 4: it takes part in the second round."""
    traces = traces_of(3, seconds_per_sample=[1, 7, 2])
    clock = Clock(ClockSection(deadline=4), traces, np.ones(3), 100)
    asked = [[1, 2], [0, 2], [0, 1]]
    # 2 -> 0 takes 1 second after second 2, and 0 -> 2 too.
    assert round_of(clock, asked) == [[2], [], [0]]
    assert clock.now == 4
    # Now 0, 1 and 2 are ready at 5, 7 and 6, and two downloads take 2 seconds: those of 1 end at 9.
    assert round_of(clock, asked) == [[2], [], [0]]
    assert clock.now == 8
    assert clock.record["undelivered"] == 4


def test_agents_that_go_offline_by_hand():
    """Agent 1 leaves at second 2.5, and agent 2 comes at second 3; the times repeat after 10."""
    sessions = [[0], [0, 2.5], [3, 10]]
    clock = Clock(ClockSection(), traces_of(3, sessions=sessions, period=10.0), np.ones(3), 100)
    asked = [[1, 2], [0, 2], [0, 1]]
    # 0 and 1 train until 1 and exchange models until 2.
    assert round_of(clock, asked) == [[1], [0], []]
    assert (clock.now, clock.record["trained"]) == (2, 2)
    # 1 leaves before it has trained, and 0 is alone.
    assert round_of(clock, asked) == [[], [], []]
    assert (clock.now, clock.record["trained"]) == (3, 1)
    assert round_of(clock, asked) == [[2], [], [0]]
    online, until = traces_of(3, sessions=sessions, period=10.0).presence(12.0)
    assert online.tolist() == [True, True, False]
    assert until.tolist() == [math.inf, 12.5, 13.0]


def test_asynchronous_rounds_by_hand():
    """Agent 0 trains for 1 second, agent 1 for 3; a download takes 1 second."""
    section = ClockSection(mode="asynchronous", interval=0.5)
    clock = Clock(section, traces_of(2, seconds_per_sample=[1, 3]), np.ones(2), 100)
    done = [[], []]
    for tick in range(20):
        received = round_of(clock, [[1], [0]])
        for j in np.flatnonzero(clock.trains).tolist():
            done[j].append((tick + 1) * 0.5)
            assert received[j] == [1 - j]
    # A round of 0 takes 2 seconds and one of 1 takes 4.
    assert done == [[1, 3, 5, 7, 9], [3, 7]]
    assert clock.now == 10


def plain_round(now, finish, asked, *, traces, duration, size, deadline):
    """Return the models that arrive in a synchronous round, and its end, by plain loops."""
    count = len(finish)
    online, until = traces.presence(now)
    limit = now + deadline
    ready, trains = [0.0] * count, [False] * count
    for j in range(count):
        if online[j] and math.isnan(finish[j]):
            finish[j] = now + duration[j]
        ready[j] = now if math.isnan(finish[j]) else max(finish[j], now)
        trains[j] = bool(online[j]) and ready[j] <= until[j] and ready[j] <= limit
    pairs = [(i, j) for j in range(count) for i in asked[j] if trains[i] and trains[j]]
    end, arrived = now, [[] for _ in range(count)]
    for j in range(count):
        if trains[j]:
            end = max(end, ready[j])
        elif online[j] and ready[j] > limit and until[j] > limit:
            end = limit
    for i, j in pairs:
        sends = sum(a == i for a, _ in pairs)
        loads = sum(b == j for _, b in pairs)
        rate = min(traces.upload[i] / sends, traces.download[j] / loads)
        arrival = max(ready[i], ready[j]) + (traces.latency[i] + traces.latency[j]) + size / rate
        last = min(until[i], until[j], limit)
        if arrival <= last:
            arrived[j].append(i)
        end = max(end, min(arrival, last))
    for j in range(count):
        if trains[j]:
            finish[j] = math.nan
    return arrived, end


@pytest.mark.parametrize("deadline", [None, 6.0])
def test_rounds_equal_plain_loops(deadline):
    count, draw = 12, np.random.default_rng(0)
    section = ClockSection(
        **{"deadline": deadline, "seconds_per_sample": 1.0, "speed_spread": 0.7, "latency": 0.1},
        **{"upload": 200.0, "download": 500.0, "network_spread": 0.5},
        **{"online": 20.0, "offline": 5.0, "period": 60.0},
    )
    traces = make_traces(section, 3, count)
    samples = draw.integers(1, 5, count).astype(float)
    clock = Clock(section, traces, samples, 100)
    finish, now, late = [math.nan] * count, 0.0, 0
    for _ in range(40):
        asked = [
            sorted(draw.choice(np.delete(np.arange(count), j), 4, replace=False))
            for j in range(count)
        ]
        arrived = round_of(clock, asked)
        expected, now = plain_round(
            *(now, finish, asked),
            **{"traces": traces, "duration": traces.seconds_per_sample * samples, "size": 100},
            deadline=deadline or math.inf,
        )
        assert arrived == expected
        assert clock.now == now
        late += clock.record["undelivered"]
    assert late > 0


def test_sessions_are_exponential_and_stationary():
    section = ClockSection(online=3.0, offline=1.0, period=500.0)
    traces = make_traces(section, 0, 2000)
    for time in (0.0, 250.0, 499.0, 750.0):
        online, until = traces.presence(time)
        assert online.mean() == pytest.approx(0.75, abs=0.04)
        assert (until > time).all()
    _, until = traces.presence(100.0)
    online, _ = traces.presence(100.0)
    assert (until[online] - 100).mean() == pytest.approx(3.0, abs=0.25)
    assert (until[~online] - 100).mean() == pytest.approx(1.0, abs=0.15)


CLOCK = {
    **{"seconds_per_sample": 0.01, "speed_spread": 1.0, "network_spread": 1.0, "upload": 1e4},
    **{"online": 5.0, "offline": 2.0, "period": 60.0, "deadline": 2.0},
}
TICKS = {**CLOCK, "mode": "asynchronous", "interval": 0.3}


def first_panel(runs):
    axes = Figure().subplots()
    curve_panels(learning_curves(runs)).draw_functions[0](axes)
    return axes


def files_of(folder):
    seed = folder / "seed-1000"
    tensors = load_file(seed / "checkpoint.safetensors")
    logs = [(seed / f"{name}.jsonl").read_text() for name in ("metrics", "pairs")]
    return logs, {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("clock", [CLOCK, TICKS])
def test_runs_repeat_and_resume_to_the_bit(clock, tmp_path):
    attack = {"name": "alie", "sybils": True}
    experiment = load({**tiny(rounds=6, attack=attack), "clock": clock})
    run(experiment, out=tmp_path / "whole", workers=1)
    run(experiment.model_copy(update={"rounds": 3}), out=tmp_path / "parts", workers=1)
    run(experiment, out=tmp_path / "parts", workers=1, resume=True)
    logs, tensors = files_of(tmp_path / "whole")
    resumed_logs, resumed_tensors = files_of(tmp_path / "parts")
    assert resumed_tensors == tensors
    assert resumed_logs[1] == logs[1]

    lines = [json.loads(line) for line in logs[0].splitlines()]
    hours = [line["hours"] for line in lines]
    assert hours == sorted(hours)
    run_of = Run(tmp_path / "whole")
    assert run_of.records.groupby("round").hours.first().tolist() == hours
    panel = first_panel([run_of])
    assert panel.get_xlabel() == "simulated hours"
    assert panel.lines[0].get_xdata().tolist() == hours


@pytest.mark.slow  # a second process takes seconds to start
def test_bits_do_not_depend_on_processes(tmp_path):
    experiment = load({**tiny(rounds=4), "clock": CLOCK})
    for workers in (1, 2):
        run(experiment, out=tmp_path / str(workers), workers=workers)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2")


def test_changed_traces_refuse_a_resume(tmp_path):
    path = tmp_path / "traces.csv"
    path.write_text("upload\n1e3\n" + 5 * "2e3\n")
    experiment = load({**tiny(rounds=1), "clock": {"traces": str(path)}})
    run(experiment, out=tmp_path / "run", workers=1)
    path.write_text("upload\n" + 6 * "2e3\n")
    longer = experiment.model_copy(update={"rounds": 2})
    with pytest.raises(RunError, match="another configuration"):
        run(longer, out=tmp_path / "run", workers=1, resume=True)


def test_a_clock_without_limits_changes_no_number(tmp_path):
    """Time alone passes where all agents are online and nothing is late."""
    for name, clock in (("off", None), ("on", {"speed_spread": 1.0})):
        changes = {} if clock is None else {"clock": clock}
        run(load({**tiny(agents={"benign": 3}), **changes}), out=tmp_path / name, workers=1)
    (off_logs, off), (on_logs, on) = (files_of(tmp_path / name) for name in ("off", "on"))
    on.pop("clock")
    assert on == off
    assert on_logs[1] == off_logs[1]
    line = json.loads(on_logs[0].splitlines()[0])
    for key in ("hours", "bytes", "undelivered", "trained"):
        line.pop(key)
    assert line == json.loads(off_logs[0].splitlines()[0])


def test_traces_of_a_file(tmp_path):
    path = tmp_path / "traces.csv"
    path.write_text("seconds_per_sample,online,upload\n0.5,0-10 20-30,1e3\n2,,5e3\n")
    section = ClockSection(traces=str(path), latency=0.2)
    traces = make_traces(section, 0, 2)
    assert traces.seconds_per_sample.tolist() == [0.5, 2.0]
    assert traces.upload.tolist() == [1e3, 5e3]
    assert traces.latency.tolist() == [0.2, 0.2]
    assert [traces.presence(t)[0].tolist() for t in (0, 10, 25, 31)] == [
        [True, False],
        [False, False],
        [True, False],
        [True, False],
    ]
    with pytest.raises(ConfigError, match="2 rows for 5 agents"):
        make_traces(section, 0, 5)
    drawn = make_traces(section.model_copy(update={"draw_traces": True}), 0, 50)
    assert set(drawn.seconds_per_sample) == {0.5, 2.0}
    assert (drawn.upload == np.where(drawn.seconds_per_sample == 2, 5e3, 1e3)).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "first line"),
        ("speed\n1\n", "first line"),
        ("upload,upload\n1,2\n", "first line"),
        ("upload\n", "no row"),
        ("upload\n1,2\n", "line 2: 2 cells for 1"),
        ("upload\n1\n0\n", "line 3: `upload` must be a number above 0, got '0'"),
        ("latency\nnan\n", "`latency` must be a number from 0"),
        ("online\n5\n", "START-END"),
        ("online\n5-3\n", "must ascend"),
        ("online\n0-3 3-4\n", "must ascend"),
        ("online\n1-x\n", "`online` must be a number"),
        ('online\n"1-2\n', "cannot be read"),
    ],
)
def test_a_faulty_file_is_named_with_its_place(text, message, tmp_path):
    path = tmp_path / "traces.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_traces(path)


@pytest.mark.parametrize(
    ("clock", "message"),
    [
        ({"mode": "asynchronous"}, "`clock.interval`"),
        ({"interval": 1.0}, "`clock.interval`"),
        ({"online": 1.0}, "go together"),
        ({"online": 1.0, "offline": 1.0}, "needs `clock.period`"),
        ({"period": 1.0}, "goes with"),
        ({"draw_traces": True}, "needs `clock.traces`"),
        ({"deadline": 0.0}, "greater than 0"),
        ({"upload": math.inf}, "finite"),
        ({"deadlin": 1.0}, "Did you mean `clock.deadline`"),
    ],
)
def test_faulty_settings_are_refused(clock, message):
    with pytest.raises(FedCB2OError, match=message):
        load({**tiny(), "clock": clock})


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"in place of `agents.participation`"):
        load({**tiny(agents={"participation": 0.5}), "clock": {}})
    with pytest.raises(ConfigError, match="ask peers"):
        load({**tiny(algorithm={"name": "ifca", "models": 2}), "clock": {}})
