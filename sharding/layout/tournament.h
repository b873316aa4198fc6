#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera {

/// A winner tree over players 0 ... players - 1. Some of them take part with a score, and the leader is known at any
/// time. Each node of the tree knows the better of its two children: a change costs O(log players), the leader O(1),
/// and nothing is allocated after construction.
class Tournament {
 public:
  explicit Tournament(int players);

  /// Lets `player` take part with `score`, or changes its score.
  void put(int player, std::size_t score);
  /// Lets `player` take part no more.
  void remove(int player);
  bool contains(int player) const { return takes_part_[static_cast<std::size_t>(player)]; }

  bool empty() const { return winner_[1] < 0; }
  /// Returns the player with the highest score; among equal scores, the one with the lowest number. REQUIRES: !empty().
  int best() const { return winner_[1]; }

 private:
  void play_again(int player);
  int better(int a, int b) const;

  std::size_t leaves_ = 1;   ///< a power of two
  std::vector<int> winner_;  ///< winner among the children 2k and 2k + 1 of node k; -1: nobody takes part below it
  std::vector<std::size_t> score_;
  std::vector<bool> takes_part_;
};

}  // namespace tessera
