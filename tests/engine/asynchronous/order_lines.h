#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::testing {

/// A line of sync.record_order.
struct OrderLine {
  std::int64_t event = 0, step = 0, version = 0;
  int rank = 0, owner = 0;
  std::size_t group = 0;
  std::string unit;
  bool is_push = false;
};

/// The lines of such a file, by their events.
std::vector<OrderLine> read_lines(const std::string& path);
/// Writes them as such a file, with events numbered anew as they stand.
void write_lines(const std::string& path, int ranks, const std::vector<OrderLine>& lines);
/// What the ranks do, each in the order of `lines`, merged at random.
std::vector<OrderLine> shuffled(const std::vector<OrderLine>& lines, int ranks, std::uint64_t seed);

/// The lines as they are when they happen in the order in which they stand: with versions counted anew.
std::vector<OrderLine> counted(std::vector<OrderLine> lines);

/// base^exponent by repeated squaring, as bias corrections are computed.
double power(double base, std::int64_t exponent);

}  // namespace tessera::testing
