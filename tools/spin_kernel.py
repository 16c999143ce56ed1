"""A handshake by a kernel that spins, for comparison: the library has none.

The protocol is that of the library's words: write the peer's word, wait for the own one, put it
back to 0. A thread a peer does it; two sets of words take turns. A wait has a limit, and a wait
that was not answered leaves a flag.
"""

from __future__ import annotations

from ctypes import c_int, c_uint64, c_void_p

import torch

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.errors import UlyssesError
from ulysses_ops.tools.device_code import DeviceKernel
from ulysses_ops.window_spec import WindowSpec
from ulysses_ops.windows import reserve

LIMIT_NS = 2_000_000_000
TAG = 0x5A17
SETS = 2
SOURCE = r"""
extern "C" __global__ void handshake(const unsigned long long* bases, int set, int rank,
                                     int world_size, unsigned long long tag,
                                     unsigned long long limit_ns, unsigned int* failed) {
  const int peer = threadIdx.x;
  if (peer >= world_size || peer == rank) return;
  auto* theirs = reinterpret_cast<unsigned long long*>(bases[peer]) + set * world_size + rank;
  auto* mine = reinterpret_cast<unsigned long long*>(bases[rank]) + set * world_size + peer;
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(theirs), "l"(tag) : "memory");
  unsigned long long begin, now, value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  for (;;) {
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(mine) : "memory");
    if (value == tag) break;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (now - begin > limit_ns) {
      atomicExch(failed, 1u);
      return;
    }
  }
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(mine), "l"(0ull) : "memory");
}
"""


class SpinHandshake:
    """Handshakes of all ranks by spinning kernels, over words of their own."""

    def __init__(self, comm: UlyssesCommunicator, *, limit_ns: int = LIMIT_NS) -> None:
        """Compile the kernel and map the words. Collective; the ranks line up before the first.

        Raises:
            UlyssesError: windows are not mapped by the peers, or the kernel cannot be compiled.
        """
        world_size = comm.world_size
        self._kernel = DeviceKernel(SOURCE, "handshake")
        # Of 64-bit words, one a sender, for each set: as many as an (1, W, W, 2) scatter receives.
        spec = WindowSpec("bench.words", "scatter", (1, world_size, world_size, SETS), torch.int64)
        (self._window,) = reserve(comm, [spec])
        if self._window.memory is None:
            message = "spinning handshake: no rank maps its peers' windows; use transport 'ce'"
            raise UlyssesError(message)
        self._window.tensor.zero_()
        self._bases = torch.tensor(self._window.memory.pointers, device=comm.device)
        self._failed = torch.zeros(1, dtype=torch.int32, device=comm.device)
        # Streams of another priority share no hardware queue with the caller's; and blocks of the
        # highest priority take the next place that is free.
        self._stream = torch.cuda.Stream(comm.device, priority=-1)
        self._threads = 32 * -(-world_size // 32)
        self._arguments = [
            (
                c_void_p(self._bases.data_ptr()),
                c_int(number),
                c_int(comm.rank),
                c_int(world_size),
                c_uint64(TAG),
                c_uint64(limit_ns),
                c_void_p(self._failed.data_ptr()),
            )
            for number in range(SETS)
        ]

    def run(self, count: int) -> None:
        """Enqueue ``count`` handshakes, an even number, behind the current stream. Collective."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for number in range(count):
                self._kernel.launch(self._threads, self._arguments[number % SETS])
        torch.cuda.current_stream().wait_stream(self._stream)

    def is_at_rest(self) -> bool:
        """Whether all waits were answered, and every word is 0 again. Waits on the host."""
        return int(self._failed.item()) == 0 and not bool(self._window.tensor.any())
