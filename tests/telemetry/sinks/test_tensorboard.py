import math
import sys
import threading

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalowbit.errors import UserError
from megalowbit.telemetry.overflow.counters import LayerOverflow, OperandCounts
from megalowbit.telemetry.sinks.tensorboard import TensorBoardSink


def scalars(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_every_numeric_fact_is_a_scalar_under_its_own_name(tmp_path):
    sink = TensorBoardSink(tmp_path)
    rate = "gradient_overflow/element_overflow_rate"
    sink.write(1, {"loss": 2.5, rate: 0.25, "skipped_steps": 3, "name": "x", "lr": None})
    sink.write(2, {"loss": math.inf, rate: None})
    sink.close()
    assert scalars(tmp_path) == {
        "loss": [(1, 2.5), (2, math.inf)],
        rate: [(1, 0.25)],
        "skipped_steps": [(1, 3.0)],
    }


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
    assert scalars(tmp_path)["loss"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]


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
        assert scalars(tmp_path / str(moment))["loss"][: len(expected)] == expected
    assert moment > 20  # the moments were really visited
