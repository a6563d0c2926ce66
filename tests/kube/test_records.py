"""Decision records in a real TrainJobCheckpoint's status: the first writer wins, whoever else writes there."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lightkube import Client
from lightkube.types import PatchType
from tests.kube.objects import checkpoint
from tests.support.apiserver import ApiServer

from stasis.core.records import Failure, Record, Verdict, decision_key, end_key, release_key
from stasis.errors import NotFound, Unavailable
from stasis.kube.client import Checkpoints, configuration, connect, meta
from stasis.kube.records import ApiRecords

pytestmark = pytest.mark.kube

COMMIT = Record(Verdict.COMMIT, "op", 7, 1, (0, 1), manifests={0: "sha256:0", 1: "sha256:1"})
ABORT = Record(Verdict.ABORT, "op", 8, 1, (0, 1), failures=(Failure("Refused", "no"),))


@pytest.fixture
def uid(client: Client, namespace: str) -> str:
    made = client.create(checkpoint("gpt-1", namespace))
    operation = {"op": "op", "kind": "release", "serial": 1, "spec": "{}"}
    status = {"status": {"operations": [operation]}}
    client.patch(Checkpoints.Status, "gpt-1", status, namespace=namespace, patch_type=PatchType.MERGE)
    return str(meta(made)["uid"])


def test_of_many_writers_at_once_one_wins_and_all_see_it(client: Client, namespace: str, uid: str) -> None:
    gate = threading.Barrier(6)

    def write(number: int) -> Record:
        gate.wait()
        record = COMMIT if number % 2 else ABORT
        return ApiRecords(client, namespace, "gpt-1", uid).create(decision_key("op"), record)

    with ThreadPoolExecutor(6) as pool:
        found = set(map(str, pool.map(write, range(6))))
    assert len(found) == 1
    assert str(ApiRecords(client, namespace, "gpt-1", uid).read(decision_key("op"))) in found


def test_records_of_different_keys_do_not_push_each_other_out(client: Client, namespace: str, uid: str) -> None:
    records = ApiRecords(client, namespace, "gpt-1", uid)
    keys = [decision_key("op"), release_key("op"), end_key("op")]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda key: records.create(key, COMMIT), keys)) == [COMMIT] * 3
    assert [records.read(key) for key in keys] == [COMMIT] * 3


def test_what_is_not_there_is_not_there(client: Client, namespace: str, uid: str) -> None:
    assert ApiRecords(client, namespace, "gpt-1", uid).read(decision_key("op")) is None
    assert ApiRecords(client, namespace, "gpt-1", uid).read(decision_key("other")) is None


def test_of_a_checkpoint_that_is_gone_only_giving_up_can_be_recorded(client: Client, namespace: str, uid: str) -> None:
    """Else a rank that is frozen for it would wait for ever."""
    for records in (ApiRecords(client, namespace, "gpt-2"), ApiRecords(client, namespace, "gpt-1", "another")):
        assert records.create(decision_key("op"), ABORT) == ABORT
        assert records.read(decision_key("op")) is None
        with pytest.raises(NotFound):
            records.create(decision_key("op"), COMMIT)


def test_an_api_that_cannot_be_reached_says_nothing(api: ApiServer, namespace: str, uid: str, tmp_path: Path) -> None:
    text = api.kubeconfig.read_text()
    (tmp_path / "nowhere").write_text(text.replace(api.url, "https://127.0.0.1:1"))
    records = ApiRecords(connect(configuration(tmp_path / "nowhere")), namespace, "gpt-1", uid)
    with pytest.raises(Unavailable):
        records.read(decision_key("op"))
    with pytest.raises(Unavailable):
        records.create(decision_key("op"), ABORT)
