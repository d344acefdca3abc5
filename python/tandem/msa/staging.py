"""Host memory that is filled for every step and the device memory that it lands in."""

import torch

from tandem.msa.plan_rows import Int32Array


class Staging:
    """One int32 matrix [fields, width] on the device with the host memory that feeds it.

    On the CPU both are the same memory. Elsewhere the host side is a ring of pinned buffers, one more than the steps
    in flight, so that no copy that may still be running is overwritten.

    Attributes:
        tensor: [fields, width] int32 on the device; its address never changes.
    """

    def __init__(self, fields: int, width: int, device: torch.device, steps_in_flight: int) -> None:
        self.tensor = torch.zeros((fields, width), dtype=torch.int32, device=device)
        if device.type == "cpu":
            self._ring = [self.tensor]
        else:
            self._ring = [
                torch.zeros((fields, width), dtype=torch.int32).pin_memory() for _ in range(steps_in_flight + 1)
            ]
        self._arrays: list[Int32Array] = [tensor.numpy() for tensor in self._ring]
        self._turn = 0

    def begin(self) -> Int32Array:
        """The host array to fill for the next step; what it held before is dead."""
        self._turn = (self._turn + 1) % len(self._ring)
        return self._arrays[self._turn]

    def commit(self) -> None:
        """Sends the filled array to the device, in stream order."""
        source = self._ring[self._turn]
        if source is not self.tensor:
            self.tensor.copy_(source, non_blocking=True)
