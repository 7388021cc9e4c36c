"""Data sources: what is read, what is refused and where, and the order of the stream."""

import json

import numpy as np
import pytest

from rlhf_dsl.diagnostics import DiagnosticError
from runtime import draws
from runtime.data import Field, Stream, Table, open_table

TEXT = [Field("prompt"), Field("w", "f32"), Field("ok", "bool")]


def write(path, lines):
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), encoding="utf-8")
    return path


def refused(kind, path, fields):
    with pytest.raises(DiagnosticError) as caught:
        open_table(kind, path, fields)
    [one] = caught.value.diagnostics
    assert caught.value.exit_code == 2 and one.help
    return one


def test_jsonl_reads_typed_columns(tmp_path):
    lines = [{"prompt": "é", "w": 1, "ok": True, "more": []}, "", {"prompt": "", "w": 0.5, "ok": False}, ""]
    path = write(tmp_path / "d.jsonl", lines)
    table = open_table("jsonl", path, TEXT)
    assert (table.size, table.columns) == (2, {"prompt": ["é", ""], "w": [1.0, 0.5], "ok": [True, False]})
    assert table.take(np.array([1, 0, 1]))["w"] == [0.5, 1.0, 0.5]


def test_jsonl_with_byte_order_mark_and_carriage_returns(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert open_table("jsonl", path, TEXT[:1]).columns == {"prompt": ["a", "b"]}


GOOD = {"prompt": "a", "w": 1, "ok": True}


@pytest.mark.parametrize("line, code, place, words", [
    ('{"prompt": "a"', "R0301", ":2:15", "expecting"),
    ("[1]", "R0301", ":2", "a list instead of an object"),
    ('{"prompt": "a", "w": NaN, "ok": true}', "R0301", ":2", "`NaN`"),
    ({"prompt": "a", "w": 1}, "R0302", ":2", "no column `ok`"),
    ({**GOOD, "prompt": None}, "R0303", ":2", "`prompt` holds None, not text"),
    ({**GOOD, "prompt": 3}, "R0303", ":2", "`prompt` holds 3, not text"),
    ('{"prompt": "\\ud800", "w": 1, "ok": true}', "R0303", ":2", "not text"),
    ({**GOOD, "w": True}, "R0303", ":2", "`w` holds True, not a finite number"),
    ('{"prompt": "a", "w": 1e999, "ok": true}', "R0303", ":2", "`w` holds inf"),
    ({**GOOD, "ok": 1}, "R0303", ":2", "`ok` holds 1, not true or false"),
])
def test_jsonl_names_the_line(tmp_path, line, code, place, words):
    path = write(tmp_path / "d.jsonl", [GOOD, line, GOOD])
    one = refused("jsonl", path, TEXT)
    assert one.code == code and one.place == f"{path}{place}" and words in one.message, one


def test_files_that_are_none(tmp_path):
    assert refused("jsonl", tmp_path / "none.jsonl", TEXT).code == "R0300"
    assert refused("jsonl", tmp_path, TEXT).code == "R0300"
    assert refused("parquet", write(tmp_path / "d.parquet", ["x"]), TEXT).code == "R0300"
    assert refused("jsonl", write(tmp_path / "e.jsonl", ["", ""]), TEXT).code == "R0304"
    (tmp_path / "bytes.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    assert "not UTF-8" in refused("jsonl", tmp_path / "bytes.jsonl", TEXT[:1]).message
    (tmp_path / "folder").mkdir()
    assert refused("hf", tmp_path / "folder", TEXT).code == "R0300"


def test_parquet_and_folder(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    (tmp_path / "set").mkdir()
    for i, name in enumerate(["train-0.parquet", "train-1.parquet", "test-0.parquet"]):
        rows = {"prompt": [f"{i}a", f"{i}b"], "w": [i, 2], "ok": [True, False], "other": [1, 2]}
        parquet.write_table(pyarrow.table(rows), tmp_path / "set" / name)
    one = open_table("parquet", tmp_path / "set" / "train-1.parquet", TEXT)
    assert one.columns == {"prompt": ["1a", "1b"], "w": [1.0, 2.0], "ok": [True, False]}
    assert open_table("hf", tmp_path / "set", TEXT).columns["prompt"] == ["0a", "0b", "1a", "1b"]
    fault = refused("parquet", tmp_path / "set" / "train-0.parquet", [Field("x")])
    assert fault.code == "R0302" and "`prompt`, `w`, `ok` and `other`" in fault.help
    parquet.write_table(pyarrow.table({"prompt": ["a", None]}), tmp_path / "null.parquet")
    fault = refused("parquet", tmp_path / "null.parquet", TEXT[:1])
    assert fault.code == "R0303" and fault.place.endswith("row 2")


def table(size):
    return Table("t", {"i": list(range(size))}, size)


def test_stream_drops_nothing_and_is_a_function_of_its_position():
    stream = Stream(table(10), "b", seed=3)
    positions, rows = stream.rows(0, 50)
    assert positions.tolist() == list(range(50))
    for k in range(5):
        assert rows[10 * k:10 * k + 10].tolist() == draws.permutation(10, 3, "b", k).tolist()
    again = Stream(table(10), "b", seed=3)
    pieces = [again.rows(p, 7)[1] for p in range(0, 49, 7)]
    assert np.concatenate(pieces).tolist() == rows[:49].tolist()
    assert again.rows(3, 4)[1].tolist() == rows[3:7].tolist()  # backwards too
    assert Stream(table(10), "c", 3).rows(0, 50)[1].tolist() != rows.tolist()
    assert Stream(table(10), "b", 4).rows(0, 50)[1].tolist() != rows.tolist()


def test_stream_longer_than_several_passes_and_first():
    stream = Stream(table(3), "b", seed=0)
    assert sorted(stream.rows(2, 7)[1].tolist()[1:]) == [0, 0, 1, 1, 2, 2]
    assert stream.first(2)[1].tolist() == [0, 1]
    with pytest.raises(DiagnosticError, match="R0305"):
        stream.first(4)


def test_a_package_brings_a_source(tmp_path, monkeypatch):
    (tmp_path / "counting.py").write_text("def rows(path):\n    return ({'prompt': f'{path} {i}'} for i in range(3))\n")
    info = tmp_path / "counting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlflow.data]\ncounting = counting:rows\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    table = open_table("counting", "up", [Field("prompt")])
    assert table.columns["prompt"] == ["up 0", "up 1", "up 2"]


def test_a_source_that_no_package_brings(tmp_path):
    with pytest.raises(DiagnosticError, match="no installed package brings the source `counting`"):
        open_table("counting", "up", [Field("prompt")])
