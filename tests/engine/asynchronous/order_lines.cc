#include "tests/engine/asynchronous/order_lines.h"

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <tuple>

namespace tessera::testing {

double power_of(double base, std::int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1, base *= base) {
    if ((exponent & 1) != 0) result *= base;
  }
  return result;
}

std::vector<OrderLine> read_lines(const std::string& path) {
  std::vector<OrderLine> lines;
  std::ifstream file(path);
  std::string text;
  std::getline(file, text);  // this line names the number of ranks
  while (std::getline(file, text)) {
    const auto item = nlohmann::json::parse(text);
    lines.push_back({item.at("event"), item.at("step"), item.at("version"), item.at("rank"), item.at("shard"),
                     item.at("group"), item.at("unit"), item.at("op") == "push"});
  }
  std::ranges::sort(lines, {}, &OrderLine::event);
  return lines;
}

void write_lines(const std::string& path, int ranks, const std::vector<OrderLine>& lines) {
  std::ofstream file(path);
  file << nlohmann::json{{"tessera_order", 1}, {"ranks", ranks}}.dump() << "\n";
  std::int64_t event = 0;
  for (const OrderLine& line : lines) {
    file << nlohmann::json{{"event", event++},    {"rank", line.rank},
                           {"step", line.step},   {"op", line.is_push ? "push" : "pull"},
                           {"unit", line.unit},   {"group", line.group},
                           {"shard", line.owner}, {"version", line.version}}
                .dump()
         << "\n";
  }
}

std::vector<OrderLine> shuffled(const std::vector<OrderLine>& lines, int ranks, std::uint64_t seed) {
  std::int64_t last_step = 0;
  for (const OrderLine& line : lines) last_step = std::max(last_step, line.is_push ? line.step : 0);
  std::vector<std::vector<OrderLine>> of_rank(static_cast<std::size_t>(ranks));
  std::vector<OrderLine> after;  // lines after the last push, when ranks have waited for each other
  for (const OrderLine& line : lines)
    (line.step > last_step ? after : of_rank[static_cast<std::size_t>(line.rank)]).push_back(line);
  std::mt19937_64 random(seed);
  std::vector<std::size_t> next(of_rank.size());
  std::vector<OrderLine> merged;
  while (merged.size() + after.size() < lines.size()) {
    const std::size_t rank = random() % of_rank.size();
    // Several lines of a rank are taken at a time, so that the order of whole steps changes too.
    for (std::size_t k = random() % 20; k > 0 && next[rank] < of_rank[rank].size(); --k)
      merged.push_back(of_rank[rank][next[rank]++]);
  }
  merged.insert(merged.end(), after.begin(), after.end());
  return merged;
}

std::vector<OrderLine> counted(std::vector<OrderLine> lines) {
  std::map<std::tuple<std::string, std::size_t, int>, std::int64_t> versions;
  for (OrderLine& line : lines) {
    std::int64_t& now = versions[{line.unit, line.group, line.owner}];
    line.version = line.is_push ? now++ : now;
  }
  return lines;
}

}  // namespace tessera::testing
