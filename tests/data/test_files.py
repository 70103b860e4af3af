import errno
import os

import pytest

from tamis.data import files


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
