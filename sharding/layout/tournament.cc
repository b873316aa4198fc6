#include "sharding/layout/tournament.h"

#include <bit>

namespace tessera {

Tournament::Tournament(int players)
    : leaves_(std::bit_ceil(static_cast<std::size_t>(players < 1 ? 1 : players))),
      winner_(2 * leaves_, -1),
      score_(leaves_, 0),
      takes_part_(leaves_, false) {}

void Tournament::put(int player, std::size_t score) {
  const auto i = static_cast<std::size_t>(player);
  if (takes_part_[i] && score_[i] == score) return;
  takes_part_[i] = true;
  score_[i] = score;
  play_again(player);
}

void Tournament::remove(int player) {
  const auto i = static_cast<std::size_t>(player);
  if (!takes_part_[i]) return;
  takes_part_[i] = false;
  play_again(player);
}

int Tournament::better(int a, int b) const {
  if (a < 0 || b < 0) return a < 0 ? b : a;
  return score_[static_cast<std::size_t>(b)] > score_[static_cast<std::size_t>(a)] ? b : a;  // `a` has the lower number
}

void Tournament::play_again(int player) {
  std::size_t node = leaves_ + static_cast<std::size_t>(player);
  winner_[node] = contains(player) ? player : -1;
  for (node /= 2; node >= 1; node /= 2) winner_[node] = better(winner_[2 * node], winner_[2 * node + 1]);
}

}  // namespace tessera
