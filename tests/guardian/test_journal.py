"""What is written before a crash is read after it: whole, by everyone the same, and nothing hides the rest."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stasis.agent.journal import Broken, Fate, FrozenTree, StateDir
from stasis.agent.records import Records, file_name
from stasis.core.records import Failure, Record, Verdict, decision_key, release_key
from stasis.errors import StasisError

TREE = FrozenTree("8a5e", 0, 7, "c0ffee", 100, 1000, 101, 1001, "/sys/fs/cgroup/freezer/x/stasis", "v1", 10**12, "/r")
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "state")


def in_processes(count: int, work: Callable[[int], Any]) -> list[Any]:
    """The results of `work(i)` in `count` processes that start at once."""
    barrier, results = FORK.Barrier(count), FORK.SimpleQueue()

    def run(i: int) -> None:
        barrier.wait()
        results.put((i, work(i)))

    processes = [FORK.Process(target=run, args=(i,)) for i in range(count)]
    for process in processes:
        process.start()
    answers = dict(results.get() for _ in processes)
    for process in processes:
        process.join()
    return [answers[i] for i in range(count)]


def test_entry_comes_back_as_it_was(state: StateDir) -> None:
    state.write_tree(TREE)
    again = replace(TREE, epoch=8, rank=1)
    state.write_tree(replace(TREE, rank=1))
    state.write_tree(again)
    assert list(state.trees()) == [TREE, again]
    state.write("step", "a/b .c", {"laid": ["x"]})
    assert (state.names("step"), state.read("step", "a/b .c")) == (["a/b .c"], {"laid": ["x"]})
    assert state.names("tree") == ["8a5e.0", "8a5e.1"]
    assert oct(os.stat(state.path).st_mode & 0o777) == "0o700"


def test_entry_cut_at_any_byte_is_reported_and_hides_no_other(state: StateDir) -> None:
    other = replace(TREE, rank=1)
    state.write_tree(TREE)
    state.write_tree(other)
    file = state.path / "8a5e.0.tree"
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        broken, kept = state.trees()
        assert isinstance(broken, Broken)
        assert (broken.name, kept) == ("8a5e.0", other)
    for nonsense in (b"[]", b"{}", b'"x"', bytes(len(whole)), whole.replace(b'"rank"', b'"bank"'), b"\xff\xfe"):
        file.write_bytes(nonsense)
        assert isinstance(state.read_tree("8a5e.0"), Broken), nonsense


def test_half_written_replacement_is_no_entry(state: StateDir) -> None:
    state.write_tree(TREE)
    (state.path / ".8a5e.0.tree.new").write_bytes(b'{"op')
    assert list(state.trees()) == [TREE]
    state.write_tree(replace(TREE, epoch=9))
    assert list(state.trees()) == [replace(TREE, epoch=9)]


def test_vote_and_guardian_exclude_each_other(state: StateDir) -> None:
    names = [f"tree-{i}" for i in range(150)]
    for name in names:
        state.prepare_to_fire(name)

    def claim(i: int) -> list[Fate]:
        own = StateDir(state.path)
        return [own.fire(name) if (i + n) % 2 else own.claim(name, Fate.VOTED) for n, name in enumerate(names)]

    answers = in_processes(4, claim)
    assert answers[0] == answers[1] == answers[2] == answers[3] == [state.fate(name) for name in names]
    assert set(answers[0]) == {Fate.VOTED, Fate.FIRED}


def test_forgotten_tree_leaves_nothing(state: StateDir) -> None:
    state.write_tree(TREE)
    state.prepare_to_fire(TREE.name)
    assert not state.ended(TREE.name)
    assert state.fate(TREE.name) is None
    assert state.fire(TREE.name) is Fate.FIRED
    state.end(TREE.name)
    state.end(TREE.name)
    os.close(state.log(TREE.name))
    assert state.ended(TREE.name)
    state.forget_tree(TREE.name)
    assert os.listdir(state.path) == []
    assert state.ended(TREE.name)
    state.forget_tree(TREE.name)


def test_first_record_wins_among_processes(tmp_path: Path) -> None:
    keys = [decision_key(f"op-{i}") for i in range(100)]
    each_has_one = FORK.Barrier(4)  # however busy the machine is, no process wins them all

    def decide(i: int) -> list[Record]:
        records = Records(tmp_path)
        order = list(range(4, len(keys)))
        random.Random(i).shuffle(order)
        won: dict[int, Record] = {}
        for n in (i, *order, *range(4)):
            record = Record(Verdict.COMMIT if i % 2 else Verdict.ABORT, f"op-{n}", epoch=i)
            won[n] = records.create(keys[n], record)
            if len(won) == 1:
                each_has_one.wait()
        return [won[n] for n in range(len(keys))]

    answers = in_processes(4, decide)
    records = Records(tmp_path)
    assert answers[0] == answers[1] == answers[2] == answers[3] == [records.read(key) for key in keys]
    assert [record.epoch for record in answers[0][:4]] == [0, 1, 2, 3]
    assert len(os.listdir(tmp_path)) == len(keys)


def test_reader_never_sees_half_a_record(tmp_path: Path) -> None:
    big = Record(Verdict.COMMIT, "op", 1, manifests=dict.fromkeys(range(2000), "sha256:" + "0" * 64))
    keys = [decision_key(f"op-{i}") for i in range(40)]

    def work(i: int) -> bool:
        records = Records(tmp_path)
        if i == 0:
            return all(records.create(key, big) == big for key in keys)
        seen = 0
        for key in keys:
            while (record := records.read(key)) is None:
                seen += 1
            if record != big:
                return False
        return True

    assert in_processes(2, work) == [True, True]


def test_record_holds_all_that_was_decided(tmp_path: Path) -> None:
    records = Records(tmp_path / "new" / "records")
    failure = Failure("Refused", "io_uring", "deny it", rank=1, step="prepare", detail={"findings": [{"pid": 7}]})
    record = Record(Verdict.ABORT, "ns/job:1", 3, ranks=(0, 1), finished=(2,), failures=(failure,))
    assert records.create(decision_key("ns/job:1"), record) == record
    assert records.read(decision_key("ns/job:1")) == record
    assert records.read(release_key("ns/job:1")) is None
    assert records.create(decision_key("ns/job:1"), replace(record, verdict=Verdict.COMMIT)) == record


def test_broken_record_is_an_error_not_an_answer(tmp_path: Path) -> None:
    records = Records(tmp_path)
    key = decision_key("op")
    for data in (b"", b"{", b"[]", b'{"verdict": "commit"}', b'{"verdict": "maybe"}'):
        (tmp_path / file_name(key)).write_bytes(data)
        with pytest.raises(StasisError, match=f"record {key} is broken"):
            records.read(key)
