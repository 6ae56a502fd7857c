"""Texts as samples: missing, cut and damaged ones are said."""

import json

import pandas as pd
import pytest

from fedcb2o.data import text, tokenise
from fedcb2o.errors import DataError

ROWS = [{"prompt": f"{n} + 1 =", "answer": f"{n + 1}", "group": "ab"[n % 2]} for n in range(16)]


@pytest.mark.parametrize("missing", [float("nan"), None, pd.NA, pd.NaT])
def test_rows_with_missing_answers_are_refused(missing):
    rows = [*ROWS[:3], {**ROWS[3], "answer": missing}, *ROWS[4:]]
    for source in (rows, pd.DataFrame(rows)):
        with pytest.raises(DataError, match="row 3: `answer` is missing: fill it in"):
            tokenise(source, base="tiny", prompt=8, answer=4)


@pytest.mark.parametrize("make", [pd.DataFrame, lambda rows: pd.DataFrame(rows).to_dict("list")])
def test_tables_of_texts_are_rows(make):
    data = tokenise(make(ROWS), base="tiny", prompt=8, answer=4)
    assert data.pool.x.equal(tokenise(ROWS, base="tiny", prompt=8, answer=4).pool.x)
    assert data.pool.x[0].tolist() == [-1, -1, *b"0 + 1 =", *b"1", 0, -1, -1][1:]


def test_answers_that_are_cut_and_texts_without_a_sample_give_a_warning():
    with pytest.warns(UserWarning, match="7 of 16 answers are longer than `answer` = 1 tokens: t"):
        data = tokenise(ROWS, base="tiny", prompt=8, answer=1)
    assert data.pool.x.shape[1] == 9
    with pytest.warns(UserWarning, match="6 of 16 prompts are longer than `prompt` = 7 tokens: t"):
        tokenise(ROWS, base="tiny", prompt=7, answer=4)
    texts = [
        {"text": "abcdefgh", "group": "a"},
        {"text": "ij", "group": "b"},
        {"text": "klmnopqr", "group": "b"},
    ]
    with pytest.warns(UserWarning, match="1 of 3 texts are shorter than `answer` = 4 tokens: t"):
        assert len(tokenise(texts, base="tiny", prompt=4, answer=4, test_share=0.5).pool) == 2


@pytest.mark.parametrize(
    ("row", "message"), [(None, "got a NoneType"), ({"prompt": "a"}, r"got \['prompt'\]")]
)
def test_rows_without_columns_are_refused(row, message):
    with pytest.raises(DataError, match=f"row 0: it needs .*{message}"):
        tokenise([row], base="tiny")


def test_lines_end_at_line_breaks_alone(tmp_path):
    rows = [{**row, "answer": "a\u2028b"} for row in ROWS]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "talk.jsonl").write_text("\ufeff" + lines, encoding="utf-8")
    data = text(path="talk.jsonl", base="tiny", prompt=8, answer=8, data_dir=tmp_path)
    assert bytes(data.pool.x[0, 8:13].tolist()).decode() == "a\u2028b"
