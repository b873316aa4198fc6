"""The time a run may take."""

import time


class Budget:
    """Seconds from its making on. `clock` counts seconds."""

    def __init__(self, seconds, clock=time.monotonic):
        self.seconds = seconds
        self._clock = clock
        self._begin = clock()

    def spent(self):
        return self._clock() - self._begin

    def left(self):
        return max(self.seconds - self.spent(), 0.0)

    def refusal(self, wanted_s):
        """Why something that takes about so long is not begun; None if it fits."""
        if wanted_s <= self.left():
            return None
        return f"{self.left():.0f} s of {self.seconds:.0f} were left, and it takes about {wanted_s:.0f}"
