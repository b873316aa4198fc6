#include "runtime/comm/call_order.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <nlohmann/json.hpp>

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

/// A rank that waits in a call.
struct Node {
  const WaitReport* report;
  const WaitReport::Wait* wait;
};

std::string rank_of(const Node& node) { return "rank " + std::to_string(node.report->rank); }

bool has_begun(const WaitReport& report, const WaitReport::Wait& wait) {
  const auto group = report.groups.find(wait.group);
  return group != report.groups.end() && group->second.begun >= wait.call;
}

/// Returns whether `other` occupies the thread that would begin a call of `group` on the rank of `other`.
bool keeps_from(const Node& other, const std::string& group) {
  const auto& groups = other.report->groups;
  const auto known = groups.find(group);
  if (known == groups.end()) return true;  // the rank has not begun to make the group, and any thread may do so
  const std::vector<int>& threads = known->second.threads;
  return known->second.family == groups.at(other.wait->group).family ||
         std::find(threads.begin(), threads.end(), other.wait->thread) != threads.end();
}

bool waits_for(const Node& node, const Node& other) {
  if (node.report == other.report) return false;
  const WaitReport::Group& group = node.report->groups.at(node.wait->group);
  if (group.is_outside && !other.report->groups.contains(node.wait->group)) return false;
  return group.has(other.report->rank) && !has_begun(*other.report, *node.wait) && keeps_from(other, node.wait->group);
}

/// Returns the shortest ring of ranks that wait for each other, beginning with nodes[first]; nothing if there is none.
std::vector<std::size_t> ring_from(const std::vector<Node>& nodes, std::size_t first) {
  constexpr std::size_t kUnseen = SIZE_MAX;
  std::vector<std::size_t> came_from(nodes.size(), kUnseen);
  for (std::deque<std::size_t> next = {first}; !next.empty(); next.pop_front()) {
    const std::size_t at = next.front();
    for (std::size_t to = 0; to < nodes.size(); ++to) {
      if (!waits_for(nodes[at], nodes[to])) continue;
      if (to == first) {
        std::vector<std::size_t> ring = {at};
        while (ring.back() != first) ring.push_back(came_from[ring.back()]);
        std::reverse(ring.begin(), ring.end());
        return ring;
      }
      if (came_from[to] != kUnseen) continue;
      came_from[to] = at;
      next.push_back(to);
    }
  }
  return {};
}

std::string text_of(const std::vector<Node>& nodes, const std::vector<std::size_t>& ring) {
  std::string text = "ranks disagree: ";
  for (std::size_t i = 0; i < ring.size(); ++i) {
    const Node& node = nodes[ring[i]];
    text += (i > 0 ? "; " : "") + rank_of(node) + " waits in " + node.wait->text + ", which " +
            rank_of(nodes[ring[(i + 1) % ring.size()]]) + " has not begun";
  }
  return text;
}

/// Looks for proof 1 of disagreement_of: different calls of the same number.
std::string different_call(const std::vector<Node>& nodes, const std::vector<WaitReport>& reports) {
  for (const Node& node : nodes) {
    for (const WaitReport& other : reports) {
      const auto group = other.groups.find(node.wait->group);
      if (&other == node.report || other.waits.empty() || group == other.groups.end()) continue;
      const auto call = group->second.latest.find(node.wait->call);
      if (call == group->second.latest.end() || call->second == node.wait->text) continue;
      return "ranks disagree: " + rank_of(node) + " calls " + node.wait->text + ", rank " + std::to_string(other.rank) +
             " calls " + call->second;
    }
  }
  return "";
}

/// Looks for proof 2 of disagreement_of: a call that a rank can no longer begin.
std::string call_without(const std::vector<Node>& nodes, const std::vector<WaitReport>& reports) {
  for (const Node& node : nodes) {
    const WaitReport::Group& group = node.report->groups.at(node.wait->group);
    for (const WaitReport& other : reports) {
      if (!other.has_ended || group.is_outside || !group.has(other.rank) || has_begun(other, *node.wait)) continue;
      return "ranks disagree: " + rank_of(node) + " waits in " + node.wait->text + ", which rank " +
             std::to_string(other.rank) + " has not begun: its program has ended";
    }
  }
  return "";
}

/// Reads a report. A text that a program of another version may have written does not count as a report.
std::optional<WaitReport> report_of(const Json& json) {
  WaitReport report;
  report.rank = json.at("rank").get<int>();
  report.has_ended = json.value("ended", false);
  for (const auto& [name, group] : json.at("groups").items()) {
    WaitReport::Group& read = report.groups[name];
    const auto ranks = group.at("ranks").get<std::vector<int>>();
    if (ranks.size() != 3 || ranks[2] < 1) return std::nullopt;
    read.first = ranks[0], read.count = ranks[1], read.stride = ranks[2];
    read.family = group.at("family").get<std::string>();
    read.begun = group.at("begun").get<std::uint64_t>();
    read.threads = group.at("threads").get<std::vector<int>>();
    read.is_outside = group.value("outside", false);
    for (const Json& call : group.at("latest"))
      read.latest[call.at(0).get<std::uint64_t>()] = call.at(1).get<std::string>();
  }
  for (const Json& wait : json.at("waits")) {
    report.waits.push_back({wait.at("group").get<std::string>(), wait.at("call").get<std::uint64_t>(),
                            wait.at("thread").get<int>(), wait.at("text").get<std::string>()});
    if (!report.groups.contains(report.waits.back().group)) return std::nullopt;
  }
  return report;
}

}  // namespace

std::string WaitReport::to_text() const {
  Json json = {{"rank", rank}, {"waits", Json::array()}, {"groups", Json::object()}};
  for (const Wait& wait : waits)
    json["waits"].push_back({{"group", wait.group}, {"call", wait.call}, {"thread", wait.thread}, {"text", wait.text}});
  for (const auto& [name, group] : groups) {
    Json calls = Json::array();
    for (const auto& [number, text] : group.latest) calls.push_back(Json::array({number, text}));
    json["groups"][name] = {{"ranks", {group.first, group.count, group.stride}},
                            {"family", group.family},
                            {"begun", group.begun},
                            {"threads", group.threads},
                            {"latest", std::move(calls)}};
    if (group.is_outside) json["groups"][name]["outside"] = true;
  }
  if (has_ended) json["ended"] = true;
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::optional<WaitReport> WaitReport::from_text(const std::string& text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) return std::nullopt;
  try {
    return report_of(json);
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

std::string disagreement_of(const std::vector<WaitReport>& reports) {
  std::vector<Node> nodes;
  for (const WaitReport& report : reports)
    for (const WaitReport::Wait& wait : report.waits) nodes.push_back({&report, &wait});
  if (std::string text = different_call(nodes, reports); !text.empty()) return text;
  if (std::string text = call_without(nodes, reports); !text.empty()) return text;
  std::vector<std::size_t> shortest;
  for (std::size_t first = 0; first < nodes.size(); ++first) {
    std::vector<std::size_t> ring = ring_from(nodes, first);
    if (!ring.empty() && (shortest.empty() || ring.size() < shortest.size())) shortest = std::move(ring);
  }
  return shortest.empty() ? "" : text_of(nodes, shortest);
}

}  // namespace tessera
