"""Why a step could not be captured, said so that it can be mended."""

from __future__ import annotations

from ulysses_ops.errors import UlyssesError

KEEP_ON_DEVICE = (
    "the step synchronises with the host or uses the legacy stream (.item(), .cpu(), nonzero(), "
    "torch.cuda.synchronize(), a print of a tensor); keep values on the device"
)
JOIN = (
    "the step forked to another stream and did not join it; let the current stream wait for it "
    "before returning"
)
FORK = (
    "the step waits for work of a stream that was not forked inside it; let that stream wait for "
    "the current one first"
)
LEGACY = "the step uses the legacy stream; use the current stream, or one forked from it"
GENERATOR = (
    "the step draws from a generator that the graph does not know, or seeds one; pass it in "
    "generators= and seed outside the step"
)
# Part of the text of an error -> what it means for whoever wrote the step.
MEANINGS = {
    "operation not permitted when stream is capturing": KEEP_ON_DEVICE,
    "capturing stream has unjoined work": JOIN,
    "dependency created on uncaptured work in another stream": FORK,
    "would make the legacy stream depend on a capturing": LEGACY,
    "CUDA generator not in capture mode": GENERATOR,
}


def explained(error: Exception) -> Exception:
    """The error itself, or one that also says what it means where that is known."""
    text = str(error)
    for sign, meaning in MEANINGS.items():
        if sign in text:
            return UlyssesError(f"{meaning} ({type(error).__name__}: {text.splitlines()[0]})")
    return error
