"""Checks conditions that must hold before anything is timed. It uses the standard library only."""


class CheckFailed(Exception):
    pass


def same_losses(losses):
    """Checks `losses`: {strategy: [loss of each step]}. All must be equal, bit for bit."""
    (first, wanted), *others = losses.items()
    for name, got in others:
        if len(got) != len(wanted):
            raise CheckFailed(f"{name} ran {len(got)} steps, {first} {len(wanted)}")
        for step, (a, b) in enumerate(zip(wanted, got), start=1):
            if a != b:
                raise CheckFailed(f"losses of step {step} differ: {first} {a!r}, {name} {b!r}")
    return f"{len(losses)} strategies, {len(wanted)} steps: losses equal bit for bit"


def memory_as_planned(planned):
    """Checks `planned`: {strategy: {"allocated_bytes", "planned_bytes"}}."""
    for name, bytes_of in planned.items():
        if bytes_of["allocated_bytes"] != bytes_of["planned_bytes"]:
            raise CheckFailed(f"{name} allocated {bytes_of['allocated_bytes']} bytes, its plan says "
                              f"{bytes_of['planned_bytes']}")
    return f"{len(planned)} strategies: bytes allocated = bytes planned"


def peers_train_alike(losses, first, later):
    """Checks `losses`: {peer: [[loss of each step] of each rank]}, for the first steps. The peers (the compared
    frameworks) start from the same weights and read the same samples. A rank's first loss may differ from the first
    peer's first loss by `first` (relative), and later losses by `later`. `later` is larger, since Adam's first steps
    are lr * sign(gradient). If a gradient is only a rounding error, the order in which a peer adds decides its sign."""
    (reference, wanted), *others = losses.items()
    for name, got in others:
        for rank, (a_steps, b_steps) in enumerate(zip(wanted, got, strict=True)):
            for step, (a, b) in enumerate(zip(a_steps, b_steps, strict=True), start=1):
                # The comparison is written in such a way that NaN fails.
                if not abs(a - b) <= (first if step == 1 else later) * abs(a):
                    raise CheckFailed(f"losses of rank {rank}, step {step} differ: {reference} {a}, {name} {b}")
    return (f"{len(losses)} peers: first losses equal within {first:g}, "
            f"those up to step {len(wanted[0])} within {later:g}")
