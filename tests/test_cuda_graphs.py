"""Captures of CUDA graphs: what is asked of torch and of the driver, on a machine that has no GPU."""

import subprocess

import pytest
import torch
from simulated_gpus import simulate_current_gpu

from megalowbit import cuda_graphs
from megalowbit.errors import UserError

GPU = torch.device("cuda", 1)
CPU = torch.device("cpu")
SOURCE = """
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
/* the header declares it, so another signature does not compile */
CUresult CUDAAPI cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *number,
    CUgraph *graph, const CUgraphNode **dependencies, size_t *count) {
  if (graph || dependencies || count) return CUDA_ERROR_INVALID_VALUE;
  *status = (cuuint64_t)stream == 7 ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  *number = ((cuuint64_t)stream << 33) + 5;
  return (cuuint64_t)stream == 9 ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
}
"""


@pytest.fixture
def gpu(monkeypatch):
    """Two GPUs, of which the first is current; streams of the second are captured or not."""

    current, capturing = simulate_current_gpu(monkeypatch), set()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] in capturing)
    return capturing


def test_a_capture_is_that_of_the_tensors_device(gpu):
    assert not cuda_graphs.is_capturing(GPU)
    gpu.add(0)
    assert not cuda_graphs.is_capturing(GPU)
    assert cuda_graphs.is_capturing(torch.device("cuda", 0))
    gpu.add(1)
    assert cuda_graphs.is_capturing(GPU)
    assert not cuda_graphs.is_capturing(CPU)


def test_a_process_without_a_gpu_captures_nothing():
    if torch.cuda.is_initialized():
        pytest.skip("a GPU is in use")
    assert cuda_graphs.capture_of(GPU) is None


def test_a_refusal_is_one_line_with_reason_and_remedy(gpu):
    cuda_graphs.refuse(GPU, "signs", "run it elsewhere")
    gpu.add(1)
    with pytest.raises(UserError) as caught:
        cuda_graphs.refuse(GPU, "signs", "run it elsewhere")
    assert str(caught.value) == "a CUDA graph is captured on cuda:1, and would repeat signs: run it elsewhere"


def test_the_driver_numbers_captures(gpu, monkeypatch, tmp_path):
    nvidia = pytest.importorskip("triton.backends.nvidia.driver", reason="Triton is not installed")
    (tmp_path / "driver.c").write_text(SOURCE)
    library = tmp_path / "libdriver.so"
    include = f"-I{nvidia.include_dirs[0]}"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", include, str(tmp_path / "driver.c"), "-o", str(library)], check=True
    )
    monkeypatch.setattr(cuda_graphs, "LIBRARY", str(library))
    monkeypatch.setattr(cuda_graphs, "_stream", lambda _device: streams[-1])
    cuda_graphs._driver.cache_clear()
    try:
        streams = [3]
        assert cuda_graphs.capture_of(GPU) is None
        gpu.add(1)
        assert cuda_graphs.capture_of(GPU) == (3 << 33) + 5
        for stream in (7, 9):
            streams.append(stream)
            with pytest.raises(RuntimeError, match=f"capture of stream {stream:#x} failed"):
                cuda_graphs.capture_of(GPU)
    finally:
        cuda_graphs._driver.cache_clear()


def test_captures_on_other_makers_gpus_are_refused(gpu, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert cuda_graphs.capture_of(GPU) is None
    gpu.add(1)
    with pytest.raises(UserError, match="NVIDIA GPUs only"):
        cuda_graphs.capture_of(GPU)
