"""What sinks of experiment trackers share, with a tracker in memory."""

import warnings

import pytest

from megalowbit.telemetry.media import Histogram, TextSample
from megalowbit.telemetry.overflow.counters import LayerOverflow, OperandCounts
from megalowbit.telemetry.sinks.hosted import HostedSink, kept_id

COUNTS = Histogram(name="max/h.0", edges=(0.0, 1.0), counts=(3,))
TEXTS = [TextSample(number=number, prompt="a", text="b") for number in (1, 2)]


class MemorySink(HostedSink):
    tracker = "memory"

    def __init__(self, **options):
        super().__init__(**options)
        self._run = self.logged = []
        self.fails_at = None

    def _log(self, step, values):
        if step == self.fails_at:
            raise OSError("no space left\nat all")
        self.logged.append((step, values))

    def _histogram(self, histogram):
        return histogram.counts

    def _table(self, rows):
        return rows

    def _keep(self, path):
        self.logged.append(path)

    def _finish(self, exit_code, summary):
        self.logged.append((exit_code, summary))


def test_known_facts_are_logged_by_their_names():
    sink = MemorySink()
    sink.write(3, {"loss": 1.0, "mfu": None})
    counts = OperandCounts(elements=8, saturated=2)
    sink.write_layers(3, [LayerOverflow(layer="h.0", role="input", counts=counts)])
    former = MemorySink(with_former_names=True)
    former.write(3, {"loss": 1.0})
    rates = {"overflow/input/h.0/saturation_rate": 0.25, "overflow/input/h.0/underflow_rate": 0.0}
    assert sink.logged == [(3, {"train/loss": 1.0}), (3, rates)]
    assert former.logged == [(3, {"loss": 1.0, "train/loss": 1.0})]


def test_texts_of_a_step_are_one_table_and_no_media_are_no_entry(tmp_path):
    sink = MemorySink()
    sink.write_media(5, [])
    sink.write_media(5, [COUNTS, *TEXTS])
    sink.write_media(6, [COUNTS])
    sink.write_files([tmp_path / "report.html"])
    sink.close(2, {"final_loss": 1.0, "best_loss": None})
    assert sink.logged == [
        (5, {"histograms/max/h.0": (3,), "samples": [[1, "a", "b"], [2, "a", "b"]]}),
        (6, {"histograms/max/h.0": (3,)}),
        tmp_path / "report.html",
        (2, {"final_loss": 1.0}),
    ]


@pytest.mark.parametrize("action", ["write", "write_layers", "write_media"])
def test_any_failure_warns_once_and_turns_it_off(action):
    sink = MemorySink()
    sink.fails_at = 2
    counts = OperandCounts(elements=8)
    layers = [LayerOverflow(layer="h.0", role="input", counts=counts)]
    content = {"write": {"loss": 1.0}, "write_layers": layers, "write_media": TEXTS}[action]
    with pytest.warns(RuntimeWarning, match=r"^memory failed and is off .* \(no space left\); metrics.jsonl"):
        getattr(sink, action)(2, content)
    assert not sink.is_on
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(sink, action)(3, content)
        sink.write_files([])
        sink.close()
    assert sink.logged == []


def test_an_id_is_kept(tmp_path):
    path = tmp_path / "tracker" / "run_id"
    first = kept_id(path)
    assert len(first) == 8
    assert kept_id(path) == first == path.read_text().strip()
    path.write_text("\n")
    assert kept_id(path) not in ("", first)


def test_a_histogram_needs_an_edge_more_than_counts():
    with pytest.raises(ValueError, match="2 counts need one more edge than 2"):
        Histogram(name="x", edges=(0.0, 1.0), counts=(1, 2))
