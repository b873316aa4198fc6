"""rules_test.py runs this program on two ranks and on four ranks, with parameter servers. Two ranks are one replica
("sync.replica_ranks"). Each rank gets the same values as a program in plain PyTorch that makes the steps of all
replicas, one after the other."""

import tessera
import torch
from torch import nn

rank, ranks = tessera.rank(), tessera.world_size()
OF_REPLICA = 2
REPLICAS, REPLICA = ranks // OF_REPLICA, rank // OF_REPLICA
STEPS, WIDTH, ROWS, LR = 6, 64, 8, 0.5
torch.set_num_threads(1)


def strategy(**sync):
    return {"strategy": "SHARD_OPTIMIZER", "units": {"classes": ["Linear"]}, "optimizer": {"type": "sgd", "lr": LR, "weight_decay": 0},
            "gradient_clipping": 0, "gradient_sync": "last_microbatch", "comm": {"timeout_s": 60},
            "sync": {"type": "asynchronous", "owners": "servers", "replica_ranks": OF_REPLICA, **sync}}


def net():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))


def loss_of(model, step, of):
    generator = torch.Generator().manual_seed(100 * step + of)
    inputs, wanted = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
    return (model(inputs) - wanted).square().mean()


def gradients_of(model, step, of):
    """Returns the loss and the gradients of rank `of`."""
    model.zero_grad()
    loss = loss_of(model, step, of)
    loss.backward()
    return loss.item(), [layer.weight.grad.clone() for layer in model]


def play(divides_by_age):
    """Makes rounds in plain PyTorch: all replicas compute with the same values, and replica after replica pushes the
    mean of its ranks' gradients. Returns the losses [replica][step] and the last values."""
    model, losses = net(), [[] for _ in range(REPLICAS)]
    for step in range(STEPS):
        rounds = []
        for replica in range(REPLICAS):
            (one, first), (other, second) = (gradients_of(model, step, OF_REPLICA * replica + k) for k in range(OF_REPLICA))
            losses[replica].append((one + other) / 2)
            rounds.append([(a + b) / 2 for a, b in zip(first, second)])
        for age, gradients in enumerate(rounds):  # each push makes the later gradients of the round older by one
            with torch.no_grad():
                for layer, gradient in zip(model, gradients):
                    layer.weight -= gradient / (1 + age if divides_by_age else 1) * LR
    return losses, [layer.weight.detach() for layer in model]


def expect_rounds_that_plain_pytorch_makes(scale):
    engine = tessera.Engine(net(), strategy(max_staleness=0, scale=scale))
    results = []
    for step in range(STEPS):
        engine.backward(loss_of(engine.model, step, rank), samples=ROWS)
        results.append(engine.step())
    losses, wanted = play(scale == "inverse")
    assert [result.loss for result in results] == losses[REPLICA], "the loss is the replica's"
    assert {result.staleness_max for result in results} == {REPLICA}, "pushes of the replicas before this one"
    assert engine.samples_seen == STEPS * ROWS * OF_REPLICA
    tessera.barrier()
    with engine.gathered():
        assert all(torch.equal(*pair) for pair in zip(engine.model.parameters(), wanted)), "the values"
    tessera.barrier()
    engine.close()
    tessera.barrier()


def expect_refusals():
    engine = tessera.Engine(net(), strategy())
    try:
        engine.backward_nothing()
    except tessera.Error as error:
        assert error.exit_code == 64 and "sync.replica_ranks" in str(error), error
    else:
        raise AssertionError("backward_nothing before a step's first microbatch is refused")
    tessera.barrier()
    engine.close()
    tessera.barrier()
    try:
        tessera.Engine(net(), strategy(replica_ranks=3))
    except tessera.Error as error:
        assert error.exit_code == 78 and f"{ranks} ranks do not make replicas of 3" in str(error), error
    else:
        raise AssertionError("ranks that make no whole replicas are refused")


for of_age in ("none", "inverse"):
    expect_rounds_that_plain_pytorch_makes(of_age)
expect_refusals()
print("replicas trained like plain PyTorch")
