import json

import pytest

from tamis.bench import parallel


def test_the_computed_table_has_its_crossing_points():
    """By hand: P = 4 of 32 heads of 128 send 2 * 2 * (32 + 32) * 32768 * 128 * 2 * 3 / 4 bytes a layer."""
    rows = {(row["key_heads"], row["processes"]): row for row in parallel.computed()}
    four = rows[32, 4]
    assert four["ways"]["heads"]["sent"] == 32 * 2 * 2 * 64 * 32768 * 128 * 2 * 3 // 4
    assert four["ways"]["keys"]["sent"] == 32 * 3 * 2 * 32 * 32768 * 128 * 2 * 3
    assert rows[32, 1]["ways"]["keys"]["sent"] == 0
    assert [row["auto"] for (heads, size), row in rows.items() if heads == 32 and size > 1] == ["heads"] * 5
    chosen = {size: row["auto"] for (heads, size), row in rows.items() if heads == 8}
    assert chosen == {1: "heads", 2: "keys", 4: "heads", 8: "heads", 16: "keys", 32: "keys"}
    assert rows[8, 16]["ways"].keys() == {"keys"}


@pytest.mark.slow
def test_what_is_sent_is_what_the_formulas_say(tmp_path):
    parallel.run(tmp_path, length=64, repeats=1)
    record = json.loads((tmp_path / "parallel-cpu.json").read_text())
    layers = [row for row in record["measured"] if row["what"] == "layer"]
    assert {row["processes"] for row in layers} == {1, 2, 4}
    for row in layers:
        assert row["sent"] == row["formula"]
        assert row["seconds"] > 0
    decoded = [row for row in record["measured"] if row["what"] == "decode" and row["processes"] == 4]
    assert len(decoded) == 3


def test_lengths_that_do_not_divide():
    with pytest.raises(ValueError, match="length must be a multiple of 8"):
        parallel.run(None, length=100)
