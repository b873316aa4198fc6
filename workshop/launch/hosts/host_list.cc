#include "workshop/launch/hosts/host_list.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <set>

#include "runtime/base/input_file.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

constexpr std::string_view kBlanks = " \t\r\v\f";

/// A part of a list of hosts, and the column at which that part begins.
struct Piece {
  std::string_view text;
  std::size_t column = 1;  ///< column of the part's first character, counted from 1

  Piece from(std::size_t offset) const { return {text.substr(offset), column + offset}; }
};

/// The list that is being read: its hosts, and the prefix of its error messages.
struct List {
  std::string name;  ///< "--hosts", or the file
  ExitCode code = ExitCode::kUsage;
  std::size_t line = 0;  ///< 0: the text is that of --hosts, without lines
  std::vector<HostSlots> hosts;
  std::set<std::string> names;  ///< those of `hosts`

  absl::Status refuse(std::size_t column, const std::string& text) const {
    const std::string where =
        line == 0 ? fmt::format("{}, column {}", name, column) : fmt::format("{}:{}:{}", name, line, column);
    return make_error(code, fmt::format("launch: {}: {}", where, text));
  }
};

bool may_stand_in_a_name(char c) {
  const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  return letter || (c >= '0' && c <= '9') || std::string_view("._-@%+").find(c) != std::string_view::npos;
}

absl::Status read_slots(const List& list, const Piece& piece, int& slots) {
  const char* const end = piece.text.data() + piece.text.size();
  const auto [stopped, error] = std::from_chars(piece.text.data(), end, slots);
  if (error == std::errc() && stopped == end && slots >= 1 && slots <= kMostSlots) return absl::OkStatus();
  return list.refuse(piece.column,
                     fmt::format("the number of slots must be 1 to {}, got {}. [T0842] hint: write how many ranks "
                                 "the host is to start, as in a:2",
                                 kMostSlots, quoted_text(piece.text)));
}

/// Takes the name at the front of `piece`: the text up to a ":", or the text in brackets.
absl::Status take_name(const List& list, Piece& piece, std::string& name) {
  const bool in_brackets = piece.text.starts_with('[');
  const std::size_t end = piece.text.find(in_brackets ? ']' : ':');
  if (in_brackets && end == std::string_view::npos)
    return list.refuse(piece.column, "no \"]\" ends this address. [T0843] hint: write it as in [fd00::1]:2");
  const Piece inner = in_brackets ? Piece{piece.text.substr(1, end - 1), piece.column + 1}
                                  : Piece{piece.text.substr(0, end), piece.column};
  if (inner.text.empty())
    return list.refuse(inner.column, "no name of a host stands here. [T0844] hint: write hosts as in a:2,b:2");
  if (inner.text.starts_with('-'))
    return list.refuse(inner.column, fmt::format("{} begins with \"-\", so ssh would take it for an option. "
                                                 "[T0845] hint: give the name or address of a host",
                                                 quoted_text(inner.text)));
  for (std::size_t i = 0; i < inner.text.size(); ++i)
    if (!may_stand_in_a_name(inner.text[i]) && !(in_brackets && inner.text[i] == ':'))
      return list.refuse(inner.column + i,
                         fmt::format("{} may not stand in the name of a host. [T0846] hint: give a name or an address "
                                     "with letters, digits and . _ - @ alone",
                                     quoted_text(inner.text.substr(i, 1))));
  name = inner.text;
  piece = piece.from(in_brackets ? end + 1 : std::min(end, piece.text.size()));
  return absl::OkStatus();
}

/// Reads a text such as "a:2" or "a" and adds the host. `counted` is set to whether the text gave a number of slots.
absl::Status add_host(List& list, Piece piece, bool& counted) {
  HostSlots host;
  const std::size_t column = piece.column;
  TESSERA_RETURN_IF_ERROR(take_name(list, piece, host.name));
  counted = !piece.text.empty();
  if (counted && !piece.text.starts_with(':'))
    return list.refuse(piece.column, "only \":\" and a number may follow an address. [T0847] hint: as in [fd00::1]:2");
  if (std::ranges::count(piece.text, ':') > 1)
    return list.refuse(column, "an IPv6 address needs brackets. [T0848] hint: write it as in [fd00::1]:2");
  if (counted) TESSERA_RETURN_IF_ERROR(read_slots(list, piece.from(1), host.slots));
  if (!list.names.insert(host.name).second)
    return list.refuse(column, fmt::format("host {} is named for the second time. [T0849] hint: name it once, with all "
                                           "of its slots",
                                           quoted_text(host.name)));
  list.hosts.push_back(std::move(host));
  return absl::OkStatus();
}

/// Removes the next word from the front of `rest`, and returns it. The word is empty if there is none.
Piece take_word(Piece& rest) {
  rest = rest.from(std::min(rest.text.find_first_not_of(kBlanks), rest.text.size()));
  const std::size_t end = std::min(rest.text.find_first_of(kBlanks), rest.text.size());
  const Piece word = {rest.text.substr(0, end), rest.column};
  rest = rest.from(end);
  return word;
}

absl::Status add_line(List& list, std::string_view text) {
  Piece rest = {text.substr(0, text.find('#')), 1};
  const Piece name = take_word(rest);
  if (name.text.empty()) return absl::OkStatus();
  bool counted = false;
  TESSERA_RETURN_IF_ERROR(add_host(list, name, counted));
  for (Piece word = take_word(rest); !word.text.empty(); word = take_word(rest)) {
    constexpr std::string_view kSlots = "slots=";
    if (!word.text.starts_with(kSlots))
      return list.refuse(word.column, fmt::format("{} says nothing that is known. [T0850] hint: a line is a host, and "
                                                  "then slots= with a number, as in: a slots=2",
                                                  quoted_text(word.text)));
    if (counted)
      return list.refuse(word.column,
                         "the slots of this host are given twice. [T0851] hint: write a slots=2, or a:2, and not both");
    counted = true;
    TESSERA_RETURN_IF_ERROR(read_slots(list, word.from(kSlots.size()), list.hosts.back().slots));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<HostSlots>> parse_hosts(std::string_view text) {
  List list;
  list.name = "--hosts";
  for (Piece rest = {text, 1};; rest = rest.from(1)) {
    const std::size_t end = std::min(rest.text.find(','), rest.text.size());
    bool counted = false;
    TESSERA_RETURN_IF_ERROR(add_host(list, {rest.text.substr(0, end), rest.column}, counted));
    rest = rest.from(end);
    if (rest.text.empty()) return list.hosts;
  }
}

absl::StatusOr<std::vector<HostSlots>> read_hostfile(const std::string& path) {
  constexpr std::size_t kMostBytes = 1 << 20;
  TESSERA_ASSIGN_OR_RETURN(const std::string text, read_input_file(path, "host file", kMostBytes));
  List list;
  list.name = clipped(path, 200);
  list.code = ExitCode::kConfig;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    ++list.line;
    TESSERA_RETURN_IF_ERROR(add_line(list, std::string_view(text).substr(begin, end - begin)));
    begin = end + 1;
  }
  if (!list.hosts.empty()) return list.hosts;
  return make_error(ExitCode::kConfig, fmt::format("launch: the host file {} names no host. [T0852] hint: write one "
                                                   "host a line, as in: a slots=2",
                                                   list.name));
}

std::string address_of(const HostSlots& host) { return host.name.substr(host.name.rfind('@') + 1); }

}  // namespace tessera
