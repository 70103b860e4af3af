import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tamis import files
from tamis.files import check_sealed, replace_folder, seal, standing


def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "numbers.bin"
    path.write_bytes(b"old")

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "flush", full)
    with pytest.raises(OSError, match=str(path)), files.replacing(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_only_files_are_replaced(tmp_path):
    """Where root writes to /dev/null, everybody else goes on having it."""
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (pipe, folder, Path("/dev/null")):
        message = "is no file that another one could take the place of"
        with pytest.raises(ValueError, match=message), files.replacing(path) as file:
            file.write(b"new")
    assert pipe.is_fifo()
    assert folder.is_dir()
    assert Path("/dev/null").is_char_device()


# ---------------------------------------------------------------------------------------------------------------
# What killed processes leave

WRITES_UNTIL_KILLED = """
import sys, time
from tamis.files import replacing
with replacing(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_left_goes_and_what_another_writes_stays(tmp_path):
    path = tmp_path / "a[1].json"
    writer = subprocess.Popen([sys.executable, "-c", WRITES_UNTIL_KILLED, str(path)], stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None
        writer.stdout.readline()
        (partial,) = tmp_path.iterdir()
        files.write_json(path, {"whole": True})
        files.sweep(tmp_path)
        assert partial.exists()
    finally:
        writer.kill()
        writer.communicate()
    files.write_json(tmp_path / "b.json", {})  # another file's leftovers are its own
    assert partial.exists()
    files.write_json(path, {"whole": True})
    assert sorted(other.name for other in tmp_path.iterdir()) == ["a[1].json", "b.json"]


def test_all_leftovers_of_a_folder_go(tmp_path):
    for name in (".config.toml.7.partial", ".metrics.jsonl.8.partial", "kept.partial", ".kept"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / ".train.abc.partial").mkdir()  # of a corpus: `tamis.data.indexed` knows when
    files.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".kept", ".train.abc.partial", "kept.partial"]


def test_a_device_is_no_file():
    with pytest.raises(ValueError, match="/dev/zero is a device, not a file"):
        files.check_file("/dev/zero")


# ---------------------------------------------------------------------------------------------------------------
# Signed tables


def test_signed_tables_come_back_and_every_changed_byte_is_noticed(tmp_path):
    path = tmp_path / "x.json"
    table = {"name": "\u00fc", 1: [0.1, None], "nested": {"b": (1, 2), "a": 1e300}}
    files.write_signed(path, table)
    plain = json.loads(json.dumps(table))
    assert files.read_signed(path) == (plain, True)
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        found = outcome(path)
        # Passed over are white space, and the name of the digest itself.
        assert str(path) in found or found == str((plain, True)) or found.endswith("False)")


def outcome(path: Path) -> str:
    try:
        return str(files.read_signed(path))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "null", "[" * 100_000])
def test_what_is_no_table_is_named(tmp_path, content: str):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=r"x\.json is damaged"):
        files.read_signed(tmp_path / "x.json")


def test_tables_of_before_have_no_digest(tmp_path):
    (tmp_path / "x.json").write_text('{"a": 1}')
    assert files.read_signed(tmp_path / "x.json") == ({"a": 1}, False)


# ---------------------------------------------------------------------------------------------------------------
# Sealed folders


def sealed_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "a").write_bytes(bytes(range(256)) * 100)
    (folder / "b").write_bytes(b"")
    seal(folder)
    return folder


def test_a_sealed_folder_is_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr("tamis.files.BLOCK", 1000)
    check_sealed(sealed_folder(tmp_path / "x"), "a", "b", "never there")
    check_sealed(tmp_path, "a")  # never sealed


@pytest.mark.parametrize("place", [0, 999, 1000, 25_599])
def test_one_bit_is_noticed(tmp_path, monkeypatch, place: int):
    monkeypatch.setattr("tamis.files.BLOCK", 1000)
    folder = sealed_folder(tmp_path / "x")
    content = bytearray((folder / "a").read_bytes())
    content[place] ^= 16
    (folder / "a").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"a is not as it was written; if you changed it on purpose, remove .*checksums"
    ):
        check_sealed(folder, "a")
    check_sealed(folder, "b")
    (folder / "b").write_bytes(b"x")
    with pytest.raises(ValueError, match="b is not as it was written"):
        check_sealed(folder, "b")
    (folder / "b").unlink()
    with pytest.raises(FileNotFoundError, match="b is missing"):
        check_sealed(folder, "b")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 3}', '{"a": {"bytes": 1}}'])
def test_a_damaged_seal_is_named(tmp_path, text: str):
    folder = sealed_folder(tmp_path / "x")
    (folder / "checksums.json").write_text(text)
    if text == "[]":  # names nothing
        check_sealed(folder, "a")
        return
    with pytest.raises(ValueError, match=r"checksums\.json is damaged"):
        check_sealed(folder, "a")


# ---------------------------------------------------------------------------------------------------------------
# Replaced folders


def written(text: str):
    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "text").write_text(text)

    return write


@pytest.mark.parametrize("moment", range(3))
def test_a_folder_is_replaced_whole_whenever_it_ends(tmp_path, monkeypatch, moment: int):
    folder = tmp_path / "model"
    replace_folder(folder, written("old"))
    calls = iter(range(10))
    rename = Path.rename

    def dies(self: Path, target: Path) -> Path:
        if next(calls) == moment:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", dies)
    if moment < 2:
        with pytest.raises(KeyboardInterrupt):
            replace_folder(folder, written("new"))
        assert (standing(folder) / "text").read_text() == "old"
    else:
        replace_folder(folder, written("new"))
    monkeypatch.undo()
    replace_folder(folder, written("newer"))
    assert (standing(folder) / "text").read_text() == "newer"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_write_that_fails_changes_nothing(tmp_path):
    folder = tmp_path / "model"
    replace_folder(folder, written("old"))
    with pytest.raises(OSError, match="full"):
        replace_folder(folder, lambda draft: (_ for _ in ()).throw(OSError("full")))
    assert (standing(folder) / "text").read_text() == "old"
