"""Reinforcement learning: a policy learns to keep a point on a line near the origin, by REINFORCE with a baseline.

Each rank first plays its own games with the present policy, without gradients. Then all ranks make one step on these
games. The policy is sharded, and all ranks play the same number of games and moves, since each move gathers its units.

    python policy_gradient.py
    tessera launch -n 2 -- python policy_gradient.py
"""

import torch
from torch import nn

import tessera

GAMES, MOVES, ACTIONS = 128, 12, 3


def play(policy: nn.Module, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns observations [MOVES, games, 2], moves [MOVES, games], and the rewards that followed [MOVES, games]."""
    games = GAMES // tessera.world_size()
    place, speed = torch.randn(games, generator=generator), torch.zeros(games)
    seen, done, won = [], [], []
    for _ in range(MOVES):
        state = torch.stack([place, speed], dim=1)
        with torch.no_grad():
            chances = policy(state).softmax(dim=1)
        action = torch.multinomial(chances, 1, generator=generator).squeeze(1)
        speed = 0.8 * speed + 0.3 * (action - 1)
        place = place + speed
        seen.append(state)
        done.append(action)
        won.append(-place.abs())
    returns = torch.stack(won).flip(0).cumsum(0).flip(0)
    return torch.stack(seen), torch.stack(done), returns


def main() -> None:
    torch.manual_seed(1)
    policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, ACTIONS))
    engine = tessera.Engine(policy, {"units": {"classes": ["Linear"]}, "optimizer": {"type": "adam", "lr": 1e-2, "weight_decay": 0}, "gradient_clipping": 1.0})
    generator = torch.Generator().manual_seed(tessera.seed_for_rank(1))
    for step in range(1, 61):
        seen, done, returns = play(policy, generator)
        baseline = tessera.all_reduce(returns.mean(dim=1, keepdim=True), "mean")
        chosen = policy(seen).log_softmax(dim=2).gather(2, done.unsqueeze(2)).squeeze(2)
        engine.backward(-(chosen * (returns - baseline)).mean())
        engine.step()
        won = tessera.all_reduce(returns[0].mean().item(), "mean")
        if step % 10 == 0 and tessera.rank() == 0:
            print(f"step {step}  reward {won:.4f}", flush=True)


if __name__ == "__main__":
    main()
