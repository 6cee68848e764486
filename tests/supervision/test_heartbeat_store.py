from small_boards import beat, boards

from megalowbit.supervision import heartbeat_store as notice_board
from megalowbit.supervision.heartbeat_store import (
    DEFECT,
    LOOKS,
    LOSS,
    MISTAKE,
    TELLS_OF_SIGTERM,
    Failure,
    Finding,
    NoticeBoard,
)

FAILURE = Failure(1, "n2", "step 7", "ValueError: a defect", DEFECT)


def test_beats_of_all_are_read_by_any(monkeypatch):
    first, second, third = boards(3, monkeypatch)
    assert first.beats() == {}
    first.publish(beat(1))
    third.publish(beat(5, host="n3"))
    assert second.beats() == {0: beat(1), 2: beat(5, host="n3")}
    third.publish(beat(6, host="n3"))
    assert second.look({2: beat(5)}).silent == [1]


def test_beats_of_many_ranks_are_read_though_some_are_missing(monkeypatch):
    monkeypatch.setattr(notice_board, "KEYS_A_REQUEST", 3)
    notes = boards(11, monkeypatch)
    present = [0, 2, 3, 4, 5, 9]  # one of a request missing, none, all, and the last request shorter
    for rank in present:
        notes[rank].publish(beat(rank))
    assert notes[1].beats() == {rank: beat(rank) for rank in present}


def test_one_rank_gets_each_claim(monkeypatch):
    first, second = boards(2, monkeypatch)
    assert first.claimant(LOOKS) is None
    assert second.claim(LOOKS)
    assert not first.claim(LOOKS)
    assert first.claimant(LOOKS) == 1
    assert second.claim(LOOKS)  # again
    assert first.claim(TELLS_OF_SIGTERM)


def test_a_reported_failure_alarms_all_and_the_first_stays(monkeypatch):
    first, second = boards(2, monkeypatch)
    assert not first.is_alarmed()
    assert first.failure() is None
    second.report(FAILURE)
    first.report(Failure(0, "n1", "step 7", "another", MISTAKE))
    assert first.is_alarmed()
    assert first.failure() == FAILURE
    assert str(FAILURE).startswith("rank 1 (host n2) failed in step 7: ValueError: a defect")


def test_everybody_knows_once_all_living_have_found_read_or_reported(monkeypatch):
    first, second, third = boards(3, monkeypatch)
    second.report(FAILURE)
    assert not first.is_known_to_all()
    first.tell(Finding("found", LOSS, 3))
    assert not first.is_known_to_all()
    assert third.finding() == Finding("found", LOSS, 3)
    assert first.is_known_to_all()


def test_the_lost_are_not_waited_for(monkeypatch):
    first, _, third = boards(3, monkeypatch)
    first.tell(Finding("found", LOSS, 2))
    assert not first.is_known_to_all()
    third.finding()
    assert first.is_known_to_all()


def test_where_all_report_there_is_nothing_to_wait_for(monkeypatch):
    first, second = boards(2, monkeypatch)
    first.report(FAILURE)
    second.report(FAILURE)
    assert first.is_known_to_all()


def test_a_second_loop_of_the_same_process_starts_with_an_empty_board(monkeypatch):
    first, second = boards(2, monkeypatch)
    second.report(FAILURE)
    again = [NoticeBoard(rank, 2) for rank in (0, 1)]
    again[0].publish(beat(1))
    assert again[1].beats() == {0: beat(1)}
    assert not again[0].is_alarmed()
    assert first.is_alarmed()


def test_notes_end_with_the_main_process_unless_the_launcher_serves_them(monkeypatch):
    first, second = boards(2, monkeypatch)
    assert first.is_served_here
    assert not second.is_served_here
    assert str(first.address).startswith("127.0.0.1:")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    first, _ = boards(2, monkeypatch)
    assert not first.is_served_here
