"""One CUDA device as a program without torch uses it: memory, copies, a stream, events and captured graphs.

Calls the driver's own library (libcuda.so.1, CUDA driver API 12 or later) through ctypes, in the device's primary
context, which the CUDA runtime inside ONNX Runtime and inside Kiln's operator library shares. So addresses and streams
made here are valid there. Needs the driver and nothing else. Knows no model and no operator.

Everything asynchronous goes to the one stream of a `CudaRuntime`. Any thread may call, one at a time.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from plugins.errors import KilnError

PROVIDER = "CUDAExecutionProvider"
OLDEST_DRIVER = 12_00
"""As cuDriverGetVersion counts: 1000 * major + 10 * minor."""
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: work on the legacy default stream does not hold the stream up
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: an allocation during a capture is done at once, not refused
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_OUT_OF_MEMORY = 2
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_HOST, _DEVICE = 1, 2  # CU_MEMORYTYPE_HOST and _DEVICE


_SPARE_STREAMS: dict[int, list[int]] = {}
"""By device, of runtimes that were closed. Kiln's operators keep scratch memory for each stream that they ever ran on
(plugins/cuda_scratch.h), so streams are used again and again; so is the primary context, which is never released."""
_LOCK = threading.Lock()


class CudaError(KilnError):
    """A call of the CUDA driver failed; the context may be lost with all that is in it."""


class OutOfDeviceMemoryError(KilnError):
    """The device has not as much free memory as was asked for; the message has the amounts."""


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_int),
        ("srcHost", ctypes.c_void_p),
        ("srcDevice", ctypes.c_void_p),
        ("srcArray", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_int),
        ("dstHost", ctypes.c_void_p),
        ("dstDevice", ctypes.c_void_p),
        ("dstArray", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    ]


def cuda_driver() -> ctypes.CDLL:
    """The driver's library, initialised. Raises KilnError where there is none, it is too old, or it has no device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KilnError(
            f"no CUDA driver on this machine ({error}); a bundle for an NVIDIA GPU needs one: kiln doctor shows what "
            "is missing, --sku cpu builds for this machine"
        ) from error
    found = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDriverGetVersion(ctypes.byref(found))
    if status:
        raise KilnError(f"the CUDA driver does not start: {_words(driver, status)}; is there a GPU? see kiln doctor")
    if found.value < OLDEST_DRIVER:
        raise KilnError(
            f"the CUDA driver is for CUDA {found.value // 1000}.{found.value % 1000 // 10}; expected "
            f"{OLDEST_DRIVER // 100}.0 or newer: update it, see kiln doctor"
        )
    return driver


def _words(driver: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    known = driver.cuGetErrorString(status, ctypes.byref(text)) == 0 and text.value is not None
    return f"{text.value.decode() if known and text.value else 'unknown error'} (CUDA error {status})"


class CudaRuntime:
    """A device with one stream. Raises KilnError without a driver or such a device.

    provider, device_type: what ONNX Runtime calls the device. address: the stream's handle. arch: such as sm_90.
    """

    provider = PROVIDER
    device_type = "cuda"

    def __init__(self, device: int = 0) -> None:
        self._driver = cuda_driver()
        self.device = device
        self._events: list[ctypes.c_void_p] = []
        count = ctypes.c_int()
        self._check(self._driver.cuDeviceGetCount(ctypes.byref(count)), "the CUDA devices cannot be counted")
        if not 0 <= device < count.value:
            raise KilnError(f"there is no CUDA device {device}, only {count.value}: see nvidia-smi and kiln doctor")
        handle, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._check(self._driver.cuDeviceGet(ctypes.byref(handle), device), f"CUDA device {device} does not answer")
        self._handle = handle
        self.arch = f"sm_{self._attribute(_MAJOR)}{self._attribute(_MINOR)}"
        name = ctypes.create_string_buffer(256)
        self._check(self._driver.cuDeviceGetName(name, len(name), handle), f"CUDA device {device} does not answer")
        self.name = name.value.decode()
        status = self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), handle)
        self._check(status, f"CUDA device {device} ({self.name}) cannot be used")
        self.enter()
        with _LOCK:
            spare = _SPARE_STREAMS.setdefault(device, [])
            self.address: int = spare.pop() if spare else self._new_stream()
        self._stream: ctypes.c_void_p | None = ctypes.c_void_p(self.address)

    def enter(self) -> None:
        """Make the device the calling thread's: first thing on every thread that calls."""
        self._check(self._driver.cuCtxSetCurrent(self._context), "the CUDA context is lost")

    def memory(self) -> tuple[int, int]:
        """Bytes of device memory that are free now, and in all."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._check(self._driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), "the memory is not known")
        return free.value, total.value

    def allocate(self, size: int, what: str) -> int:
        """Address of `size` bytes of device memory, aligned to 256. Raises OutOfDeviceMemoryError with `what`."""
        address = ctypes.c_uint64()
        status = self._driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(max(size, 1)))
        if status == _OUT_OF_MEMORY:
            free, total = self.memory()
            raise OutOfDeviceMemoryError(
                f"{what} needs {_gib(size)} of device memory ({size} bytes); {self.name} has {_gib(free)} free of "
                f"{_gib(total)}"
            )
        self._check(status, f"{what}: {size} bytes of device memory cannot be allocated")
        return address.value

    def free(self, address: int) -> None:
        """Give device memory back; waits for the device."""
        self._check(self._driver.cuMemFree_v2(ctypes.c_uint64(address)), "device memory cannot be freed")

    def allocate_host(self, size: int, what: str) -> int:
        """Address of `size` bytes of pinned host memory: copies from and to it are asynchronous."""
        address = ctypes.c_void_p()
        status = self._driver.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(max(size, 1)), 0)
        self._check(status, f"{what}: {size} bytes of pinned host memory are not to be had")
        assert address.value is not None
        return address.value

    def free_host(self, address: int) -> None:
        self._check(self._driver.cuMemFreeHost(ctypes.c_void_p(address)), "pinned memory cannot be freed")

    def clear(self, address: int, size: int) -> None:
        """Queue: zero `size` bytes of device memory."""
        status = self._driver.cuMemsetD8Async(
            ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(size), self._stream
        )
        self._check(status, "device memory cannot be cleared")

    def copy(self, target: int, source: int, size: int) -> None:
        """Queue: copy bytes between any two addresses, of the device or of pinned host memory."""
        status = self._driver.cuMemcpyAsync(
            ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), self._stream
        )
        self._check(status, "a copy cannot be queued")

    def copy_rows(self, target: int, pitch: int, source: int, width: int, rows: int) -> None:
        """Queue: `rows` of `width` bytes, side by side in pinned host memory, to device rows `pitch` bytes apart."""
        call = _Copy2D(
            srcMemoryType=_HOST, srcHost=source, srcPitch=width, dstMemoryType=_DEVICE, dstDevice=target, dstPitch=pitch
        )
        call.WidthInBytes, call.Height = width, rows
        self._check(self._driver.cuMemcpy2DAsync_v2(ctypes.byref(call), self._stream), "a copy cannot be queued")

    def event(self) -> int:
        """A new event, for `record` and `wait`; it lasts as long as the runtime."""
        event = ctypes.c_void_p()
        self._check(self._driver.cuEventCreate(ctypes.byref(event), _NO_TIMING), "no CUDA event")
        assert event.value is not None
        self._events.append(event)
        return event.value

    def record(self, event: int) -> None:
        """Queue: mark the place that the stream has come to."""
        self._check(self._driver.cuEventRecord(ctypes.c_void_p(event), self._stream), "a step failed")

    def wait(self, event: int) -> None:
        """Wait until the device has passed the event's last mark. Raises CudaError for work before it that failed."""
        self._check(self._driver.cuEventSynchronize(ctypes.c_void_p(event)), "a step failed on the device")

    def synchronize(self) -> None:
        """Wait for all that was queued. Raises CudaError for work that failed."""
        self._check(self._driver.cuStreamSynchronize(self._stream), "work on the device failed")

    def capture(self, queue: Callable[[], None]) -> int:
        """A graph of what `queue` puts into the stream; nothing of it runs. For `launch`, until `free_graph`."""
        self._check(self._driver.cuStreamBeginCapture_v2(self._stream, _RELAXED), "no capture can begin")
        graph, launchable = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            queue()
        finally:
            status = self._driver.cuStreamEndCapture(self._stream, ctypes.byref(graph))
        self._check(status, "the step cannot be captured")
        status = self._driver.cuGraphInstantiateWithFlags(ctypes.byref(launchable), graph, ctypes.c_ulonglong(0))
        self._driver.cuGraphDestroy(graph)
        self._check(status, "the captured step cannot be instantiated")
        assert launchable.value is not None
        return launchable.value

    def launch(self, graph: int) -> None:
        """Queue a captured graph."""
        self._check(self._driver.cuGraphLaunch(ctypes.c_void_p(graph), self._stream), "a step cannot be launched")

    def free_graph(self, graph: int) -> None:
        self._check(self._driver.cuGraphExecDestroy(ctypes.c_void_p(graph)), "a graph cannot be freed")

    def close(self) -> None:
        """Leave the stream to the next runtime, after all that used this one is gone. A second call does nothing."""
        if self._stream is not None:
            self._stream = None
            while self._events:
                self._driver.cuEventDestroy_v2(self._events.pop())
            with _LOCK:
                _SPARE_STREAMS[self.device].append(self.address)

    def _new_stream(self) -> int:
        stream = ctypes.c_void_p()
        self._check(self._driver.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING), "no CUDA stream")
        assert stream.value is not None
        return stream.value

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self._check(self._driver.cuDeviceGetAttribute(ctypes.byref(value), number, self._handle), "no CUDA device")
        return value.value

    def _check(self, status: Any, what: str) -> None:
        if status:
            raise CudaError(f"{what}: {_words(self._driver, status)}")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
