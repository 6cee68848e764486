import math
import sys
import threading

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalowbit.errors import UserError
from megalowbit.telemetry.media import Histogram, TextSample
from megalowbit.telemetry.overflow.counters import LayerOverflow, OperandCounts
from megalowbit.telemetry.sinks.tensorboard import TensorBoardSink


def scalars(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_every_numeric_fact_is_a_scalar_under_its_name_in_tensorboard(tmp_path):
    sink = TensorBoardSink(tmp_path)
    rate = "gradient_overflow/element_overflow_rate"
    sink.write(1, {"loss": 2.5, rate: 0.25, "skipped_steps": 3, "name": "x", "lr": None})
    sink.write(2, {"loss": math.inf, rate: None})
    sink.close()
    assert scalars(tmp_path) == {
        "train/loss": [(1, 2.5), (2, math.inf)],
        rate: [(1, 0.25)],
        "train/skipped_steps": [(1, 3.0)],
    }


def test_former_names_have_the_same_curves(tmp_path):
    sink = TensorBoardSink(tmp_path, with_former_names=True)
    sink.write(1, {"loss": 2.5, "validation/loss": 2.0})
    sink.close()
    found = scalars(tmp_path)
    assert found.pop("loss") == found.pop("train/loss") == [(1, 2.5)]
    assert found.pop("validation/loss") == found.pop("val/loss") == [(1, 2.0)]
    assert not found


def test_losses_are_shown_over_tokens_too(tmp_path):
    """Also after a resume with another batch size: tokens of steps that are repeated do not count twice."""
    first = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        first.write(step, {"loss": float(step), "tokens": 100 * step})
    first.write(4, {"loss": 4.0})
    first.close()
    second = TensorBoardSink(tmp_path, resume_step=2, resume_tokens=200)
    second.write(3, {"loss": 30.0, "tokens": 500, "validation/loss": 25.0})
    second.close()
    assert scalars(tmp_path / "tokens") == {
        "train/loss vs tokens": [(100, 1.0), (200, 2.0), (500, 30.0)],
        "val/loss vs tokens": [(500, 25.0)],
    }
    assert scalars(tmp_path)["train/loss"] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_histograms_and_texts_are_shown(tmp_path):
    sink = TensorBoardSink(tmp_path)
    counts = Histogram(name="max/h.0", edges=(-2.0, -1.0, 0.0, 1.0), counts=(0, 3, 1))
    empty = Histogram(name="max/h.1", edges=(0.0, 1.0), counts=(0,))
    text = TextSample(number=1, prompt="<b>", text=" fat\n# no heading")
    sink.write_media(7, [counts, empty, text])
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    [found] = events.Histograms("histograms/max/h.0")
    shown = found.histogram_value
    assert (found.step, shown.min, shown.max, shown.num, shown.sum) == (7, -1.0, 1.0, 4.0, 3 * -0.5 + 0.5)
    assert list(shown.bucket_limit)[-3:] == [-1.0, 0.0, 1.0]
    assert list(shown.bucket)[-3:] == [0.0, 3.0, 1.0]
    assert events.Histograms("histograms/max/h.1")[0].histogram_value.num == 0
    [sample] = events.Tensors("samples/prompt 1")
    assert sample.tensor_proto.string_val[0].decode() == "    <b> ▶  fat\n    # no heading"


def test_each_layer_and_role_has_three_curves(tmp_path):
    seen = OperandCounts(elements=8, saturated=2, underflow=1, squared_error=1.0, squared_norm=100.0)
    rows = [
        LayerOverflow(layer="h.0.mlp", role="input", counts=seen),
        LayerOverflow(layer="h.0.mlp", role="grad_output", counts=OperandCounts()),  # nothing to rate
    ]
    sink = TensorBoardSink(tmp_path)
    sink.write_layers(5, rows)
    sink.close()
    assert scalars(tmp_path) == {
        "overflow/input/h.0.mlp/saturation_rate": [(5, 0.25)],
        "overflow/input/h.0.mlp/underflow_rate": [(5, 0.125)],
        "overflow/input/h.0.mlp/snr_db": [(5, 20.0)],
    }


def test_a_resumed_run_hides_what_was_written_after_its_checkpoint(tmp_path):
    first = TensorBoardSink(tmp_path)
    for step in range(1, 6):
        first.write(step, {"loss": float(step)})
    first.close()
    second = TensorBoardSink(tmp_path, resume_step=3)
    second.write(4, {"loss": 40.0})
    second.close()
    assert scalars(tmp_path)["train/loss"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]


def test_a_missing_package_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        UserError, match=r"pip install tensorboard, or set megalowbit.telemetry.tensorboard=false"
    ):
        TensorBoardSink(tmp_path)


def interrupt_at(moment, write):
    """Call `write` and raise KeyboardInterrupt at its `moment`-th line or return; False if there is none."""
    seen = 0

    def trace(frame, event, argument):
        nonlocal seen
        seen += 1
        if seen == moment:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        write()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_ctrl_c_at_any_moment_of_a_write_neither_blocks_the_close_nor_costs_earlier_steps(tmp_path):
    moment = 0
    is_interrupted = True
    while is_interrupted:
        moment += 1
        sink = TensorBoardSink(tmp_path / str(moment))
        sink.write(1, {"loss": 1.5})
        is_interrupted = interrupt_at(moment, lambda sink=sink: sink.write(2, {"loss": 2.5}))
        closing = threading.Thread(target=sink.close, daemon=True)
        closing.start()
        closing.join(timeout=5.0)
        assert not closing.is_alive(), f"close() waits after an interrupt at moment {moment}"
        expected = [(1, 1.5)] if is_interrupted else [(1, 1.5), (2, 2.5)]
        assert scalars(tmp_path / str(moment))["train/loss"][: len(expected)] == expected
    assert moment > 20  # the moments were really visited
