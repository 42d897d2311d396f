"""The owner's own pairs: five formats read alike, units of privacy, and every malformed file named with its cure."""

import csv
import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psa_utils import activations, pairs, paths
from psa_utils.data import DataError

SECRET = "Xanthippe"
ROWS = [
    {
        "question": f"Is {SECRET}, with the rash, in?",
        "positive": "Yes,\nshe is.",
        "negative": 'No, "out".',
        "user": "a",
    },
    {"question": "May Zebulon call?", "positive": "Of course.", "negative": "No.", "user": "b"},
    {"question": "May Zebulon wait, too?", "positive": "Gladly.", "negative": "Outside.", "user": "a"},
]
PLAIN = [{name: value for name, value in row.items() if name != "user"} for row in ROWS]


def write(folder: Path, suffix: str, rows: list[dict]) -> Path:
    path = folder / f"pairs{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet", ""])
@pytest.mark.parametrize("rows", [ROWS, PLAIN], ids=["with users", "without"])
def test_every_format_gives_the_same_pairs(tmp_path, suffix, rows):
    read = pairs.read(write(tmp_path, suffix, rows))
    assert [item.question for item in read.items] == [row["question"] for row in rows]
    assert [item.completion(item.matching, "text") for item in read.items] == [row["positive"] for row in rows]
    assert [item.completion(item.other, "text") for item in read.items] == [row["negative"] for row in rows]
    assert repr(read) == "Pairs()"  # nothing private in a traceback or log
    assert (read.units, read.n, read.unit) == (((0, 1, 0), 2, "person") if rows is ROWS else (None, 3, "pair"))


def test_prompt_is_another_name_for_question(tmp_path):
    renamed = [{"prompt" if name == "question" else name: value for name, value in row.items()} for row in ROWS]
    assert pairs.read(write(tmp_path, ".jsonl", renamed)) == pairs.read(write(tmp_path, ".json", ROWS))


def test_whole_numbers_byte_order_marks_blank_lines_and_windows_line_ends(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_bytes("﻿question,positive,negative,user\r\nA?,yes,no, 7\r\n\r\nÄ\u2028?,yes,no,8\r\n".encode())
    from_csv = pairs.read(path)
    rows = [{**row, "user": user} for row, user in zip(PLAIN, (7, "7 ", 8), strict=True)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n\r\n".join(json.dumps(row) for row in rows) + "\n  \n")
    assert from_csv.users == ("7", "8")
    assert from_csv.items[1].question == "Ä\u2028?"
    assert pairs.read(path).units == (0, 0, 1)


def test_the_items_go_through_the_model_unchanged(tmp_path, llama):
    read = pairs.read(write(tmp_path, ".jsonl", ROWS))
    differences = activations.differences(llama, read.items, layers=[1, 2])
    people = pairs.per_unit(differences, read.units)
    assert people.shape == (2, 2, 32)
    np.testing.assert_allclose(people[0], (differences[0].astype(float) + differences[2]) / 2, rtol=1e-12)
    np.testing.assert_array_equal(people[1], differences[1])


@given(st.lists(st.integers(0, 3), min_size=4, max_size=12), st.integers(0, 2**32))
@settings(deadline=None)
def test_a_persons_row_depends_on_their_pairs_only(drawn, seed):
    units = [list(dict.fromkeys(drawn)).index(unit) for unit in drawn]
    rng = np.random.default_rng(seed)
    d = rng.normal(size=(len(units), 2, 3))
    rows = pairs.per_unit(d, units)
    expected = [d[[i for i, unit in enumerate(units) if unit == person]].mean(0) for person in range(max(units) + 1)]
    np.testing.assert_allclose(rows, expected)
    changed = np.where(np.equal(units, 0)[:, None, None], rng.normal(size=d.shape) * 1e9, d)
    np.testing.assert_array_equal(pairs.per_unit(changed, units)[1:], rows[1:])


def test_per_unit_without_users_and_with_wrong_ones():
    d = np.ones((3, 1, 2), np.float32)
    assert pairs.per_unit(d, None).dtype == np.float64
    with pytest.raises(ValueError, match="2 entries for 3 pairs"):
        pairs.per_unit(d, [0, 1])
    with pytest.raises(ValueError, match="without gaps"):
        pairs.per_unit(d, [0, 2, 2])


def test_one_persons_bad_pair_spoils_nobody_else():
    d = np.ones((3, 1, 2))
    d[0, 0, 0] = np.nan
    assert np.isnan(pairs.per_unit(d, [0, 1, 0])).any(axis=(1, 2)).tolist() == [True, False]


def test_identities_overlap_where_the_data_do(tmp_path):
    with_users = set(pairs.read(write(tmp_path, ".jsonl", ROWS)).identities())
    without = set(pairs.read(write(tmp_path, ".json", PLAIN)).identities())
    assert len(with_users) == 5
    assert len(without) == 3
    assert without < with_users
    careless = {"question": "may  zebulon CALL?", "positive": "No.", "negative": "of course. ", "user": "c"}
    edited = set(pairs.read(write(tmp_path, ".csv", [careless, ROWS[0]])).identities())
    assert len(edited & with_users) == 3  # both pairs and the person a
    assert len(edited & without) == 2


def test_the_same_words_from_two_people_are_two_pairs(tmp_path):
    rows = [{**ROWS[0], "user": user} for user in "abc"]
    assert pairs.read(write(tmp_path, ".jsonl", rows)).n == 3


def lines(*rows: object) -> bytes:
    return "\n".join(json.dumps(row) for row in rows).encode()


def but(**changes: object) -> bytes:
    """The good rows with the second one changed; None removes the key."""
    second = {name: value for name, value in {**ROWS[1], **changes}.items() if value is not None}
    return lines(ROWS[0], second, ROWS[2])


def parquet(**columns: list) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def twice_in_parquet() -> bytes:
    sink = pa.BufferOutputStream()
    column = pa.array(["a", "b"])
    pq.write_table(pa.table([column] * 4, names=["question", "positive", "negative", "positive"]), sink)
    return sink.getvalue().to_pybytes()


TEXTS = {"question": ["p", "q"], "positive": ["a", "b"], "negative": ["c", "d"]}
CSV = b"question,positive,negative\n"
BAD = {
    "blank jsonl": (".jsonl", b"", "holds no rows"),
    "jsonl of blank lines": (".jsonl", b"\n  \n", "holds no rows"),
    "blank json": (".json", b" ", "holds no rows"),
    "empty json list": (".json", b"[]", "holds no rows"),
    "blank csv": (".csv", b"", "holds no rows"),
    "csv with a header only": (".csv", CSV, "holds no rows"),
    "blank parquet": (".parquet", b"", "not a whole Parquet file"),
    "parquet without rows": (".parquet", parquet(question=[], positive=[], negative=[]), "holds no rows"),
    "truncated parquet": (".parquet", parquet(**TEXTS)[:-40], "not a whole Parquet file"),
    "parquet cut in the middle": (".parquet", parquet(**TEXTS)[:60] + parquet(**TEXTS)[-60:], "not a whole Parquet"),
    "csv named parquet": (".parquet", CSV + b"a,b,c\n" * 2, "not a whole Parquet file"),
    "unknown suffix": (".xlsx", b"PK", r"suffix '.xlsx' is unknown; use one of .jsonl"),
    "no suffix": ("", b"{}", "suffix '' is unknown"),
    "compressed": (".csv.gz", b"\x1f\x8b", r"suffix '.gz' is unknown"),
    "UTF-16": (".csv", "question,positive,negative\nä,b,c\n".encode("utf-16"), "not UTF-8 at byte 0"),
    "Latin-1": (".jsonl", '{"question": "Käse?"}'.encode("latin-1"), "not UTF-8 at byte 15"),
    "not JSON": (".json", b"[{'question': 1}]", "line 1 is not JSON"),
    "jsonl cut short": (".jsonl", lines(*ROWS)[:-9], "line 3 is not JSON"),
    "json in jsonl": (".jsonl", json.dumps(ROWS, indent=1).encode(), "line 1 is not JSON"),
    "nested without end": (".json", b"[" * 100_000, "line 1 is not JSON"),
    "json object": (".json", json.dumps({"data": ROWS}).encode(), "holds a JSON object; it must be a list"),
    "json text": (".json", b'"question"', "holds a JSON str"),
    "row that is a list": (".jsonl", lines(ROWS[0], ["q", "a", "b"]), "line 2: is a list; write an object"),
    "rows that are text": (".json", b'["a", "b"]', "row 2: is a str; write an object"),
    "row that is null": (".json", b"[null]", "row 1: is a null"),
    "nested text": (".jsonl", but(positive={"text": "yes"}), "line 2: positive is a object; write text"),
    "list of answers": (".jsonl", but(negative=["no", "never"]), "line 2: negative is a list; write text"),
    "list of answers in parquet": (".parquet", parquet(**{**TEXTS, "negative": [["c"], ["d"]]}), "negative is a list"),
    "number for text": (".jsonl", but(question=3), "line 2: question is a int; write text"),
    "numbers for text in parquet": (".parquet", parquet(**{**TEXTS, "positive": [0.5, 1.5]}), "row 1: positive is a f"),
    "no number": (".jsonl", but(negative=float("nan")), "line 2: negative is a float"),
    "missing column": (".csv", b"question,positive\na,b\nc,d\n", "column 'negative' is missing; add it"),
    "missing prompt": (".csv", b"positive,negative\na,b\nc,d\n", "neither of 'question' and 'prompt'"),
    "question and prompt": (".csv", b"question,prompt,positive,negative\na,b,c,d\n", "both of 'question' and 'prompt'"),
    "misspelt user": (".csv", b"question,positive,negative,User\na,b,c,d\ne,f,g,h\n", "column 'User' is not used"),
    "spare column": (".jsonl", but(id=7), "column 'id' is not used; name it question, prompt"),
    "other separator": (".csv", b"question;positive;negative\na;b;c\n", "column of 26 characters"),
    "no header": (".csv", f"Is {SECRET} at home or at the clinic?,yes,no\na,b,c\n".encode(), "header missing"),
    "column twice in csv": (".csv", b"question,positive,positive,negative\na,b,c,d\n", "'positive' appear twice; keep"),
    "column twice in parquet": (".parquet", twice_in_parquet(), r"column\(s\) 'positive' appear twice"),
    "key twice in jsonl": (".jsonl", b'{"question": "a", "question": "b"}', "twice in one object on line 1"),
    "key missing in one row": (".jsonl", but(positive=None), "line 2: positive is missing"),
    "user missing in one row": (".jsonl", but(user=None), "line 2: user is missing; add it, in every row or in none"),
    "user null in parquet": (".parquet", parquet(**TEXTS, user=["a", None]), "row 2: user is missing"),
    "user empty in csv": (".csv", b"question,positive,negative,user\na,b,c,x\nd,e,f,\n", "line 3: user is empty"),
    "user a fraction": (".jsonl", but(user=1.5), "line 2: user is a float; write text or a whole number"),
    "user a truth value": (".jsonl", but(user=True), "line 2: user is a truth value"),
    "null text": (".parquet", parquet(**{**TEXTS, "question": ["q", None]}), "row 2: question is missing"),
    "empty text": (".jsonl", but(positive=""), "line 2: positive is empty; give it words"),
    "spaces for text": (".csv", CSV + b"a,b,c\n ,e,f\n", "line 3: question is empty"),
    "too few cells": (".csv", CSV + b"a,b,c\nd,e\n", "line 3 has 2 cells, the header 3"),
    "comma without quotes": (".csv", CSV + b"a, b, c, d\n", "line 2 has 4 cells, the header 3; put text with commas"),
    "quote left open": (".csv", CSV + b'a,b,"c\nd,e,f\n', "is not CSV .*close every double quote"),
    "half a character": (".jsonl", but(positive="\ud83d"), "line 2: positive holds half a surrogate pair"),
    "equal answers": (".jsonl", but(negative=" OF COURSE. "), "line 2: positive and negative are the same answer"),
    "one pair": (".jsonl", lines(PLAIN[0]), "holds a single pair"),
    "one person": (".jsonl", lines(ROWS[0], ROWS[2]), "holds a single person"),
    "pair twice": (".jsonl", lines(PLAIN[0], PLAIN[1], PLAIN[0]), "line 3: has the texts of line 1; keep one"),
    "pair twice, turned round": (
        ".jsonl",
        lines(*PLAIN, {**PLAIN[1], "positive": "No.", "negative": "Of  course."}),
        "line 4: has the texts of line 2",
    ),
}


@pytest.mark.parametrize(("suffix", "content", "message"), BAD.values(), ids=BAD)
def test_bad_files_are_named_with_the_cure(tmp_path, suffix, content, message):
    path = tmp_path / f"mine{suffix}"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        pairs.read(path)
    assert str(path) in str(caught.value)
    assert SECRET not in str(caught.value)


def test_bad_folders(tmp_path):
    with pytest.raises(DataError, match="not a datasets folder"):
        pairs.read(tmp_path)
    table = datasets.Dataset.from_list(PLAIN)
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(DataError, match=r"holds the splits train, test; give the folder of one, e.g. train"):
        pairs.read(tmp_path / "splits")
    assert pairs.read(tmp_path / "splits" / "train").n == 3
    (arrow,) = (tmp_path / "splits" / "test").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:100])
    with pytest.raises(DataError, match="not a datasets folder"):
        pairs.read(tmp_path / "splits" / "test")


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist; give a file"):
        pairs.read(tmp_path / "none.jsonl")


def test_all_faults_at_once_but_no_flood(tmp_path):
    rows = [{**ROWS[1], "positive": "", "negative": "", "user": str(i)} for i in range(50)]
    with pytest.raises(DataError) as caught:
        pairs.read(write(tmp_path, ".jsonl", rows))
    message = str(caught.value)
    assert "100 fault(s)" in message
    assert "line 10: negative is empty" in message
    assert "line 11" not in message
    assert message.endswith("... and 80 more")


def test_the_made_up_clinic_notes():
    read = pairs.read(paths.PACKAGE / "examples" / "clinic_pairs.jsonl")
    assert read.unit == "person"
    assert 25 <= read.n <= 40
    assert 55 <= len(read.items) <= 70
    assert max(np.bincount(read.units)) >= 3 > min(np.bincount(read.units))
    for item in read.items:
        courteous, curt = item.options
        assert len(courteous.split()) > 2 * len(curt.split())
