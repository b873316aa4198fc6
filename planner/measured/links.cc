#include "planner/measured/links.h"

#include <nlohmann/json.hpp>

#include "planner/measured/measured_fields.h"
#include "runtime/base/input_file.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr std::size_t kMostLinksBytes = 64 << 10, kMostLinksValues = 256;
constexpr std::int64_t kMostRanks = std::int64_t{1} << 20;

OperationFit read_fit(MeasuredFields& links, std::string_view key) {
  OperationFit fit;
  if (auto fields = links.object(key)) {
    fit.alpha_s = fields->number("alpha_s");
    fit.beta_s_per_byte = fields->number("beta_s_per_byte");
    fit.busy_alpha_s = fields->number("busy_alpha_s");
    fit.busy_beta_s_per_byte = fields->number("busy_beta_s_per_byte");
    fields->finish();
  }
  return fit;
}

CodingFit read_coding(MeasuredFields& links) {
  CodingFit coding;
  if (auto fields = links.object("coding")) {
    coding.lossless_s_per_byte = fields->number("lossless_s_per_byte");
    coding.int8_s_per_byte = fields->number("int8_s_per_byte");
    coding.int4_s_per_byte = fields->number("int4_s_per_byte");
    coding.load = fields->number("load");
    if (coding.load > 1) fields->wrong("load", "must be a number from 0 to 1");
    fields->finish();
  }
  return coding;
}

Links read(MeasuredFields fields) {
  Links links;
  links.transport = fields.text("transport");
  links.ranks = static_cast<int>(fields.integer("ranks", 2, kMostRanks));
  links.hosts = static_cast<int>(fields.integer("hosts", 1, links.ranks));
  links.all_gather = read_fit(fields, "all_gather");
  links.reduce_scatter = read_fit(fields, "reduce_scatter");
  links.all_reduce = read_fit(fields, "all_reduce");
  links.small = read_fit(fields, "small");
  links.cpu_s_per_byte = fields.number("cpu_s_per_byte");
  links.sum_s_per_byte = fields.number("sum_s_per_byte");
  links.coding = read_coding(fields);
  links.reduces_in_background = fields.boolean("reduces_in_background");
  links.gathers_in_background = fields.boolean("gathers_in_background");
  fields.finish();
  return links;
}

nlohmann::ordered_json json_of(const CodingFit& coding) {
  return {{"lossless_s_per_byte", coding.lossless_s_per_byte},
          {"int8_s_per_byte", coding.int8_s_per_byte},
          {"int4_s_per_byte", coding.int4_s_per_byte},
          {"load", coding.load}};
}

nlohmann::ordered_json json_of(const OperationFit& fit) {
  return {{"alpha_s", fit.alpha_s},
          {"beta_s_per_byte", fit.beta_s_per_byte},
          {"busy_alpha_s", fit.busy_alpha_s},
          {"busy_beta_s_per_byte", fit.busy_beta_s_per_byte}};
}

}  // namespace

CallCost operator+(const CallCost& a, const CallCost& b) {
  CallCost sum = a;
  sum.latency_s += b.latency_s;
  sum.transfer_s += b.transfer_s;
  sum.sent_bytes += b.sent_bytes;
  sum.coding_s += b.coding_s;
  sum.sum_s += b.sum_s;
  sum.busy_latency_s += b.busy_latency_s;
  sum.busy_transfer_s += b.busy_transfer_s;
  return sum;
}

CallCost Links::cost(const OperationFit& fit, int of_ranks, std::int64_t sent_bytes) const {
  if (of_ranks < 2) return {};
  const double messages = static_cast<double>(of_ranks - 1) / static_cast<double>(ranks - 1);
  const auto bytes = static_cast<double>(sent_bytes);
  CallCost cost{fit.alpha_s * messages, fit.beta_s_per_byte * bytes, sent_bytes};
  cost.busy_latency_s = fit.busy_alpha_s * messages;
  cost.busy_transfer_s = fit.busy_beta_s_per_byte * bytes;
  return cost;
}

namespace {

/// Returns the share of the common data that each of `members` members sends to the others.
double given_away(int members) { return static_cast<double>(members - 1) / members; }

}  // namespace

Links Links::of_group(int of_ranks, int of_hosts, int groups) const {
  Links of_group = *this;
  if (hosts < 2 || of_hosts < 2) return of_group;
  // The number of bytes that leave a host for each byte that beta counts.
  const double measured = given_away(hosts) / given_away(ranks);
  const double wanted = groups * given_away(of_hosts) / given_away(of_ranks);
  for (OperationFit* fit : {&of_group.all_gather, &of_group.reduce_scatter, &of_group.all_reduce})
    for (double* beta : {&fit->beta_s_per_byte, &fit->busy_beta_s_per_byte}) *beta *= wanted / measured;
  of_group.coding.of_reductions = static_cast<double>(of_hosts - 1) / (of_ranks - 1);
  of_group.coding.of_gathers = static_cast<double>(of_hosts) / of_ranks;
  return of_group;
}

CallCost Links::all_gather_cost(int of_ranks, std::int64_t part_bytes) const {
  return cost(all_gather, of_ranks, (of_ranks - 1) * part_bytes);
}

absl::StatusOr<Links> parse_links(const std::string& text, const std::string& name) {
  Diagnostics diagnostics(name, text);
  Links links;
  if (const auto root = parse_measurements(text, diagnostics, kMostLinksValues))
    links = read(MeasuredFields(*root, "", diagnostics));
  TESSERA_RETURN_IF_ERROR(status_of(diagnostics, "[T0629] hint: tessera doctor --links writes such files"));
  return links;
}

absl::StatusOr<Links> read_links(const std::filesystem::path& path) {
  TESSERA_ASSIGN_OR_RETURN(const std::string text,
                           read_input_file(path, "links file", kMostLinksBytes, ExitCode::kCorruptData));
  return parse_links(text, path.string());
}

std::string to_json(const Links& links) {
  const nlohmann::ordered_json json = {{"transport", links.transport},
                                       {"ranks", links.ranks},
                                       {"hosts", links.hosts},
                                       {"all_gather", json_of(links.all_gather)},
                                       {"reduce_scatter", json_of(links.reduce_scatter)},
                                       {"all_reduce", json_of(links.all_reduce)},
                                       {"small", json_of(links.small)},
                                       {"cpu_s_per_byte", links.cpu_s_per_byte},
                                       {"sum_s_per_byte", links.sum_s_per_byte},
                                       {"coding", json_of(links.coding)},
                                       {"reduces_in_background", links.reduces_in_background},
                                       {"gathers_in_background", links.gathers_in_background}};
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace tessera
