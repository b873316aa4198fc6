"""programs_test.py runs this program. torch.distributed and tessera begin in either order. They agree on the numbers of
the ranks, or end with an error."""

import functools
import os
import tempfile
import time

import torch
from forked import run_forked
from free_port import free_port
from patience import in_time
from torch import distributed, multiprocessing

import tessera


def both(tessera_first):
    if tessera_first:
        tessera.init()
    distributed.init_process_group("gloo")
    tessera.init()
    ranks = torch.ones(())
    distributed.all_reduce(ranks)
    distributed.destroy_process_group()
    engine = tessera.Engine(torch.nn.Linear(2, 2), {})
    print(f"both have {int(ranks)} and {int(tessera.all_reduce(1))} ranks", flush=True)
    engine.close()


def of_one_rank_each(tessera_first):
    """The launcher says that there are two ranks, and the program makes two groups of one rank."""
    if tessera_first:
        tessera.init()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    tessera.Engine(torch.nn.Linear(2, 2), {})


def waits_in_torch_distributed(kind):
    """Rank 0 waits in a call of torch.distributed. Rank 1 waits in a call of its Engine, over the transport `kind`. If
    `kind` is "gloo", the process group is made right before the call of rank 0."""
    if kind == "host":
        distributed.init_process_group("gloo")
    model = make_model()
    engine = tessera.Engine(model, {**SGD, "comm": {"transport": kind, "timeout_s": 60}})
    for _ in range(2):
        engine.backward(model(BATCHES[0]).square().mean())
        if kind == "gloo":
            distributed.init_process_group("gloo")
        print(f"waits from {time.monotonic()}", flush=True)
        if tessera.rank() == 0:
            distributed.barrier()
        engine.step()


def waits_for_one_that_computes():
    """Rank 0 waits in torch.distributed while rank 1 computes, and rank 1 waits in its Engine while rank 0 computes.
    Both waits are correct, and both end."""
    distributed.init_process_group("gloo")
    model = make_model()
    engine = tessera.Engine(model, SGD)
    for slow in (0, 1):
        if tessera.rank() == slow:
            time.sleep(6)
        work = distributed.all_reduce(torch.ones(()), async_op=True)
        engine.backward(model(BATCHES[0]).square().mean())
        if tessera.rank() != slow:
            time.sleep(6)
        work.wait()
        distributed.barrier()
        engine.step()
    engine.close()


def launched():
    for kind in ("host", "gloo"):
        codes, output = run_forked(2, functools.partial(waits_in_torch_distributed, kind))
        ended = time.monotonic()
        assert codes == [70, 70], f"{kind}: ended with {codes}:\n{output}"
        for rank in range(2):
            told = [line for line in output.splitlines() if f"rank {rank}/2: ranks disagree" in line]
            assert told and "rank 0 waits in barrier of torch.distributed (#1), which rank 1 has not begun" in told[0] \
                and "rank 1 waits in " in told[0], f"{kind}:\n{output}"
        begun = max(float(line.removeprefix("waits from ")) for line in output.splitlines() if line.startswith("waits from "))
        assert in_time(ended - begun, 10), f"{kind}: it took {ended - begun} s"
    codes, output = run_forked(2, waits_for_one_that_computes)
    assert codes == [0, 0], f"ended with {codes}:\n{output}"
    for tessera_first in (False, True):
        codes, output = run_forked(2, functools.partial(both, tessera_first))
        assert codes == [0, 0] and output.count("both have 2 and 2 ranks") == 2, f"{tessera_first}: ended with {codes}:\n{output}"
    # One source says rank 0 of 2, and the other source says rank 0 of 1, so the program is wrong in both orders.
    for tessera_first, text in ((False, "torch.distributed.get_world_size()=1"), (True, "init_process_group before tessera.init")):
        codes, output = run_forked(2, functools.partial(of_one_rank_each, tessera_first))
        assert codes == [78, 78] and text in output, f"{tessera_first}: ended with {codes}:\n{output}"


# The programs from here on have no launcher. They start their own processes, as torch.multiprocessing.spawn does.


def trained(model, batches, engine=None):
    """Returns the weights after SGD at rate 0.1, with an Engine or with plain PyTorch."""
    optimizer = None if engine else torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches:
        loss = model(batch).square().mean()
        if engine:
            engine.backward(loss)
            engine.step()
        else:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return engine.state_dict() if engine else model.state_dict()


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


SGD = {"strategy": "FULL_SHARD", "optimizer": {"type": "sgd", "lr": 0.1, "weight_decay": 0.0}}
BATCHES = [torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def spawned(rank, method):
    distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    assert (tessera.rank(), tessera.world_size()) == (rank, 2)
    wanted, model = trained(make_model(), BATCHES), make_model()
    engine = tessera.Engine(model, SGD)
    assert tessera.all_gather(str(tessera.local_rank())) == ["0", "1"]
    state = trained(model, [batch.chunk(2)[rank] for batch in BATCHES], engine)
    if rank == 0:
        assert all(torch.allclose(state[name], value, rtol=0, atol=1e-6) for name, value in wanted.items()), state
    distributed.destroy_process_group()


def late(rank, method):
    model = make_model()
    engine = tessera.Engine(model, SGD)
    engine.backward(model(BATCHES[0]).square().mean())
    distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    try:
        engine.step()
    except tessera.Error as error:
        assert error.exit_code == 78 and f"rank {rank} of 2" in str(error) and "rank 0 of 1 (started alone)" in str(error), error
        distributed.barrier()  # rank 0 holds the store that the other rank needs
    else:
        raise AssertionError("a step of one rank that the process group counts as two")


def asked_too_early(rank, method):
    assert tessera.world_size() == 1
    distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    try:
        tessera.Engine(make_model(), SGD)
    except tessera.Error as error:
        assert error.exit_code == 78 and "before tessera.rank" in str(error), error
        distributed.barrier()  # rank 0 holds the store that the other rank needs
    else:
        raise AssertionError("a sampler has the numbers of one rank")


def one_raises(rank, method):
    distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    tessera.init()
    if rank == 1:
        raise ValueError("rank 1 has a fault of its own")
    tessera.barrier()


class Leave(SystemExit):
    pass


def leaves(rank, method):
    distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    tessera.init()
    tessera.barrier()
    raise Leave(0)  # the rank ends with success, as with sys.exit(0)


def server_ends(rank, method):
    distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    distributed.barrier()
    if rank == 0:  # rank 0 serves the store
        os._exit(0)
    try:
        tessera.init()
    except tessera.Error as error:
        assert error.exit_code == 75 and "serves their store is gone" in str(error), error
        os._exit(0)
    raise AssertionError("a rank met one that had ended")


def spawn(program, method):
    """Starts processes as torch.multiprocessing.spawn does, but forks them, since imports take longer than these programs."""
    multiprocessing.start_processes(program, (method,), nprocs=2, start_method="fork")


def alone():
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    spawn(spawned, "env://")
    for program in (late, asked_too_early, leaves, server_ends):
        os.environ["MASTER_PORT"] = str(free_port())
        spawn(program, "env://")
    os.environ["MASTER_PORT"] = str(free_port())
    begun = time.monotonic()
    try:
        spawn(one_raises, "env://")
    except multiprocessing.ProcessRaisedException as error:
        assert "a fault of its own" in str(error), error
    else:
        raise AssertionError("an exception of a spawned rank was lost")
    assert in_time(time.monotonic() - begun, 100), "rank 0 waited for one that had ended"
    del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    spawn(spawned, f"tcp://127.0.0.1:{free_port()}")
    with tempfile.TemporaryDirectory() as folder:
        spawn(spawned, f"file://{folder}/meet")


for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
    os.environ.pop(variable, None)
launched()
alone()
print("all orders were right")
