#pragma once

#include <cstddef>
#include <vector>

namespace tessera {

/// A winner tree over players 0 ... players - 1. Players that take part have a score, and the player with the best
/// score can be read at any time. Each node of the tree holds the better of its two children. A change therefore costs
/// O(log players), and reading the best player costs O(1). Nothing is allocated after construction.
class Tournament {
 public:
  explicit Tournament(int players);

  /// Makes `player` take part with `score`, or changes its score.
  void put(int player, std::size_t score);
  /// Makes `player` no longer take part.
  void remove(int player);
  bool contains(int player) const { return takes_part_[static_cast<std::size_t>(player)]; }

  bool empty() const { return winner_[1] < 0; }
  /// Returns the player with the highest score; among equal scores, the player with the lowest number. REQUIRES:
  /// !empty().
  int best() const { return winner_[1]; }

 private:
  void play_again(int player);
  int better(int a, int b) const;

  std::size_t leaves_ = 1;   ///< a power of two
  std::vector<int> winner_;  ///< winner among the children 2k and 2k + 1 of node k; -1: no player below the node takes
                             ///< part
  std::vector<std::size_t> score_;
  std::vector<bool> takes_part_;
};

}  // namespace tessera
