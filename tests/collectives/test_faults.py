"""What keeps a cut from closing, what is refused, and who goes away in the middle: training goes on unharmed."""

import subprocess
import time
from pathlib import Path

import pytest
from stasis_trainer import versions
from stasis_trainer.client import Trainer, TrainerError
from stasis_trainer.messages import Phase
from tests.collectives import lab

pytestmark = pytest.mark.root
SUMS = [f"{step} {(4.0).hex()}\n" for step in range(40)]  # ones, summed over two ranks and halved


def run(folder: Path, job: str, torch: str = "oldest", **environment: str) -> str:
    command = lab.in_root(torch, folder, ["python3", *job.split()], lab._environment(1, True) | environment)
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.parametrize("torch", ["oldest", pytest.param("newest", marks=pytest.mark.slow)])
def test_every_method_of_torch_is_handled_or_refused_by_name(torch: str, tmp_path: Path) -> None:
    assert run(tmp_path, "/mnt/jobs/surface.py", torch) == ""


def test_a_rank_that_is_alone_is_named_and_training_goes_on(tmp_path: Path) -> None:
    with lab.gang(tmp_path, "rank0", steps=8) as gang:
        gang.expect_lines(3)
        time.sleep(0.5)
        with pytest.raises(lab.NotClosed, match="rank 0 owes operation 7 of group 0"):
            gang.checkpoint(timeout=1)
        (gang.folder / "go").touch()
        gang.checkpoint()
        assert [text.replace("alone\n", "") for text in gang.wait()] == ["".join(SUMS[:8])] * 2


def at_rest(trainers: list[Trainer]) -> None:
    lab.quiesce(trainers, 20)


def committed(trainers: list[Trainer], hold: float = 0.0) -> None:
    at_rest(trainers)
    for trainer in trainers:
        trainer.commit(hold)


def torn(trainers: list[Trainer]) -> None:
    committed(trainers)
    for trainer in trainers:
        trainer.teardown()


def closed(trainers: list[Trainer]) -> None:
    torn(trainers)
    for trainer in sorted(trainers, key=lab.serves):
        assert trainer.close_groups() == []


def test_an_agent_that_goes_away_leaves_no_rank_parked_and_no_group_lost(tmp_path: Path) -> None:
    """At each point of one training, which all of them leave as it was."""
    with lab.gang(tmp_path / "undisturbed", "ddp", steps=150, active=False) as gang:
        undisturbed = gang.wait()
    with lab.gang(tmp_path / "disturbed", "ddp", steps=150) as gang:
        gang.expect_lines(2)
        for away in (at_rest, committed):
            with gang.trainers() as trainers:
                away(trainers)
            gang.checkpoint(rebuild=False)

        with gang.trainers() as trainers:
            committed(trainers, hold=30)
        time.sleep(0.3)
        with gang.trainers() as trainers:
            assert {trainer.phase for trainer in trainers} == {Phase.COMMITTED}
            for trainer in trainers:
                trainer.resume()

        with gang.trainers() as trainers:
            torn(trainers)
        with gang.trainers() as trainers:
            assert {trainer.phase for trainer in trainers} == {Phase.TORN}
            for trainer in sorted(trainers, key=lab.serves):
                assert trainer.close_groups() == []
        gang.rebuild()

        with gang.trainers() as trainers:
            for request in (Trainer.commit, Trainer.teardown, Trainer.close_groups, Trainer.resume):
                with pytest.raises(TrainerError, match="this process is running"):
                    request(trainers[0])

        with gang.trainers() as trainers:
            closed(trainers)
            server = next(trainer for trainer in trainers if lab.serves(trainer))
            with lab.taken_port() as port:
                (store,) = server.hello["stores"]
                server.begin_rebuild("taken", {store["endpoint"]: ("127.0.0.1", port)})
                with pytest.raises(TrainerError, match="rebuild"):
                    server.end_rebuild()
        gang.rebuild()
        assert gang.wait() == undisturbed


def test_what_cannot_be_rebuilt_is_refused_by_name_and_works_as_ever(tmp_path: Path) -> None:
    with lab.gang(tmp_path, "anysource", steps=40) as gang:
        gang.expect_lines(2)
        gang.checkpoint()
        (gang.folder / "go").touch()
        gang.expect_lines(6)
        with pytest.raises(TrainerError, match="recv_anysource of a process group"):
            gang.checkpoint()
        assert gang.wait() == ["".join(SUMS[:40])] * 2


def test_debug_detail_is_refused_by_name(tmp_path: Path) -> None:
    with lab.gang(tmp_path, "ddp", steps=40, TORCH_DISTRIBUTED_DEBUG="DETAIL") as gang:
        gang.expect_lines(2)
        with pytest.raises(TrainerError, match="TORCH_DISTRIBUTED_DEBUG=DETAIL"):
            gang.checkpoint()
        gang.wait()


def test_another_version_of_torch_is_left_untouched_and_says_so(tmp_path: Path) -> None:
    assert versions.refusal("2.6.0+cu124") is None
    assert "2.60.1 is not among" in str(versions.refusal("2.60.1"))
    program = (
        "from stasis_trainer import versions; versions.TESTED = ('2.5',); import torch.distributed as d; "
        "assert d.TCPStore.__module__ != 'stasis_trainer.store'; "
        "import glob, socket, json; s = socket.socket(socket.AF_UNIX); s.connect(*glob.glob('/mnt/run/*.sock')); "
        "print(json.loads(s.recv(10000))['refused'])"
    )
    (tmp_path / "program.py").write_text(program)
    assert "is not among the versions tested: 2.5" in run(tmp_path, "/mnt/run/program.py")


def test_the_sitecustomize_that_ours_hides_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other one')")
    path = f"{lab.INJECTED}:/mnt/run"
    assert run(tmp_path, "-c pass", PYTHONPATH=path) == "the other one\n"


def test_forked_workers_hold_no_socket_of_a_group(tmp_path: Path) -> None:
    """Theirs would keep connections open that were torn down."""
    with lab.gang(tmp_path, "loader", steps=60) as gang:
        gang.expect_lines(2)
        assert gang.outputs()[0].startswith("sockets 0.0\n")
        gang.checkpoint()
        gang.wait()
        assert gang.figures.sockets == []
